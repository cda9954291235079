"""What the package imports, exports and says of itself."""

from __future__ import annotations

import ast
import doctest
import enum
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import recsdk_core
from recsdk_core import Outcome, _ext
from recsdk_core._internal.extras import require
from recsdk_core._internal.version import check_compiled_version

SOURCE = Path(recsdk_core.__file__).parent
MODULES = [
    "init", "optim", "outcome", "stats", "runtime", "table", "tables", "testing.reference",
]  # fmt: skip


def test_torch_and_hypothesis_are_not_imported() -> None:
    code = (
        "import sys, recsdk_core, recsdk_core.cli, recsdk_core.doctor\n"
        "recsdk_core.doctor.examine()\n"
        "print(sorted({'torch', 'hypothesis', 'pytest', 'torchrec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=400
    )
    assert done.stdout.strip() == "[]"


def test_everything_exported_exists() -> None:
    for name in recsdk_core.__all__:
        assert getattr(recsdk_core, name) is not None


def test_outcomes_are_the_engines() -> None:
    assert {outcome.name: outcome.value for outcome in Outcome} == _ext.OUTCOMES


def test_a_compiled_part_of_another_version_is_refused() -> None:
    check_compiled_version(recsdk_core.__version__)
    with pytest.raises(ImportError, match=r"_ext of version 9.9.9.*pip install --force-reinstall"):
        check_compiled_version("9.9.9")


def test_a_sub_interpreter_is_refused_and_leaves_the_main_one_as_it_was() -> None:
    code = """
import numpy as np
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
refused = '''
for name in ("recsdk_core", "recsdk_core._ext", "recsdk_core.serving"):
    try:
        __import__(name)
    except ImportError as error:
        assert "main interpreter" in str(error), error
    else:
        raise AssertionError(name)
'''
def import_elsewhere():
    other = interpreters.create()
    assert interpreters.run_string(other, refused) is None
    interpreters.destroy(other)
import_elsewhere()
import recsdk_core
for _ in range(2):
    table = recsdk_core.Table(2, optimizer=recsdk_core.optim.Adagrad())
    table.find_or_insert(np.arange(5))
    try:
        table.load("no_such_checkpoint")
    except recsdk_core.CheckpointError:
        print(len(table))
    import_elsewhere()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["5", "5"], done.stderr


def test_a_missing_extra_is_named_with_the_line_to_install() -> None:
    require("json", extra="torch", user="recsdk_core.nn")
    with pytest.raises(ImportError, match=r'needs no_torch.*pip install "recsdk-core\[torch\]"'):
        require("no_torch", extra="torch", user="recsdk_core.nn")


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"recsdk_core.{name}"))
    assert result.failed == 0


def test_example_in_the_readme() -> None:
    readme = Path(__file__).parents[2] / "README.md"
    result = doctest.testfile(str(readme), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0


def stub_signatures() -> dict[str, list[str]]:
    """Arguments of every function and method in _ext.pyi, by dotted name."""
    tree = ast.parse((SOURCE / "_ext.pyi").read_text(encoding="ascii"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = arguments(node)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not is_property(member):
                    found[f"{node.name}.{member.name}"] = arguments(member)
    return found


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)


def arguments(node: ast.FunctionDef) -> list[str]:
    star = [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    return [argument.arg for argument in node.args.args] + star


def compiled_signatures() -> Iterator[tuple[str, list[str]]]:
    """The same, as nanobind tells them."""
    for name, value in vars(_ext).items():
        if isinstance(value, type):
            for member, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if hasattr(function, "__nb_signature__"):
                    yield f"{name}.{member}", compiled_arguments(function)
        elif hasattr(value, "__nb_signature__"):
            yield name, compiled_arguments(value)


def compiled_arguments(function: Any) -> list[str]:
    [(signature, *_)] = function.__nb_signature__
    clean = signature.replace("\\", "")
    start = clean.index("(") + 1
    names, depth = [], 0
    word = ""
    for letter in clean[start:]:
        if letter in ")," and depth == 0:
            names.append(word.split(":")[0].split("=")[0].strip())
            word = ""
            if letter == ")":
                break
        else:
            depth += (letter in "[(") - (letter in "])")
            word += letter
    return [name for name in names if name and name != "/"]


def test_the_stub_fits_the_compiled_part() -> None:
    ignored = {"OptimizerConfig.__init__"}
    stub = {k: v for k, v in stub_signatures().items() if k not in ignored}
    compiled = {k: v for k, v in compiled_signatures() if k not in ignored}
    assert stub == compiled


def members(node: ast.ClassDef) -> list[str]:
    targets = [each.targets[0] for each in node.body if isinstance(each, ast.Assign)]
    return sorted(target.id for target in targets if isinstance(target, ast.Name))


def test_the_stub_names_every_member_of_an_enum() -> None:
    tree = ast.parse((SOURCE / "_ext.pyi").read_text(encoding="ascii"))
    named = {node.name: members(node) for node in tree.body if isinstance(node, ast.ClassDef)}
    enums = [each for each in vars(_ext).values() if isinstance(each, enum.EnumMeta)]
    assert enums
    for each in enums:
        assert named[each.__name__] == sorted(each.__members__)


def test_the_stub_names_every_attribute() -> None:
    tree = ast.parse((SOURCE / "_ext.pyi").read_text(encoding="ascii"))
    public = {name for name in vars(_ext) if not name.startswith("_")} | {"__version__"}
    named = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            named.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named.add(node.target.id)
    assert named == public
