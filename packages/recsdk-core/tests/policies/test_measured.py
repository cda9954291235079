"""Rules whose looks measure keys: by the norms of rows, or by a function of their columns.

`testing.ReferenceTable` says the same in plain Python, and the machine of tests/stateful compares
small tables call by call. Shape letter: N keys.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drifting import drifting
from numpy.typing import NDArray

from recsdk_core import BusyError, Evict, Index, Table, optim
from recsdk_core.checkpoint import compact
from recsdk_core.checkpoint.reading import open_checkpoint
from recsdk_core.simulation import Trace, simulate
from recsdk_core.testing import ReferenceTable

MAX_ROWS = 300


def by_all(step: Any, count: Any, score: Any) -> Any:
    """Where keys stand."""
    return count * 2 + score + step / 4


def of_time(now: int, time: Any) -> Any:
    """Where keys stand of which times are known."""
    return np.where(now - time < 9, time % 7, time % 11)


RULES = [
    Evict.low_norm(every=2),
    Evict.low_norm(every=1, min_age=2),
    Evict.low_norm(every=3, below=0.02),
    Evict.function(by_all, every=2),
    Evict.function(of_time, every=1, min_age=1).expiring(ttl=9),
]

NAMES = ["norm", "norm_of_old", "norm_below", "function", "function_of_time"]


def contents(table: Any) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for batch in table.export():
        found.update(zip(batch.keys.tolist(), batch.weights.tolist(), strict=True))
    return found


def train(table: Any, keys: NDArray[np.int64], more: dict[str, Any]) -> None:
    """A step: some keys come, and their rows move."""
    table.find_or_insert(keys, **more)
    grads = ((keys[:, None] % 17) - 8).astype(np.float32) / 8
    table.apply_gradients(keys, np.repeat(grads, 2, axis=1))


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_tables_do_as_the_plain_model(rule: Evict, num_threads: int) -> None:
    config: dict[str, Any] = {"max_rows": MAX_ROWS, "optimizer": optim.SGD(lr=0.25)}
    table = Table(2, eviction=rule, num_threads=num_threads, **config)
    model = ReferenceTable(2, eviction=rule, **config)
    for keys, more in drifting(rule, 9, 400):
        for each in (table, model):
            train(each, keys, more)
        assert contents(table) == contents(model)
        table.check_invariants()
    stats, expected = table.stats(), model.stats()
    assert (stats.evicted, stats.expired) == (expected.evicted, expected.expired)
    assert stats.evicted > 50


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_saved_with_deltas_and_copied_they_go_on(rule: Evict, tmp_path: Path) -> None:
    config: dict[str, Any] = {"max_rows": MAX_ROWS, "eviction": rule}
    table, batches = Table(2, **config), drifting(rule, 14, 400)
    for place, (keys, more) in enumerate(batches[:8]):
        if place in (4, 6):
            (table.save if place == 4 else table.save_delta)(tmp_path / str(place))
        train(table, keys, more)
    table.save_delta(tmp_path / "8")
    chain = [tmp_path / name for name in ("4", "6", "8")]
    loaded = Table(2, **config)
    loaded.load(chain)
    compact(chain, tmp_path / "whole")
    merged = Table(2, **config)
    merged.load(tmp_path / "whole")
    others = [loaded, merged, pickle.loads(pickle.dumps(table)), copy.deepcopy(table)]
    for keys, more in batches[8:]:
        for each in (table, *others):
            train(each, keys, more)
    for other in others:
        assert contents(other) == contents(table)


def test_looks_come_at_multiples_and_new_keys_stay_until_then() -> None:
    table = Table(2, max_rows=2, eviction_groups=1, eviction=Evict.low_norm(every=3))
    table.upsert(np.array([1, 2]), np.array([[3, 4], [0.5, 0]], np.float32))
    assert table.explain(1).columns["norm"] == float("inf")
    table.map(np.array([1]), insert=True)
    assert table.explain(1).columns["norm"] == float("inf")
    table.upsert(np.array([2]), np.array([[6, 8]], np.float32))  # step 3 begins with a look
    assert [table.explain(key).columns["norm"] for key in (1, 2)] == [5.0, 0.5]
    table.map(np.array([7]), insert=True)  # by the look, not by what 2 has now
    assert 2 not in table
    assert table.explain(7).columns["norm"] == float("inf")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_have_a_place(value: float) -> None:
    table = Table(2, max_rows=2, eviction_groups=1, eviction=Evict.low_norm(every=1))
    table.upsert(np.array([1, 2]), np.array([[value, 1], [1, 1]], np.float32))
    table.map(np.array([3]), insert=True)
    assert 1 not in table if np.isnan(value) else 2 not in table


def test_batches_before_a_look_must_be_trained() -> None:
    table = Table(2, max_rows=9, eviction=Evict.low_norm(every=4))
    first, second = table.lease(step=1), table.lease(step=3)
    table.map(np.array([1]), insert=True, lease=first)
    table.map(np.array([2]), insert=True, lease=second)
    assert table.steps_to_look(3) == 1
    with pytest.raises(BusyError, match="look at the norms of rows, and the batch of step 1 is"):
        table.steps_to_look(4)
    looking = table.lease(step=4)
    before = contents(table)
    with pytest.raises(BusyError, match="look at the norms of rows, and the batch of step 1 is"):
        table.map(np.array([3]), insert=True, lease=looking)
    first.release()
    with pytest.raises(BusyError, match="the batch of step 3 is still in flight; train or drop"):
        table.map(np.array([3]), insert=True, lease=looking)
    assert before == {}
    assert len(contents(table)) == 1
    second.release()
    assert [table.steps_to_look(step) for step in (3, 4)] == [1, 4]
    beside = table.lease(step=4)
    table.map(np.array([3]), insert=True, lease=looking)
    table.map(np.array([4]), insert=True, lease=beside)  # of the same step
    # Readers see what was kept before the batch until it is done.
    assert table.explain(1).columns["norm"] == float("inf")
    looking.release()
    beside.release()
    assert table.explain(1).columns["norm"] < 1
    assert table.steps_to_look(8) == 4
    assert Table(2).steps_to_look(3) is None


def test_a_function_needs_no_batch_trained() -> None:
    table = Table(2, max_rows=9, eviction=Evict.function(lambda step: step, every=1))
    leases = [table.lease(step=step) for step in range(4)]
    for step, lease in enumerate(leases):
        table.map(np.array([step]), insert=True, lease=lease)
    assert table.steps_to_look(4) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda step: step[:-1], "must give a number for each of 2 keys, got shape"),
        (lambda step: [None] * len(step), "must give a number"),
        (lambda step: step * np.nan, "not finite in single precision"),
        (lambda step: step + 1e300, "not finite in single precision"),
        (lambda step: step.missing, "has no attribute 'missing'"),
    ],
)
def test_what_a_function_does_wrong_changes_nothing(given: Any, message: str) -> None:
    is_wrong = False

    def places(step: Any) -> Any:
        return given(step) if is_wrong else -step

    table = Table(2, max_rows=2, eviction_groups=1, eviction=Evict.function(places, every=2))
    for key in (1, 2):
        table.map(np.array([key]), insert=True)
    table.map(np.array([1]), insert=True)
    before, kept = contents(table), table.explain(1).columns
    is_wrong = True
    for _ in range(2):
        with pytest.raises((ValueError, AttributeError), match=message):
            table.map(np.array([3]), insert=True)
        assert contents(table) == before
        assert table.explain(1).columns == kept
        table.check_invariants()
    is_wrong = False
    table.map(np.array([3]), insert=True)
    assert 1 not in table  # it was seen last, and so is lowest
    assert 2 in table


def test_a_call_that_fails_after_a_look_takes_it_back() -> None:
    rule = Evict.low_norm(every=1, min_age=100)
    table = Table(2, max_rows=1, eviction=rule, on_full="raise")
    table.upsert(np.array([1]), np.array([[3, 4]], np.float32))
    with pytest.raises(Exception, match="is full"):
        table.map(np.array([2]), insert=True)
    assert table.explain(1).columns["norm"] == float("inf")
    table.map(np.array([1]), insert=True)
    assert table.explain(1).columns["norm"] == 5.0


def test_predicates_read_what_was_measured(tmp_path: Path) -> None:
    table = Table(2, max_rows=9, eviction=Evict.low_norm(every=1))
    table.upsert(np.array([1, 2, 3]), np.array([[3, 4], [1, 0], [0, 2]], np.float32))
    table.map(np.array([3]), insert=True)
    table.save(tmp_path / "saved")
    compact([tmp_path / "saved"], tmp_path / "kept", keep={"table": "norm >= 2"})
    kept = open_checkpoint(str(tmp_path / "kept")).manifest.tables[0]
    assert kept.num_rows == 2
    assert table.evict(where="norm < 1.5") == 1
    assert 2 not in table
    placed = Table(2, max_rows=9, eviction=Evict.function(by_all, every=1))
    placed.map(np.array([5, 5, 6]), insert=True, scores=np.array([1, 4, 2], np.float32))
    placed.map(np.array([6]), insert=True)
    assert placed.explain(5).columns == pytest.approx(
        {"step": 1, "idle": 1, "count": 2, "score": 4, "place": 8.25}
    )
    assert placed.would_evict(where="place > 8 and count == 2").popitem()[1] == 1


def test_a_checkpoint_has_the_name_of_a_function(tmp_path: Path) -> None:
    table = Table(2, max_rows=9, eviction=Evict.function(by_all))
    table.save(tmp_path / "saved")
    entry = open_checkpoint(str(tmp_path / "saved")).manifest.tables[0].eviction
    assert entry is not None
    assert entry.rule.arguments["places"] == "by_all"


def test_an_index_takes_norms_of_who_makes_its_rows() -> None:
    class Maker:
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        def __call__(self, keys: Any, rows: Any) -> None:
            pass

        def norms(self, rows: Any) -> Any:
            self.asked.append(rows.tolist())
            return np.array([3.0, 1.0, 2.0], np.float32)[: len(rows)]

    for make_rows in (None, lambda keys, rows: None):
        with pytest.raises(ValueError, match="reads weights, which this index has not"):
            Index(max_rows=9, eviction=Evict.low_norm(), make_rows=make_rows)
    maker = Maker()
    index = Index(max_rows=3, eviction_groups=1, eviction=Evict.low_norm(every=1), make_rows=maker)
    index.map(np.array([5, 6, 7]), insert=True)
    index.map(np.array([8]), insert=True)
    assert (maker.asked, 6 in index) == ([[0, 1, 2]], False)
    placed = Index(max_rows=9, eviction=Evict.function(lambda count: count))
    assert placed.metadata(np.zeros(0, np.int64)).keys() == {
        "evict_step",
        "evict_count",
        "evict_place",
    }


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"order": "lru", "below": 1.0}, "below is for low_norm, got order='lru'"),
        ({"order": "low_norm", "below": 0.0}, "below must be a finite number above 0"),
        ({"order": "low_norm", "by": "time"}, "norms have no time"),
        ({"order": "function"}, "places is for function, which needs it"),
        ({"order": "lru", "places": by_all}, "places is for function"),
        ({"order": "function", "places": lambda: 1}, "name columns, some of step, time"),
        ({"order": "function", "places": lambda step, rank: 1}, "got step, rank"),
        ({"order": "function", "places": of_time}, "time is a column or not"),
    ],
)
def test_wrong_settings_are_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Evict(**more)
    with pytest.raises(TypeError, match="the function must be callable"):
        Evict.function(3)  # type: ignore[arg-type]


def test_a_function_that_calls_its_table_is_named() -> None:
    tables: list[Table] = []

    def places(step: Any) -> Any:
        return np.full(len(step), len(tables[0]))

    tables.append(Table(2, max_rows=2, eviction_groups=1, eviction=Evict.function(places, every=1)))
    tables[0].find_or_insert(np.array([1]))
    with pytest.raises(BusyError, match="a callback of a table or index, .* says who is to leave"):
        tables[0].find_or_insert(np.array([2]))
    assert (1 in tables[0], 2 in tables[0]) == (True, False)


def test_traces_have_no_norms() -> None:
    trace = Trace.of_arrays(np.arange(60) % 7)
    for rule, what in ((Evict.low_norm(), "norms of rows"), (Evict.function(by_all), "scores")):
        with pytest.raises(ValueError, match=f"'rule' goes by {what}"):
            simulate(trace, [5], {"rule": rule})
    [found] = simulate(trace, [5], {"f": Evict.function(lambda count: count, every=1)})
    assert found.hit_rate > 0
