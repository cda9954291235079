"""Every setting of a table with every other, and with every way to save and load, two at a time."""

from __future__ import annotations

import inspect
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import pytest

import optimizer_cases
from covering import covering, pairs_of
from recsdk_core import Table, _ext, init, optim
from recsdk_core.checkpoint.saving import Codec
from recsdk_core.checkpoint.table_io import SavesAndLoads
from recsdk_core.nn import HashEmbedding
from sampling import IS_FULL
from table_crossing import (
    SETTINGS,
    SWITCHES,
    WAYS,
    Saving,
    assert_same,
    config_of,
    contents,
    is_legal,
)

CHOICES = {name: list(values) for name, values in SETTINGS.items()} | SWITCHES
CHOICES = dict(sorted(CHOICES.items(), key=lambda choice: -len(choice[1])))
"""Those of most values first: so fewest combinations are needed."""
APART = () if IS_FULL else (("optimizer", "way"),)
"""Else these two alone need twice the combinations."""
ROWS = covering(CHOICES, is_legal, APART)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['way']}-{row['optimizer']}")
def test_what_was_saved_goes_on_as_the_original_and_the_model(
    row: dict[str, str], tmp_path: Path
) -> None:
    before = _ext.isa()
    _ext.set_isa(row["isa"])
    try:
        run(row, tmp_path)
    finally:
        _ext.set_isa(before)


def run(row: dict[str, str], folder: Path) -> None:
    saving = Saving(config_of(row), row["into"], folder)
    saving.go_on()
    loaded = WAYS[row["way"]](saving)
    tables: list[Any] = [loaded, saving.model]
    if loaded is not saving.table:
        tables.insert(0, saving.table)
    for _ in range(2):
        found = [contents(table) for table in tables]
        for name, expected in found[-1].items():
            for each in found[:-1]:
                assert_same(each[name], expected, name)
        saving.program.rewrite(tables, found[-1]["keys"][::3].copy())
        saving.program.go_on(tables)
    for table in tables:
        table.check_invariants()


# ---- nothing is left out -----------------------------------------------------------------------


def test_every_setting_of_a_table_is_crossed() -> None:
    parameters = dict(inspect.signature(Table).parameters)
    arguments = set(parameters)
    assert arguments == set(SETTINGS) - {"decay", "clip"}
    of_modules = set(inspect.signature(HashEmbedding).parameters)
    assert of_modules >= arguments - {"dim", "hash_seed", "owned_groups"}
    for name, parameter in parameters.items():
        values = list(SETTINGS[name].values())
        others = [value for value in values if value != parameter.default]
        assert len(others) >= 1, f"{name} has no value but its default"
        kinds = get_args(inspect.get_annotations(Table.__init__, eval_str=True)[name])
        literals = {kind for kind in kinds if isinstance(kind, str)}
        assert literals <= set(values) or name in ("name",), f"{name} lacks a value of {literals}"
    assert {type(value) for value in SETTINGS["initializer"].values()} == set(
        get_args(init.Initializer)
    )


def test_every_setting_of_an_optimizer_is_crossed() -> None:
    forms = [config_of(row)["optimizer"] for row in ROWS]
    assert {type(form) for form in forms} == set(get_args(optim.Optimizer))
    for kind in get_args(optim.Optimizer):
        own = [form for form in forms if type(form) is kind]
        for field in fields(kind):
            values = {getattr(form, field.name) for form in own}
            assert values - {field.default}, f"{kind.__name__}.{field.name}"
    assert set(optimizer_cases.DECAYS) == set(SETTINGS["decay"])


def test_every_way_to_save_is_crossed() -> None:
    public = {name for name in vars(SavesAndLoads) if name.startswith("save")}
    assert public == {way for way in WAYS if way in public}
    assert get_args(Codec) == ("none", "zstd")
    made = {name for name in ("__reduce__", "__deepcopy__", "__copy__") if name in vars(Table)}
    assert made == {"__reduce__", "__deepcopy__"}


# ---- the combinations --------------------------------------------------------------------------


def test_every_pair_that_goes_together_is_in_a_combination() -> None:
    every, needed = (
        {frozenset(pair) for pair in pairs_of(CHOICES, is_legal, apart)} for apart in ((), APART)
    )
    found = {frozenset(pair) for row in ROWS for pair in combinations(row.items(), 2)}
    assert needed <= found <= every
    assert all(is_legal(row) for row in ROWS)


def test_a_value_that_goes_with_nothing_is_an_error() -> None:
    settings: dict[str, Any] = {"a": ["1", "2"], "b": ["1"]}
    with pytest.raises(ValueError, match="no other value goes with .*'a', '2'"):
        covering(settings, lambda row: row.get("a") != "2")
    only = {"a": ["1", "2"], "b": ["1", "2"], "c": ["1"]}
    with pytest.raises(ValueError, match="no combination has"):
        covering(only, lambda row: len(row) < 3 or row["a"] != row["b"])
