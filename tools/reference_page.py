"""Writes the tables of public names in docs/reference/python.md from the code.

.venv/bin/python tools/reference_page.py [--check]

Each module's names are those of its `__all__`, with the first sentence of their docstrings.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "python.md"
BEGIN, END = "<!-- names: made by tools/reference_page.py -->\n", "<!-- end of names -->\n"

MODULES = (
    "recsdk_core",
    "recsdk_core.optim",
    "recsdk_core.init",
    "recsdk_core.checkpoint",
    "recsdk_core.files",
    "recsdk_core.predicates",
    "recsdk_core.serving",
    "recsdk_core.simulation",
    "recsdk_core.nn",
    "recsdk_core.nn.function",
    "recsdk_core.nn.joined",
    "recsdk_core.testing",
    "recsdk_sharding",
    "recsdk_sharding.planning",
    "recsdk_sharding.tensor_parallel",
    "recsdk_sharding.exchange",
    "recsdk_pipeline",
    "recsdk_pipeline.data",
    "recsdk_pipeline.telemetry",
)
"""Those that are meant to be imported by users."""


def sentence(value: Any, module: Any, name: str) -> str:
    """What a name is, in one line."""
    is_described = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    text = (inspect.getdoc(value) if is_described else None) or text_below(module, name)
    first = re.split(r"(?<=\.)\s|\n\n", inspect.cleandoc(text), maxsplit=1)[0]
    return " ".join(first.split()).rstrip(":")


def text_below(module: Any, name: str) -> str:
    """The string below a constant or a type alias, where it is defined; "" if there is none."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, after in itertools.pairwise(body):
        if name in targets_of(statement) and isinstance(after, ast.Expr):
            return str(ast.literal_eval(after.value))
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and name in {
            each.name for each in statement.names
        }:
            home = importlib.import_module(str(statement.module))
            return text_below(home, name) if str(home.__file__).endswith(".py") else ""
    return ""


def targets_of(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value."""
    if isinstance(statement, ast.Assign):
        found: list[ast.expr] = statement.targets
    else:
        found = [statement.target] if isinstance(statement, ast.AnnAssign) else []
    return {each.id for each in found if isinstance(each, ast.Name)}


def table_of(name: str) -> str:
    """A heading and a row for each public name of a module."""
    module = importlib.import_module(name)
    about = sentence(module, module, name)
    rows = [f"### `{name}`\n\n{about}\n\n| name | what it is |\n|---|---|\n"]
    names = [each for each in module.__all__ if not each.startswith("__")]
    for public in sorted(names, key=lambda each: (each.lower(), each)):
        value = getattr(module, public)
        text = sentence(value, module, public).replace("|", "\\|")
        rows.append(f"| `{public}` | {text} |\n")
    return "".join(rows)


def page(text: str) -> str:
    """The page with its tables as the code has them."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(map(table_of, MODULES)) + "\n" + END + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    args = parser.parse_args()
    text = PAGE.read_text()
    wanted = page(text)
    if text == wanted:
        return 0
    if args.check:
        print(f"{PAGE.name} is not what the code says; run tools/reference_page.py")
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
