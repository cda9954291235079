"""A collection that trains, is read and fails in any order stays that of dictionaries of rows.

How many examples run is the Hypothesis profile's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from comparing import assert_rows_close
from device_type import DEVICE_TYPE
from dictionary import DictionaryTable, forward, outputs_of, positions_of, train
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_cases import cases
from random_models import Case, joined
from random_turns import Turn, bags_of, drive, learning
from rank_pool import RankPool
from worlds import whole_rows

from recsdk_core import Outcome

TOLERANCE = {"rtol": 5e-5, "atol": 5e-5}
"""Wider than that of three steps, as rows go through seven."""


@st.composite
def forms_of(draw: Any, world_size: int, num_features: int) -> tuple[tuple[str, ...], ...]:
    """Bags of one id each have a way of their own: on all ranks, on some, or for some features."""
    all_one = ("one",) * num_features
    any_form = st.tuples(
        *[st.sampled_from(["any", "one", "none", "one on average"])] * num_features
    )
    of_rank = draw(st.sampled_from([st.just(all_one), any_form, st.just(all_one) | any_form]))
    return tuple(draw(of_rank) for _ in range(world_size))


@st.composite
def turns_of(draw: Any, case: Case) -> Turn:
    world_size = case.world_size
    flags = st.tuples(*[st.booleans()] * world_size)
    return Turn(
        kind=draw(st.sampled_from(["train", "train", "train", "leave", "read", "fail"])),
        sizes=draw(st.tuples(*[st.integers(0, 5)] * world_size)),
        forms=draw(forms_of(world_size, len(case.feature_names))),
        batches_vary=draw(st.booleans()),
        learns_weights=draw(flags),
        keeps_outcomes=draw(flags),
        has_stranger=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
        guilty=draw(st.integers(0, world_size - 1)),
    )


@st.composite
def driven(draw: Any) -> tuple[Case, list[Turn]]:
    case = replace(draw(cases()), codec=None)
    return case, draw(st.lists(turns_of(case), min_size=2, max_size=7))


class Expected:
    """The same turns on dictionaries of rows, of all ranks together."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tables = [DictionaryTable(case, index) for index in range(len(case.tables))]

    def take(self, turn: Turn) -> dict[str, Any]:
        """What all ranks together see."""
        case = replace(self.case, batches_vary=turn.batches_vary)
        bags = joined([bags_of(case, turn, rank) for rank in range(case.world_size)])
        had_rows = [set(table.rows) for table in self.tables]
        if turn.kind != "read":
            for table in self.tables:
                table.see(np.concatenate([bags[name].keys for name in table.spec.features]))
        passes = forward(case, self.tables, bags)
        outcomes = {}
        for table, rows, of_table in zip(self.tables, had_rows, passes, strict=True):
            for shown in of_table:
                keys = bags[shown.partition("@")[0]].keys
                outcomes[shown] = outcomes_of(table, rows, keys, turn.kind != "read")
        output = outputs_of(case, passes)
        grads = train(case, self.tables, bags, passes) if turn.kind == "train" else {}
        return {"output": output, "outcomes": outcomes, "weight_grads": grads}


def outcomes_of(
    table: DictionaryTable, had_rows: set[int], keys: np.ndarray, trains: bool
) -> np.ndarray:
    """What became of each key, one after another; who was given a row has one from then on."""
    told = []
    for key in keys.tolist():
        if key in had_rows:
            told.append(Outcome.FOUND)
        elif key in table.rows:
            told.append(Outcome.INSERTED)
            had_rows.add(key)
        else:
            told.append(Outcome.NOT_ADMITTED if trains else Outcome.MISSING)
    return np.array(told, np.uint8)


def assert_driven(case: Case, turns: list[Turn], results: list[dict[str, Any]]) -> None:
    expected = Expected(case)
    for step, turn in enumerate(turns):
        of_ranks = [result["seen"][step] for result in results]
        if turn.kind == "fail":
            others = {error for rank, error in enumerate(of_ranks) if rank != turn.guilty}
            assert of_ranks[turn.guilty] == "ValueError"
            assert others <= {"PeerError"}
            continue
        whole = expected.take(turn)
        assert_outputs(case, whole["output"], [seen["output"] for seen in of_ranks])
        for rank, seen in enumerate(of_ranks):
            if seen["outcomes"] is not None:
                cut = {
                    shown: of_ids(case, turn, rank, shown, told)
                    for shown, told in whole["outcomes"].items()
                }
                np.testing.assert_equal(seen["outcomes"], cut)
            for name in case.feature_names if learning(case, turn, rank).learns_weights else ():
                grad = part_of(case, turn, rank, name, whole["weight_grads"][name])
                np.testing.assert_allclose(seen["weight_grads"][name], grad, **TOLERANCE)
    rows = whole_rows([result["rows"] for result in results], case.replicated())
    assert_rows_close(rows, {f"t{i}": table.rows for i, table in enumerate(expected.tables)})


def part_of(case: Case, turn: Turn, rank: int, shown: str, of_all: np.ndarray) -> np.ndarray:
    """A rank's part of what a feature's ids have, of all ranks one after another."""
    counts = [
        len(bags_of(case, turn, each)[shown.partition("@")[0]].keys)
        for each in range(case.world_size)
    ]
    return np.split(of_all, np.cumsum(counts)[:-1])[rank]


def of_ids(case: Case, turn: Turn, rank: int, shown: str, told: np.ndarray) -> np.ndarray:
    """The outcomes of a rank's ids; of a sequence those of its vectors."""
    of_bags = part_of(case, turn, rank, shown, told)
    if not case.is_sequence:
        return of_bags
    bags = bags_of(case, turn, rank)[shown.partition("@")[0]]
    inserted = set(bags.keys[of_bags == Outcome.INSERTED].tolist())
    positions = positions_of(bags)
    found = of_bags[positions]
    found[found == Outcome.INSERTED] = Outcome.FOUND
    for place, key in enumerate(bags.keys[positions].tolist()):
        if key in inserted:
            found[place] = Outcome.INSERTED
            inserted.remove(key)
    return found


def assert_outputs(case: Case, whole: dict[str, Any], of_ranks: list[dict[str, Any]]) -> None:
    if not case.is_sequence:
        assert all(part["keys"] == whole["keys"] for part in of_ranks)
        found = np.concatenate([part["values"] for part in of_ranks])
        np.testing.assert_allclose(found, whole["values"], **TOLERANCE)
        return
    for name, jagged in whole.items():
        parts = [part[name] for part in of_ranks]
        for field in ("ids", "lengths"):
            assert np.array_equal(np.concatenate([p[field] for p in parts]), jagged[field])
        found = np.concatenate([part["values"] for part in parts])
        np.testing.assert_allclose(found, jagged["values"], **TOLERANCE)


def check(pool: RankPool, device: str) -> None:
    # Without shrinking: after a failure the ranks are started anew, which takes seconds.
    @settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(driven())
    def any_turns(case_and_turns: tuple[Case, list[Turn]]) -> None:
        case, turns = case_and_turns
        case = replace(case, device=device)
        assert_driven(case, turns, pool.run(case.world_size, drive, case, turns))

    any_turns()


def test_any_turns_are_those_of_dictionaries_of_rows(ranks: RankPool) -> None:
    check(ranks, "cpu")


def test_any_turns_on_devices(npus: RankPool) -> None:
    check(npus, DEVICE_TYPE)
