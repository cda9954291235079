"""What eviction knows of keys is saved and loaded: decisions go on as if nothing had been.

`testing.Eviction` decides in plain Python, without any save. Shape letter: N keys.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drifting import Batch, drifting
from evicting import RuledKeys
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_core import CapacityError, CheckpointError, Evict, Index, Outcome, Table, optim
from recsdk_core.checkpoint import compact
from recsdk_core.checkpoint.reading import open_checkpoint
from recsdk_core.testing import Eviction, KeyMeta, Room

MAX_ROWS = 600
NEVER = -(2**63)
RULES = [
    Evict.lru(),
    Evict.lru(by="time"),
    Evict.lfu(),
    Evict.lfu(half_life=2.5, min_age=3),
    Evict.score(min_age=2),
    Evict.show_click(alpha=0.25, beta=2.5, decay=0.8, min_age=1),
    Evict.show_click_totals(alpha=0.25, beta=2.5, decay=0.3, min_age=1),
]


def stream(rule: Evict, num_steps: int) -> list[Batch]:
    return drifting(rule, num_steps, 400)


def fit(model: RuledKeys) -> None:
    """Those leave that are too many, young ones too."""
    excess = model.eviction._excess(model.metas)
    for key in model.eviction.lowest(model.metas, 2**63 - 1, excess):
        del model.metas[key]


def rows_of(table: Table) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for batch in table.export():
        found |= zip(batch.keys.tolist(), batch.weights.tolist(), strict=True)
    return found


def assert_goes_on(table: Table, model: RuledKeys, batches: list[Batch]) -> None:
    """Each decision of the table is the model's."""
    model = copy.deepcopy(model)
    assert rows_of(table).keys() == model.metas.keys()
    for keys, more in batches:
        _, refused = model.call(keys.tolist(), more)
        _, outcomes = table.map(keys, insert=True, **more)
        assert set(keys[outcomes == Outcome.REFUSED].tolist()) == refused
        assert rows_of(table).keys() == model.metas.keys()
    table.check_invariants()


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_table_goes_on_where_its_copy_stood(rule: Evict, tmp_path: Path) -> None:
    def empty(**changes: Any) -> Table:
        config = {"max_rows": MAX_ROWS, "eviction": rule, "optimizer": optim.Adam(lr=0.1)}
        return Table(2, **{**config, **changes})

    def loaded(*names: str, **changes: Any) -> Table:
        table = empty(hash_seed=5, num_threads=1, **changes)
        table.load([tmp_path / name for name in names])
        return table

    table, model = empty(), RuledKeys(rule, MAX_ROWS)
    batches = stream(rule, 9)
    if rule.by == "time":
        table.time = 17
    for batch in batches[:3]:
        model.call(batch[0].tolist(), batch[1])
        table.map(batch[0], insert=True, **batch[1])
    table.save(tmp_path / "full")
    # Seen alone: so the delta has rows whose metadata alone have changed.
    keys, more = batches[2]
    some = keys[:40], {name: values[:40] for name, values in more.items()}
    model.call(some[0].tolist(), some[1])
    table.map(some[0], insert=True, **some[1])
    table.save_delta(tmp_path / "delta")
    entry = open_checkpoint(tmp_path / "delta").manifest.tables[0]
    assert entry.num_rows == len(set(some[0].tolist()) & model.metas.keys())
    for batch in batches[3:5]:
        model.call(batch[0].tolist(), batch[1])
        table.map(batch[0], insert=True, **batch[1])
    table.save_delta(tmp_path / "last")
    entry = open_checkpoint(tmp_path / "last").manifest.tables[0]
    assert entry.num_erased > 0
    compact(tmp_path / "last", tmp_path / "merged")

    # A cut has what it found: batches in flight and later ones change nothing of it.
    before, rest = rows_of(table), batches[5:]
    with table.lease(step=40) as lease:
        table.map(rest[0][0], insert=True, lease=lease, **rest[0][1])
        table.save_async(tmp_path / "beside").wait()
        of_pickle = pickle.loads(pickle.dumps(table))
        of_copy = copy.deepcopy(table)
        handle = table.save_async(tmp_path / "delta_beside", delta=True)
        table.map(rest[1][0], insert=True, lease=lease, **rest[1][1])
    table.map(rest[2][0], insert=True, **rest[2][1])
    handle.wait()
    assert of_copy.time == of_pickle.time == (17 if rule.by == "time" else None)

    renamed, other = copy.deepcopy(of_copy), copy.deepcopy(of_copy)
    renamed.rename("item")
    other.set_optimizer(optim.SGD(lr=0.5))
    for one in (
        of_copy,
        of_pickle,
        renamed,
        other,
        loaded("full", "delta", "last"),
        loaded("merged"),
        loaded("beside"),
        loaded("beside", "delta_beside"),
    ):
        assert rows_of(one) == before
        assert_goes_on(one, model, rest)

    small, small_model = loaded("merged", max_rows=150), RuledKeys(rule, 150)
    small_model.metas = copy.deepcopy(model.metas)
    small_model.eviction.decided(model.eviction.step, None)
    fit(small_model)
    assert small.stats().evicted == len(before) - len(small) > 300
    small.save_delta(tmp_path / "smaller")
    assert rows_of(loaded("merged", "smaller")).keys() == small_model.metas.keys()
    assert_goes_on(small, small_model, rest)


def test_without_metadata_keys_count_as_never_seen(tmp_path: Path) -> None:
    rule = Evict.lfu(half_life=2.0, min_age=1)
    first, *rest = stream(rule, 5)
    plain = Table(2, max_rows=MAX_ROWS)
    plain.map(first[0], insert=True)
    plain.save(tmp_path / "plain")
    lru = Table(2, max_rows=MAX_ROWS, eviction=Evict.lru())
    lru.map(first[0], insert=True)
    lru.save(tmp_path / "lru")
    model = RuledKeys(rule, MAX_ROWS)
    model.metas = {key: KeyMeta(NEVER, NEVER, score=0.0) for key in rows_of(plain)}
    table = Table(2, max_rows=MAX_ROWS, eviction=rule)
    with pytest.raises(CheckpointError, match=r"Evict.*lru.*lack evict_count, evict_born; load"):
        table.load(tmp_path / "lru")
    assert len(table) == 0
    table.load(tmp_path / "plain")
    assert_goes_on(table, model, rest)
    for allowed in (table, Table(2, max_rows=MAX_ROWS, eviction=Evict.lru())):
        allowed.load(tmp_path / "lru", allow=["eviction"])
        assert allowed.position is None
        model.eviction = Eviction(allowed.eviction or rule, Room(MAX_ROWS))
        assert_goes_on(allowed, model, rest)


@pytest.mark.parametrize(
    ("saved", "rule", "lacking"),
    [
        (Evict.show_click(decay=0.5), Evict.show_click_totals(decay=0.5), "totals, evict_worth"),
        (Evict.show_click_totals(decay=0.5), Evict.show_click(decay=0.5), "show_click"),
    ],
    ids=["scores", "totals"],
)
def test_scores_are_no_totals(saved: Evict, rule: Evict, lacking: str, tmp_path: Path) -> None:
    table, other = (Table(2, max_rows=MAX_ROWS, eviction=each) for each in (saved, rule))
    table.map(stream(saved, 1)[0][0], insert=True)
    table.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=f"was saved with.*its rows lack evict_{lacking}; "):
        other.load(tmp_path / "saved")
    assert len(other) == 0
    other.load(tmp_path / "saved", allow=["eviction"])
    assert rows_of(other) == rows_of(table)


def test_without_a_rule_metadata_are_left_out(tmp_path: Path) -> None:
    table = Table(2, max_rows=MAX_ROWS, eviction=Evict.lfu(min_age=1))
    for keys, _ in stream(Evict.lru(), 3):
        table.map(keys, insert=True)
    table.save(tmp_path / "saved")
    plain = Table(2)
    plain.load(tmp_path / "saved")
    assert rows_of(plain) == rows_of(table)
    assert plain.position is None  # a delta would lack what the chain's rows have
    # What is there suffices for a rule that needs less.
    fewer = Table(2, max_rows=MAX_ROWS, eviction=Evict.lfu())
    fewer.load(tmp_path / "saved")
    fewer.save(tmp_path / "fewer")
    names = [field.name for field in open_checkpoint(tmp_path / "fewer").manifest.tables[0].fields]
    assert names == ["weight", "evict_step", "evict_count"]


@pytest.mark.parametrize("num_open", range(4))
def test_a_save_has_the_time_of_the_steps_that_are_over(tmp_path: Path, num_open: int) -> None:
    def new() -> Table:
        rule = Evict.lru(by="time").expiring(ttl=25)
        return Table(2, optimizer=optim.SGD(lr=0.1), name="table", eviction=rule)

    table, times = new(), [10, 20, 90]
    leases = []
    for step, time in enumerate(times, 1):  # mapped ahead, as by a pipeline
        leases.append(table.lease(step=step))
        table.map(np.array([step]), insert=True, lease=leases[-1], now=time)
    num_over = len(times) - num_open
    for lease in leases[:num_over]:
        lease.release()
    table.save(tmp_path / "saved")
    for lease in leases:
        lease.release()
    loaded = new()
    loaded.load(tmp_path / "saved")
    keys = [key for batch in loaded.export() for key in batch.keys]
    assert sorted(keys) == list(range(1, num_over + 1))
    assert loaded.time == (times[num_over - 1] if num_over else None)
    assert table.time == times[-1]


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["take", "map", "fail", "release"]), st.integers(0, 5)),
        max_size=20,
    )
)
@example(turns=[("take", 1), ("take", 0), ("map", 1), ("map", 0), ("release", 0)])
@example(turns=[("take", 1), ("map", 0), ("release", 0), ("take", 0), ("map", 1)])
def test_readers_see_the_time_before_the_batches_in_flight(turns: list[tuple[str, int]]) -> None:
    """Batches of one step are mapped in any order. One that ends shows once those before it have.

    A turn's number: of "take" how many steps after the batch before, else which batch.
    """
    index = Index(eviction=Evict.lru(by="time"), max_rows=9, on_full="raise")
    taken: list[Any] = []
    in_flight: list[Any] = []  # those that readers do not see
    before: dict[Any, tuple[int, int]] = {}  # calls and time before the first call of each
    steps: dict[Any, int] = {}
    index.time = step = num_calls = 0
    for now, (action, number) in enumerate(turns, start=1):
        if action == "take":
            step += number
            taken.append(index.lease(step=step))
            steps[taken[-1]] = step
            in_flight.append(taken[-1])
        elif number >= len(taken) or taken[number].is_released:
            continue
        elif action == "release":
            taken[number].release()
            while in_flight and in_flight[0].is_released:
                in_flight.pop(0)
        elif any(steps[each] > steps[taken[number]] for each in before):
            continue  # batches are mapped in ascending order of steps
        else:
            lease, time = taken[number], index.time
            keys = np.arange(99 if action == "fail" else 1)
            with pytest.raises(CapacityError) if action == "fail" else nullcontext():
                index.map(keys, insert=True, lease=lease, now=now)
            if action == "map":
                before.setdefault(lease, (num_calls, time))
                num_calls += 1
            assert index.time == (now if action == "map" else time)
        hidden = [before[each] for each in in_flight if each in before]
        assert index.clock.time == min(hidden, default=(0, index.time))[1]
