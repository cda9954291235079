"""What griffe, which reads the sources, is told: names that load late, and sessions as code."""

from __future__ import annotations

import importlib
import re
from typing import Any

import griffe

SESSION = re.compile(r"(?:^[ ]*>>> .*\n?(?:^(?![ ]*$).+\n?)*)", re.M)


class Sessions(griffe.Extension):
    """Puts fences around each `>>> ` paragraph, which Markdown would read as quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


class LateNames(griffe.Extension):
    """Adds the public names that a module's `__getattr__` imports when they are first used."""

    def on_module(self, *, mod: griffe.Module, **_: Any) -> None:
        if "__getattr__" not in mod.members:
            return
        late = {str(name) for name in mod.exports or ()} - mod.members.keys()
        for name in sorted(late):
            value = getattr(importlib.import_module(mod.path), name)
            mod.set_member(name, griffe.Alias(name, f"{value.__module__}.{value.__qualname__}"))


def fenced(text: str) -> str:
    """The text with its sessions as blocks of code."""
    return SESSION.sub(lambda found: f"```pycon\n{found.group().rstrip()}\n```\n", text)
