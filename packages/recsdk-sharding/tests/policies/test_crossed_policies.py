"""Which keys have rows, what the others read and what leaves does not depend on how one shards.

Nor what rows become, by any optimizer, shape of batches and pipeline. `testing.ReferenceTable` says
in plain Python what becomes of the joined batches of all ranks. A row has one number in all of its
columns, so that it is the same however columns are cut.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from eviction_on_ranks import Saved, run, whole
from fused_on_npus import with_fused
from plans import replicated
from policy_cases import TOLERANCE, Case, Rows
from policy_crossing import (
    ALL_RULES,
    BY_COST,
    DEFAULTS,
    SETTINGS,
    expected_by,
    is_legal,
    parts_of,
    settings_of,
)
from policy_model import STEPS
from rank_pool import RankPool

from covering import covering
from recsdk_core.admission import Kind
from recsdk_core.eviction import Clock, Order
from recsdk_core.outcome import BeginWith, DefaultKind
from sampling import IS_FULL, SEED, crossed

WHOLE = ("rules", "type", "kind", "ranks", "device")
"""Settings whose values are all tried together in the full profile."""


def all_rows() -> list[dict[str, str]]:
    """All values of those, with drawn ones of the others."""
    source = random.Random(SEED)
    made = []
    for values in product(*(SETTINGS[name] for name in WHOLE)):
        row = dict(zip(WHOLE, values, strict=True))
        if not is_legal(row):
            continue
        drawn: dict[str, str] = {}
        while len(drawn) < len(SETTINGS) or not is_legal(drawn):
            drawn = {name: row.get(name) or source.choice(of) for name, of in SETTINGS.items()}
        made.append(drawn)
    return made


def assert_near(rows: Rows, expected: Rows) -> None:
    for name, of_table in expected.items():
        assert set(rows[name]) == set(of_table), name
        found = [rows[name][key] for key in of_table]
        np.testing.assert_allclose(found, list(of_table.values()), **TOLERANCE, err_msg=name)


def place_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Programs on as many ranks follow one another, which so keep their groups."""
    return row["device"], row["ranks"], row["before"]


FIRST = {name: values[0] for name, values in SETTINGS.items()}
EARLY = "TrainPipelineSemiSync from 0"
FOUND: list[dict[str, str]] = [
    {"rules": "latest", "type": "data_parallel", "default": "shared"},
    {"rules": "by step", "type": "data_parallel", "default": "begun", "way": EARLY},
    {"rules": "counting", "type": "mixed", "default": "begun", "way": EARLY, "weights": "given"},
]
"""Three and more values whose meeting once went wrong; of other settings the first."""
ROWS = sorted(
    [
        *(all_rows() if IS_FULL else covering(SETTINGS, is_legal, by_cost=BY_COST)),
        *(FIRST | row for row in FOUND),
    ],
    key=place_of,
)


@pytest.mark.parametrize("row", ROWS, ids=["-".join(row.values()) for row in ROWS])
def test_ranks_do_as_the_plain_model(
    ranks: RankPool, npus: RankPool, tmp_path: Path, row: dict[str, str]
) -> None:
    at: Saved | None = None
    for number, part in enumerate(parts_of(row)):
        pool = npus if part.device == "npu" else ranks
        folder = str(tmp_path / str(number))
        to = Saved(folder, part.saved_by, part.case.codec) if part.saved_by else None
        arguments = part.case, *part.steps, at, to
        if part.device == "npu" and row["kernels"] == "triton's":
            pytest.importorskip("triton", reason="Triton is not installed")
            found, launched = zip(
                *npus.run(part.world_size, with_fused, run, *arguments), strict=True
            )
            assert "_pool" in set().union(*launched)
        else:
            found = pool.run(part.world_size, run, *arguments)
        at = to
    assert part.case.plan is not None
    assert_near(whole(found, replicated(part.case.plan)), expected_by(row).rows)


@pytest.mark.parametrize(
    ("rules", "default", "data", "kind"),
    crossed(ALL_RULES, DEFAULTS, ("yes", "no"), ("bags", "sequences", "processed"), size=15),
)
def test_unsharded_tables_do_as_the_plain_model(
    rules: str, default: str, data: str, kind: str
) -> None:
    row = {"rules": rules, "default": default, "data": data}
    row["weights"] = "processed" if kind == "processed" else "none"
    if not is_legal(row):
        row["data"] = "yes"
    expected = expected_by(row)
    case = Case(None, is_sequence=kind == "sequences", **settings_of(row))
    assert_near(run(case, 0, STEPS), expected.rows)


@pytest.mark.parametrize(
    ("rules", "accumulate", "device"),
    crossed(("admitting", "evicting", "expiring"), ("1", "3"), ("cpu", "npu"), size=4),
)
def test_a_model_that_goes_back_to_before_its_first_step_does_as_the_plain_model(
    ranks: RankPool, npus: RankPool, tmp_path: Path, rules: str, accumulate: str, device: str
) -> None:
    row = FIRST | {"rules": rules, "accumulate": accumulate, "device": device}
    (part,) = parts_of(row)
    case = replace(part.case, undone=str(tmp_path / "none"), returned={})
    found = (npus if device == "npu" else ranks).run(part.world_size, run, case, *part.steps)
    assert case.plan is not None
    assert_near(whole(found, replicated(case.plan)), expected_by(row).rows)


LEAST = {
    "evicting": {"evicted": 150, "expired": 50, "REFUSED": 50, "returned": 20, "churn_lost": 1},
    "expiring": {"expired": 50},
    "admitting": {"NOT_ADMITTED": 200, "REFUSED": 5, "records_lost": 10},
    "counting": {"NOT_ADMITTED": 200},
    "by data": {"NOT_ADMITTED": 100, "REFUSED": 5, "expired": 10, "evicted": 50},
    "expiring by data": {"expired": 50},
    "totals by data": {"NOT_ADMITTED": 100, "REFUSED": 20, "expired": 20, "evicted": 100},
    "measured": {"evicted": 50, "expired": 10, "returned": 10},
    "latest": {"evicted": 100, "expired": 20, "returned": 5, "REFUSED": 20},
    "by step": {"evicted": 100, "expired": 20, "REFUSED": 50},
}
"""How often what each rule does must come, for the programs to show it."""


@pytest.mark.parametrize("rules", LEAST)
def test_what_rules_do_comes(rules: str) -> None:
    row = {"rules": rules, "default": "zeros", "data": "yes" if "data" in rules else "no"}
    num = expected_by(row).num
    assert {name: num[name] for name, least in LEAST[rules].items() if num[name] < least} == {}
    if not ALL_RULES[rules].is_limited:
        assert num["REFUSED"] == num["evicted"] == 0


def test_every_kind_of_rule_and_default_is_crossed() -> None:
    assert set(LEAST) == set(ALL_RULES)
    rules = [each for of in ALL_RULES.values() for each in of.eviction.values() if each is not None]
    assert {rule.order for rule in rules} == set(get_args(Order))
    assert {rule.by for rule in rules} == set(get_args(Clock))
    admissions = [each for of in ALL_RULES.values() for each in of.admission.values()]
    terms = [term for each in admissions for term in (each, *each.terms())]
    assert {term.kind for term in terms} == set(get_args(Kind))
    defaults = [default for of in DEFAULTS.values() for default in of.values()]
    assert {default.kind for default in defaults} == set(get_args(DefaultKind))
    assert {default.begin_with for default in defaults} == set(get_args(BeginWith))
