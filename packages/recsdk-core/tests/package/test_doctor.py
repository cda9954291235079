"""`recsdk doctor` and the command it belongs to."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from recsdk_core import cli, doctor, isa

FITTING = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm-gpu": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "recsdk-sharding": "0.1.0",
}


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.main, args)


def test_runs() -> None:
    result = run("doctor")
    assert re.search(rf"^instruction set +{isa()} ", result.output, re.MULTILINE)
    assert "recsdk-core" in result.output


def test_json() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.output)
    assert report["isa"] == isa()
    assert report["packages"]["numpy"]
    assert result.exit_code == bool(report["problems"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"torch": "2.12.1", "fbgemm-gpu-cpu": "1.7.0"}, None),
        ({"torch": "2.11.0", "fbgemm-gpu-cpu": "1.6.0", "torchrec": "1.6.1"}, None),
        ({"torch": "2.12.1"}, "fbgemm 1.8.0 does not fit, 1.7 is needed; run: pip install"),
        ({"torch": "2.10.0"}, "torch 2.10.0 does not fit, 2.11 or 2.12 or 2.13 is needed; run: "),
        ({"torch": "2.130.0"}, "torch 2.130.0 does not fit"),
        ({"torchrec": "1.5.0"}, "torchrec 1.5.0 does not fit"),
        ({"torchrec": None}, "torchrec 1.8 is missing; run: pip install"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, "fbgemm 1.7.0 does not fit"),
        ({"fbgemm-gpu-cpu": None, "fbgemm-gpu": None}, "fbgemm 1.8 is missing"),
        ({"fbgemm-gpu-cpu": None}, "is the CUDA build and there is no CUDA device"),
    ],
)
def test_mismatches_name_the_line_to_install(
    changes: dict[str, str | None], problem: str | None
) -> None:
    found = doctor.mismatches({**FITTING, **changes}, has_cuda=False)
    assert [line for line in found if problem is None or problem not in line] == []
    assert bool(found) == (problem is not None)
    assert all("pip install" in line for line in found)


def test_without_torchrec_any_torch_is_fine() -> None:
    packages = {**FITTING, "torch": "2.5.0", "torchrec": None, "recsdk-sharding": None}
    assert doctor.mismatches(packages, has_cuda=False) == []


def test_a_cuda_machine_is_told_the_cuda_build() -> None:
    packages = {**FITTING, "fbgemm-gpu": None, "fbgemm-gpu-cpu": None}
    [problem] = doctor.mismatches(packages, has_cuda=True)
    assert '"fbgemm-gpu==1.8.*"' in problem


def test_devices_and_huge_pages(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    pages = tmp_path / "enabled"
    pages.write_text("always madvise [never]\n", encoding="ascii")
    report = doctor.examine(FITTING.get, {"ASCEND_HOME_PATH": "/opt"}, tmp_path, pages)
    assert report.cuda
    assert report.npu
    assert report.huge_pages == "never"
    assert any("huge pages are never" in note for note in report.notes)
    report = doctor.examine(FITTING.get, {}, tmp_path / "none", tmp_path / "missing")
    assert not report.cuda
    assert not report.npu
    assert report.huge_pages is None
    assert report.problems == []


def backends(tmp_path: Path, packages: dict[str, str], **environment: str) -> dict[str, str]:
    def load(name: str) -> None:
        if name != "there.so":
            raise OSError("no such file")

    return doctor.examine(packages.get, environment, tmp_path, load_library=load).backends


NO_NPU = "not found: torch-npu is not installed"


@pytest.mark.parametrize(
    ("packages", "environment", "found"),
    [
        ({}, {}, NO_NPU),
        ({"recsdk-npusim": "0.1"}, {}, f"{NO_NPU}; a simulation is installed, RECSDK_SIM_NPU=1"),
        ({"recsdk-npusim": "0.1"}, {"RECSDK_SIM_NPU": "1"}, "simulated: RECSDK_SIM_NPU=1"),
        ({}, {"RECSDK_SIM_NPU": "1"}, "not found: RECSDK_SIM_NPU=1, but recsdk-npusim"),
        ({"torch-npu": "2.13.0"}, {}, "torch-npu 2.13.0"),
        ({"torch-npu": "2.13.0"}, {"RECSDK_SIM_NPU": "1"}, "refused: RECSDK_SIM_NPU=1"),
    ],
)
def test_how_torch_has_an_npu(
    tmp_path: Path, packages: dict[str, str], environment: dict[str, str], found: str
) -> None:
    assert backends(tmp_path, packages, **environment)["npu, by torch"].startswith(found)


def test_whether_the_runtime_of_an_npu_is_found(tmp_path: Path) -> None:
    missing = backends(tmp_path, {})["npu, by the engine"]
    assert missing.startswith("not found: libascendcl.so; install CANN")
    other = backends(tmp_path, {}, RECSDK_ACL_LIBRARY="other.so")["npu, by the engine"]
    assert other.startswith("not found: other.so")
    there = backends(tmp_path, {}, RECSDK_ACL_LIBRARY="there.so")["npu, by the engine"]
    assert there == "found: there.so"


def test_whether_there_is_cuda(tmp_path: Path) -> None:
    assert backends(tmp_path, {})["cuda, by torch"] == "not found: no device"
    (tmp_path / "nvidia0").touch()
    assert backends(tmp_path, {})["cuda, by torch"] == "not found: torch is not installed"
    built_for_cpu = backends(tmp_path, FITTING)["cuda, by torch"]
    assert built_for_cpu == "not found: torch 2.13.0+cpu is built for the cpu"
    alone = backends(tmp_path, {"torch": "2.13.0"})["cuda, by torch"]
    assert alone == "torch 2.13.0, tables on its operators: triton is not installed"


def test_which_kernels_tables_on_cuda_run_on(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    packages = {"torch": "2.13.0", "triton": "3.7.1"}
    by_default = backends(tmp_path, packages)["cuda, by torch"]
    assert by_default == "torch 2.13.0, tables on kernels of triton 3.7.1"
    chosen = backends(tmp_path, packages, RECSDK_DEVICE_KERNELS="torch")["cuda, by torch"]
    assert chosen == "torch 2.13.0, tables on its operators: RECSDK_DEVICE_KERNELS=torch"


def test_backends_are_printed() -> None:
    output = run("doctor").output
    for name in ("cpu", "npu, by the engine", "npu, by torch", "cuda, by torch"):
        assert f"backend {name}  " in output


def test_something_broken_gives_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {**FITTING, "torch": "1.0"}
    monkeypatch.setattr(doctor, "installed_version", broken.get)
    result = run("doctor")
    assert result.exit_code == 1
    assert "problem: torch 1.0 does not fit" in result.output


def test_a_wrong_instruction_set_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise ValueError("RECSDK_ISA is mmx")

    monkeypatch.setattr(doctor.runtime, "isa", fail)
    assert "RECSDK_ISA is mmx" in doctor.examine(FITTING.get).problems


class TestCommands:
    def use(self, monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
        entries = [EntryPoint(name, value, cli.GROUP) for name, value in values.items()]
        monkeypatch.setattr(cli, "entry_points", lambda group: entries)

    def test_version(self) -> None:
        assert "recsdk, version" in run("--version").output

    def test_a_layer_adds_a_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, check="recsdk_core.doctor:doctor")
        assert "check" in run("--help").output
        assert run("check", "--help").exit_code == 0
        assert run("missing").exit_code == 2

    def test_a_command_of_a_layer_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch)
        for command, layer in (("plan", "recsdk-sharding"), ("data", "recsdk-pipeline")):
            result = run(command, "describe", "--help")
            assert result.exit_code == 2
            assert f"comes with {layer}; run: pip install {layer}" in result.output

    def test_a_broken_layer_breaks_its_own_command_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.use(monkeypatch, broken="no_such_module:main", check="recsdk_core.doctor:doctor")
        assert run("--help").exit_code == 0
        for said in ([], ["--output", "x", "part", "-n"], ["--help"]):
            result = run("broken", *said)
            assert result.exit_code == 1
            assert "the command broken of no_such_module:main does not load: Mod" in result.output

    @pytest.mark.parametrize(
        ("source", "listed"),
        [
            ("@click.command()", "odd  By its docstring."),
            ("@click.option('--x', help='a')\n@click.group()", "odd  By its docstring."),
            ("@click.command(short_help='By itself.')", "odd  By itself."),
            ("@click.command(hidden=True)", ""),
            ("fail(", "odd  (broken) the command odd of"),
        ],
    )
    def test_what_is_listed_of_a_command(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, listed: str
    ) -> None:
        layer = tmp_path / re.sub(r"\W", "_", tmp_path.name)  # a name of its own, as it is imported
        layer.mkdir()
        (layer / "__init__.py").touch()
        text = f'import click\n{source}\ndef odd(**_):\n    """By its docstring."""\n'
        (layer / "command.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        self.use(monkeypatch, odd=f"{layer.name}.command:odd")
        output = run("--help").output
        assert listed in output
        assert ("odd" in output) == bool(listed)

    def test_an_entry_that_is_no_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.use(monkeypatch, odd="recsdk_core.doctor:examine")
        assert "is no click command" in run("odd").output
        assert isinstance(cli.main, click.Group)
