"""`recsdk doctor`: what is installed, what this machine offers, and what does not fit together."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import click

from recsdk_core import runtime

__all__ = ["Report", "doctor", "examine"]

T = TypeVar("T")

PACKAGES = (
    "recsdk-core",
    "recsdk-sharding",
    "recsdk-pipeline",
    "nanobind-backend",
    "numpy",
    "torch",
    "torchrec",
    "fbgemm-gpu",
    "fbgemm-gpu-cpu",
    "torch-npu",
    "triton",
    "recsdk-npusim",
)
FBGEMM_OF_TORCH = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8"}
"""The releases of torch that recsdk-sharding works with, and the fbgemm that fits each."""
TORCHRECS = ("1.6", "1.7", "1.8")
"""The releases of torchrec that recsdk-sharding works with."""
INSTALL_CPU = 'pip install "torch==2.13.*" "torchrec==1.8.*" "fbgemm-gpu-cpu==1.8.*"'
INSTALL_CUDA = 'pip install "torch==2.13.*" "torchrec==1.8.*" "fbgemm-gpu==1.8.*"'
ACL_LIBRARY = "libascendcl.so"
"""Ascend's runtime, as the engine loads it."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(kw_only=True)
class Report:
    """What `recsdk doctor` prints; problems are what is broken, notes what costs speed."""

    python: str
    platform: str
    packages: dict[str, str | None]
    isa: str | None
    available_isas: list[str]
    num_threads: int | None
    huge_pages: str | None
    cuda: bool
    npu: bool
    backends: dict[str, str]
    """Each place where rows can be, and whether what it needs was found."""
    commands: list[str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine(
    look_up: Callable[[str], str | None] | None = None,
    environment: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
    huge_pages: Path = HUGE_PAGES,
    load_library: Callable[[str], object] = ctypes.CDLL,
) -> Report:
    """Looks at this process's Python and machine; imports neither torch nor what builds on it.

    Tries to load the library of Ascend's runtime.
    """
    packages = {name: (look_up or installed_version)(name) for name in PACKAGES}
    problems: list[str] = []
    report = Report(
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages,
        isa=_attempt(runtime.isa, problems),
        available_isas=runtime.available_isas(),
        num_threads=_attempt(runtime.num_threads, problems),
        huge_pages=_chosen_word(huge_pages),
        cuda=has_cuda(devices),
        npu=has_npu(devices, environment),
        backends=_backends(packages, environment, devices, load_library),
        commands=sorted(entry.name for entry in entry_points(group="recsdk.commands")),
        problems=problems,
    )
    problems += mismatches(packages, report.cuda)
    report.notes += _notes(report)
    return report


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, read from its metadata."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def has_cuda(devices: Path) -> bool:
    """True if an NVIDIA device file is there."""
    return (devices / "nvidia0").exists() or (devices / "nvidiactl").exists()


def has_npu(devices: Path, environment: Mapping[str, str]) -> bool:
    """True if an Ascend device file is there, or its toolkit is set up."""
    return (devices / "davinci_manager").exists() or "ASCEND_HOME_PATH" in environment


def _backends(
    packages: Mapping[str, str | None],
    environment: Mapping[str, str],
    devices: Path,
    load_library: Callable[[str], object],
) -> dict[str, str]:
    """Each backend with what was found of it; see docs/howto/run_on_an_npu.md."""
    return {
        "cpu": "the engine",
        "npu, by the engine": _runtime(environment, load_library),
        "npu, by torch": _npu_of_torch(packages, environment),
        "cuda, by torch": _cuda_of_torch(packages, environment, devices),
    }


def _runtime(environment: Mapping[str, str], load_library: Callable[[str], object]) -> str:
    name = environment.get("RECSDK_ACL_LIBRARY") or ACL_LIBRARY
    try:
        load_library(name)
    except OSError:
        return f"not found: {name}; install CANN and source its set_env.sh"
    return f"found: {name}"


def _npu_of_torch(packages: Mapping[str, str | None], environment: Mapping[str, str]) -> str:
    real, simulation = packages.get("torch-npu"), packages.get("recsdk-npusim")
    is_asked = environment.get("RECSDK_SIM_NPU") == "1"
    if is_asked and real:
        return "refused: RECSDK_SIM_NPU=1, but torch-npu is installed; unset the variable"
    if is_asked and simulation:
        return "simulated: RECSDK_SIM_NPU=1, no Ascend hardware is used"
    if is_asked:
        return "not found: RECSDK_SIM_NPU=1, but recsdk-npusim is not installed"
    if real:
        return f"torch-npu {real}"
    off = "; a simulation is installed, RECSDK_SIM_NPU=1 turns it on" if simulation else ""
    return f"not found: torch-npu is not installed{off}"


def _cuda_of_torch(
    packages: Mapping[str, str | None], environment: Mapping[str, str], devices: Path
) -> str:
    if not has_cuda(devices):
        return "not found: no device"
    torch = packages.get("torch")
    if torch is None:
        return "not found: torch is not installed"
    if torch.endswith("+cpu"):
        return f"not found: torch {torch} is built for the cpu"
    return f"torch {torch}, tables on {_cuda_kernels(packages, environment)}"


def _cuda_kernels(packages: Mapping[str, str | None], environment: Mapping[str, str]) -> str:
    """What recsdk-sharding takes; whether Triton works it finds out when a table is made."""
    asked, triton = environment.get("RECSDK_DEVICE_KERNELS"), packages.get("triton")
    if asked == "torch":
        return "its operators: RECSDK_DEVICE_KERNELS=torch"
    if triton is None:
        return "its operators: triton is not installed"
    return f"kernels of triton {triton}"


def mismatches(packages: Mapping[str, str | None], has_cuda: bool) -> list[str]:
    """What does not fit among torch, torchrec and fbgemm, each with the install command."""
    install = INSTALL_CUDA if has_cuda else INSTALL_CPU
    fbgemm = packages.get("fbgemm-gpu-cpu") or packages.get("fbgemm-gpu")
    found = {"torch": packages.get("torch"), "torchrec": packages.get("torchrec")}
    found["fbgemm"] = fbgemm
    if packages.get("recsdk-sharding") is None and found["torchrec"] is None:
        return []
    problems = []
    release = ".".join((found["torch"] or "").split(".")[:2])
    wanted_fbgemm = FBGEMM_OF_TORCH.get(release, FBGEMM_OF_TORCH["2.13"])
    wanted = {"torch": tuple(FBGEMM_OF_TORCH), "torchrec": TORCHRECS, "fbgemm": (wanted_fbgemm,)}
    for name, releases in wanted.items():
        got = found[name]
        if got is None:
            problems.append(f"{name} {releases[-1]} is missing; run: {install}")
        elif ".".join(got.split(".")[:2]) not in releases:
            fitting = " or ".join(releases)
            problems.append(f"{name} {got} does not fit, {fitting} is needed; run: {install}")
    cuda_build = packages.get("fbgemm-gpu")
    if fbgemm and not packages.get("fbgemm-gpu-cpu") and cuda_build and not has_cuda:
        problems.append(
            f"fbgemm-gpu {cuda_build} is the CUDA build and there is no CUDA device; run: "
            'pip uninstall -y fbgemm-gpu && pip install "fbgemm-gpu-cpu==1.8.*"'
        )
    return problems


def _attempt(read: Callable[[], T], problems: list[str]) -> T | None:
    """The value, or None with the error among the problems."""
    try:
        return read()
    except ValueError as error:
        problems.append(str(error))
        return None


def _chosen_word(path: Path) -> str | None:
    """The word in brackets of a kernel setting such as "always [madvise] never"."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _notes(report: Report) -> list[str]:
    notes = []
    if report.huge_pages not in ("always", "madvise"):
        notes.append(
            f"huge pages are {report.huge_pages or 'unknown'}: lookups in large tables are slower; "
            f"as root: echo madvise > {HUGE_PAGES}"
        )
    if report.npu and find_spec("torch_npu") is None:
        notes.append('an NPU is here without torch_npu; run: pip install "torch_npu>=2.11,<2.14"')
    return notes


def _lines(report: Report) -> list[str]:
    rows = {
        "python": report.python,
        "platform": report.platform,
        **{name: found or "-" for name, found in report.packages.items()},
        "instruction set": f"{report.isa} (available: {', '.join(report.available_isas)})",
        "threads": str(report.num_threads),
        "huge pages": report.huge_pages or "unknown",
        "cuda device": "yes" if report.cuda else "no",
        "npu device": "yes" if report.npu else "no",
        **{f"backend {name}": found for name, found in report.backends.items()},
        "commands": ", ".join(report.commands),
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    lines += [f"note: {note}" for note in report.notes]
    lines += [f"problem: {problem}" for problem in report.problems]
    return lines if report.problems else [*lines, "no problems found"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Say what is installed, and what does not fit together.

    The exit status is 1 if something is broken.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        click.echo("\n".join(_lines(report)))
    if report.problems:
        raise click.exceptions.Exit(1)
