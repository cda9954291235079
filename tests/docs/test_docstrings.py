"""What a public callable raises, its docstring names: but TypeError, which all raise alike."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import reference_page

MAKERS = ("__init__", "__post_init__")
Described = tuple[str, str, Callable[..., Any]]


def functions_of(value: Any) -> list[Callable[..., Any]]:
    """Those that an attribute of a class runs."""
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    else:
        parts = [value.__func__ if isinstance(value, (staticmethod, classmethod)) else value]
    return [each for each in parts if has_lines(each)]


def has_lines(value: Any) -> bool:
    """Not of what the engine has, or a dataclass made."""
    return inspect.isfunction(value) and not value.__code__.co_filename.startswith("<")


def described(name: str, value: Any) -> Iterator[Described]:
    """What is public of a name, each with the docstring that speaks for it."""
    text = inspect.getdoc(value) or ""
    if has_lines(value):
        yield name, text, value
    if not inspect.isclass(value):
        return
    for own, attribute in attributes_of(value).items():
        for function in functions_of(attribute):
            about = inspect.getdoc(attribute) or ""
            if own in MAKERS:
                yield f"{name}.{own}", text + about, function
            elif not own.startswith("_"):
                yield f"{name}.{own}", about, function


def attributes_of(value: type) -> dict[str, Any]:
    """Its own, and what it has of classes that are not public."""
    names: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base is value or is_ours(base):
            names.update(vars(base))
    return names


def unnamed(text: str, function: Callable[..., Any]) -> set[str]:
    """The errors that a function's own lines raise, and a docstring does not name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc.func for node in ast.walk(tree) if is_raise_of_call(node)]  # type: ignore
    names = {call.id for call in calls if isinstance(call, ast.Name) and call.id.endswith("Error")}
    return {name for name in names - {"TypeError"} if name not in text}


def is_raise_of_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)


@pytest.mark.parametrize("module", reference_page.MODULES)
def test_docstrings_name_the_errors_that_are_raised(module: str) -> None:
    public = importlib.import_module(module)
    own = [each for each in public.__all__ if is_ours(getattr(public, each))]
    missing = {
        name: errors
        for each in own
        for name, text, function in described(each, getattr(public, each))
        if (errors := unnamed(text, function))
    }
    assert missing == {}, "say 'Raises ... for ...' in each of these docstrings"


def is_ours(value: Any) -> bool:
    is_error = inspect.isclass(value) and issubclass(value, BaseException)
    return getattr(value, "__module__", "").startswith("recsdk") and not is_error


class Part:
    """Not public."""

    __module__ = "recsdk_core"

    def inherited(self) -> None:
        """Nothing."""
        raise KeyError("told")


class Example(Part):
    """Raises ValueError."""

    def __init__(self) -> None:
        """None."""
        raise ValueError("made")

    @property
    def named(self) -> int:
        """A number, or KeyError."""
        raise KeyError("read")

    @property
    def hidden(self) -> int:
        """A number."""
        raise TypeError("a mistake") from KeyError("read")

    @staticmethod
    def silent(number: int) -> None:
        """Nothing."""
        if number:
            raise LookupError("found")


def test_errors_that_no_docstring_names_are_found() -> None:
    found = {name: unnamed(text, function) for name, text, function in described("E", Example)}
    assert found == {
        "E.__init__": set(),
        "E.named": set(),
        "E.hidden": set(),
        "E.silent": {"LookupError"},
        "E.inherited": {"KeyError"},
    }
