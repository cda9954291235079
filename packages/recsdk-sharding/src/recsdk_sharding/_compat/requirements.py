"""Checks at import that the versions of what this package builds on fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["Requirement", "check_requirements", "say_what_was_found"]

_log = logging.getLogger("recsdk_sharding")
_FBGEMM = ("fbgemm-gpu-cpu", "fbgemm-gpu")
"""Distributions of fbgemm; where the first is, the second is an empty one."""


@dataclass(frozen=True)
class Requirement:
    """A range of versions of a distribution, on (major, minor)."""

    name: str
    lowest: tuple[int, int]
    below: tuple[int, int]
    install: str

    def problem(self, found: str | None) -> str | None:
        """What is wrong with the found version (None: not installed), and what to do."""
        if found is not None:
            major, minor = found.split(".")[:2]
            if self.lowest <= (int(major), int(minor)) < self.below:
                return None
        wanted = f"{self.name}>={_dotted(self.lowest)},<{_dotted(self.below)}"
        what = "it is not installed" if found is None else f"found {found}"
        return f"recsdk_sharding needs {wanted}; {what}; install it with: {self.install}"


REQUIREMENTS = (
    Requirement("recsdk-core", (0, 1), (0, 2), 'pip install "recsdk-core>=0.1,<0.2"'),
    Requirement("torch", (2, 11), (2, 14), 'pip install "torch==2.13.*"'),
    Requirement("torchrec", (1, 6), (1, 9), 'pip install "torchrec==1.8.*"'),
)


def check_requirements(found: Callable[[str], str | None] | None = None) -> None:
    """Raises ImportError naming the first requirement that is not met and the line to install.

    `found` gives the installed version of a distribution, or None; by default from its metadata.
    """
    look_up = found or _installed_version
    for requirement in REQUIREMENTS:
        problem = requirement.problem(look_up(requirement.name))
        if problem is not None:
            raise ImportError(problem)


def say_what_was_found() -> None:
    """Logs, at level INFO, the versions of what this package builds on."""
    names = [requirement.name for requirement in REQUIREMENTS]
    found = {name: _installed_version(name) for name in (*names, *_FBGEMM)}
    if found[_FBGEMM[0]] is not None:
        del found[_FBGEMM[1]]
    known = [f"{name} {number}" for name, number in found.items() if number is not None]
    _log.info("recsdk_sharding runs with %s", ", ".join(known))


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
