"""What packages have, found by looking into all their modules."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from types import ModuleType

__all__ = ["public_classes", "public_names"]

_NOT_LOOKED_AT = re.compile(r"\b(tests?|test_utils|benchmark|__main__)\b")


@functools.cache
def public_classes(package: str) -> dict[str, type]:
    """The classes of a package's modules whose name has no underscore in front, by name."""
    return {name: value for name, value in _defined(package).items() if inspect.isclass(value)}


def public_names(package: str) -> set[str]:
    """The names of its classes and functions."""
    return set(_defined(package))


@functools.cache
def _defined(package: str) -> dict[str, object]:
    root = importlib.import_module(package)
    found = pkgutil.walk_packages(root.__path__, f"{package}.")
    names = [info.name for info in found if not _NOT_LOOKED_AT.search(info.name)]
    modules = [root, *filter(None, map(_imported, names))]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
        if value.__module__ == module.__name__
    }


def _imported(name: str) -> ModuleType | None:
    """The module; None if it has kernels for cuda, and what they are written in is not here."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
