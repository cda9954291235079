"""What the set-up says about torch, from pip's reports as they look on several machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

import torch_wheel

COMMON = ["filelock", "sympy>=1.13.3", 'pyyaml; extra == "pyyaml"']
CUDA_LIBRARIES = [
    'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
    'triton==3.7.1; platform_system == "Linux"',
]


@pytest.fixture(autouse=True)
def _on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")


def report(version: str, requires: list[str]) -> dict[str, Any]:
    other = {"metadata": {"name": "numpy", "version": "2.4.6"}}
    torch = {"metadata": {"name": "torch", "version": version, "requires_dist": requires}}
    return {"version": "1", "install": [other, torch]}


@pytest.mark.parametrize(
    ("version", "requires", "kind"),
    [
        ("2.13.0", COMMON + CUDA_LIBRARIES, "cuda"),
        ("2.13.0", COMMON, "cpu"),
        ("2.13.0+cpu", COMMON, "cpu"),
        ("2.13.0+cu130", COMMON, "cuda"),
        ("2.13.0+rocm7.1", COMMON, "rocm"),
    ],
)
def test_the_build_is_recognized(version: str, requires: list[str], kind: str) -> None:
    wheel = torch_wheel.parse_report(json.dumps(report(version, requires)))
    assert (wheel.version, wheel.kind) == (version, kind)


def test_libraries_of_another_platform_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert torch_wheel.wheel_of_report(report("2.13.0", CUDA_LIBRARIES)).kind == "cpu"


def test_no_dependencies_at_all() -> None:
    bare = {"install": [{"metadata": {"name": "torch", "version": "2.13.0"}}]}
    assert torch_wheel.wheel_of_report(bare).kind == "cpu"


def test_a_report_without_torch_is_an_error() -> None:
    with pytest.raises(ValueError, match="no torch"):
        torch_wheel.wheel_of_report({"install": []})


def test_the_cpu_index_is_named_before_the_cuda_build_is() -> None:
    cuda = torch_wheel.TorchWheel("2.13.0", "cuda")
    lines = "\n".join(torch_wheel.announcement(cuda, is_default_index=True))
    assert lines.index(torch_wheel.CPU_INDEX) < lines.index("will download torch 2.13.0")
    assert "2.7 GB" in lines


def test_an_index_that_was_chosen_is_not_argued_with() -> None:
    cuda = torch_wheel.TorchWheel("2.13.0+cu130", "cuda")
    lines = "\n".join(torch_wheel.announcement(cuda, is_default_index=False))
    assert torch_wheel.CPU_INDEX not in lines


def test_the_cpu_build_needs_no_advice() -> None:
    (line,) = torch_wheel.announcement(
        torch_wheel.TorchWheel("2.13.0+cpu", "cpu"), is_default_index=True
    )
    assert "about 200 MB" in line


def test_another_accelerator_has_a_rough_size_too() -> None:
    assert torch_wheel.TorchWheel("2.13.0+rocm7.1", "rocm").size == "several GB"
