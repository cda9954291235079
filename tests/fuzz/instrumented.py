"""Tells atheris what is reached of a module."""

from __future__ import annotations

import inspect
from types import ModuleType

import atheris

__all__ = ["instrument"]


def instrument(module: ModuleType) -> None:
    """Has the module's functions tell atheris what they reach; its import hook would not, as the
    loader of an editable install is not Python's own."""
    owners = [module, *(c for c in vars(module).values() if inspect.isclass(c))]
    for owner in owners:
        for value in vars(owner).values():
            function = getattr(value, "__func__", value)
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                atheris.instrument_func(function)
