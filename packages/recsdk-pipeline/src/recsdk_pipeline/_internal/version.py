"""This package's version, and the check that the layer below fits it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__version__ = version("recsdk-pipeline")

_LOWEST = (0, 1)
_BELOW = (0, 2)


def check_layers() -> None:
    """Raise ImportError with the line to install unless a fitting recsdk-sharding is there."""
    problem = layer_problem(_installed("recsdk-sharding"))
    if problem is not None:
        raise ImportError(problem)


def layer_problem(found: str | None) -> str | None:
    """Return what is wrong with version `found` of recsdk-sharding (None: not installed)."""
    if found is not None and _LOWEST <= _major_minor(found) < _BELOW:
        return None
    what = "it is not installed" if found is None else f"found {found}"
    return (
        f"recsdk_pipeline {__version__} needs recsdk-sharding>=0.1,<0.2; {what}; "
        'install it with: pip install "recsdk-sharding>=0.1,<0.2"'
    )


def _major_minor(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
