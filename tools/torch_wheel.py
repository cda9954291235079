"""Which build of torch pip would take, and how much that is, before anything is downloaded.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Download sizes with all dependencies, summed from what pip resolved for 2.13.0 on x86_64; of the
# others without and with the tools of `make lint`.
ROUGH_SIZE = {"cpu": "about 200 MB", "cuda": "about 2.7 GB"}
OTHER_SIZE = "60 to 140 MB"


@dataclass(frozen=True)
class TorchWheel:
    """The wheel of torch that pip chose."""

    version: str
    kind: str
    """"cpu", "cuda", or the local version's letters of another accelerator's build, as "rocm"."""

    @property
    def size(self) -> str:
        return ROUGH_SIZE.get(self.kind, "several GB")


def wheel_of_report(report: Mapping[str, Any]) -> TorchWheel:
    """Reads the JSON of `pip install --dry-run --no-deps --report - torch`.

    The local version (+cpu, +cu130) tells the build; without one, dependencies on NVIDIA's
    libraries do.
    Raises ValueError if the report holds no torch.
    """
    for item in report.get("install", []):
        metadata = item["metadata"]
        if metadata["name"].lower() == "torch":
            return TorchWheel(metadata["version"], _kind(metadata))
    raise ValueError("pip's report names no torch to install")


def _kind(metadata: Mapping[str, Any]) -> str:
    _, _, local = metadata["version"].partition("+")
    if local:
        letters = re.match(r"[a-z]*", local)
        name = letters.group() if letters else local
        return "cuda" if name == "cu" else name
    on_this_machine = [
        requirement
        for requirement in metadata.get("requires_dist") or []
        if re.match(r"nvidia-|cuda-|triton\b", requirement) and _applies_here(requirement)
    ]
    return "cuda" if on_this_machine else "cpu"


def _applies_here(requirement: str) -> bool:
    """Whether the marker of a requirement, if it names a platform, names this one."""
    named = re.search(r"platform_system == ['\"](\w+)['\"]", requirement)
    return named is None or named.group(1) == platform.system()


def parse_report(text: str) -> TorchWheel:
    return wheel_of_report(json.loads(text))


def announcement(wheel: TorchWheel, *, is_default_index: bool) -> list[str]:
    """The lines to print before downloading."""
    what = f"torch {wheel.version} ({wheel.kind} build, {wheel.size})"
    lines = [f"will download {what} and {OTHER_SIZE} of other packages into .venv"]
    if wheel.kind == "cuda" and is_default_index:
        lines = [
            "plain pip would take the CUDA build of torch here. Without an NVIDIA GPU the CPU",
            f"build ({ROUGH_SIZE['cpu']}) is enough: stop this (Ctrl-C) and take it from",
            f"the PyTorch CPU index:  TORCH_INDEX={CPU_INDEX} make ...",
            *lines,
        ]
    return lines
