"""Pages of the public names of Python modules, and the check that the site has them all."""

from __future__ import annotations

import importlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import reference_page

__all__ = ["linked", "missing_names", "pages"]

HEADING = re.compile(r"^### `([\w.]+)`$")
ROW = re.compile(r"^\| `(\w+)` \|")


def public_names(module: str) -> list[str]:
    """Names of a module's `__all__` that are no modules: those have pages of their own."""
    found = importlib.import_module(module)
    names: Sequence[str] = found.__all__
    return [
        name
        for name in sorted(names, key=str.lower)
        if not name.startswith("__") and not isinstance(getattr(found, name), ModuleType)
    ]


def pages() -> dict[str, str]:
    """Markdown by path in the site: a page for each module, with the docstrings of its names."""
    return {f"reference/{module}.md": page(module) for module in reference_page.MODULES}


def page(module: str) -> str:
    about = importlib.import_module(module).__doc__ or ""
    names = "\n\n".join(f"::: {module}.{name}" for name in public_names(module))
    return f"# {module}\n\n{about}\n\n{names}\n"


def linked(markdown: str) -> str:
    """The page of all names, with links to what each name is."""
    module, lines = "", []
    for line in markdown.splitlines():
        if heading := HEADING.match(line):
            module = heading[1]
        if module and (row := ROW.match(line)):
            line = row.re.sub(f"| {link(module, row[1])} |", line)
        lines.append(line)
    return "\n".join(lines)


def link(module: str, name: str) -> str:
    value = getattr(importlib.import_module(module), name)
    if isinstance(value, ModuleType):
        return f"[`{name}`]({value.__name__}.md)"
    return f"[`{name}`][{module}.{name}]"


def missing_names(site: Path) -> list[str]:
    """Public names that the site's inventory lacks."""
    body = (site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]
    known = {line.split()[0] for line in zlib.decompress(body).decode().splitlines()}
    wanted = {f"{m}.{name}" for m in reference_page.MODULES for name in public_names(m)}
    return sorted(wanted - known)
