"""Table against ReferenceTable, one operation after the other, with invariants after each.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from held_saves import HELD, Content, Held, HeldSave
from interrupting import Interrupting
from quick_folders import quick_folder
from recsdk_core import (
    BusyError,
    CapacityError,
    Default,
    NonFiniteError,
    Outcome,
    Table,
    init,
    optim,
)
from recsdk_core.checkpoint.replacing import NewRows, replace_rows
from recsdk_core.testing import ReferenceLease, ReferenceTable, bags, key_arrays, keys, vectors

OPTIMIZERS = [
    optim.SGD(lr=0.5),
    optim.SGD(lr=0.5, weight_decay=0.1),
    optim.Adagrad(lr=0.1, lr_decay=0.3, initial_accumulator_value=0.1),
    optim.RowwiseAdagrad(lr=0.1, weight_decay=0.01),
    optim.Adam(lr=0.1, weight_decay=0.01),
    optim.Adam(lr=0.1, betas=(0.4, 0.9), bias_correction="row"),
]
INITIALIZERS = [
    init.Uniform(low=-1.0, high=1.0),
    init.Normal(mean=0.5, stddev=0.25),
    init.Constant(value=-0.5),
    init.Custom(fn=lambda ids, values: np.copyto(values, (ids % 7)[:, None])),
]
# Few enough that most calls meet keys that are there, and duplicates.
FEW = st.sampled_from([0, 1, -1, 7, 2**63 - 1, -(2**63), 2**40, 1234567])
DEFAULTS = [
    Default.constant(0.25),
    Default.initial_row(),
    Default.shared_rows(),
    Default.shared_rows(4),
    Default.shared_rows(3),
    Default.shared_rows(3, begin_with="shared_row"),
    Default.shared_rows(begin_with="shared_row"),
]
"""What keys without a row read."""
NONFINITE = ["apply", "raise", "skip"]
IDS = st.one_of(key_arrays(min_size=1, elements=FEW), key_arrays())
BAGS = st.one_of(bags(elements=FEW), bags())
COUNTS = ("num_rows", "num_rows_in_flight", "num_rows_held_back", "outcomes", "erased", "updates")


class TableMachine(RuleBasedStateMachine):
    """Every rule makes the same call on both tables and compares what it gives, bit for bit."""

    leases = Bundle("leases")
    MOST_KEYS = 20_000
    """Beyond, none come by thousands."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = ExitStack()
        self.folder = self.opened.enter_context(quick_folder())
        self.num_saved = 0
        self.save: HeldSave | None = None
        """The save that is under way."""
        self.saved: tuple[str, ReferenceTable] | None = None
        """Where the last save is that has ended, and the model of that time."""
        self.moment: int | None = None
        """At which a Ctrl-C comes in the next call, if one is to come."""

    @initialize(
        dim=st.sampled_from([1, 3, 4, 16, 19]),
        optimizer=st.sampled_from(OPTIMIZERS),
        initializer=st.sampled_from(INITIALIZERS),
        room=st.sampled_from([(None, None)] * 3 + [(0, None), (5, None), (20, None), (20, 8)]),
        on_full=st.sampled_from(["refuse", "raise"]),
        default=st.sampled_from(DEFAULTS),
        on_nonfinite=st.sampled_from(NONFINITE),
        hash_seed=st.integers(0, 2**64 - 1),
        is_read=st.booleans(),
    )
    def make_tables(
        self,
        dim: int,
        hash_seed: int,
        is_read: bool,
        room: tuple[int | None, int | None],
        **config: Any,
    ) -> None:
        config = {"name": "machine", "seed": 11, **config}
        config["max_rows"], config["eviction_groups"] = room
        self.table = Table(dim, hash_seed=hash_seed, **config)
        self.model = ReferenceTable(dim, **config)
        self.dim = dim
        self.last_step = 0
        self.taken: list[tuple[Any, ReferenceLease]] = []
        self.readers: tuple[Any, Any] | None = None
        if is_read:
            self.begin_to_read_leavers("count")
        self.max_rows = config["max_rows"]

    def both(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls both; their results, or the classes of their errors, are the same."""
        moment, self.moment = self.moment, None
        if moment is not None and not self.model._leases:
            self.interrupted(moment, method, args, kwargs)
            return None
        try:
            expected = getattr(self.model, method)(*args, **kwargs)
        except (BusyError, CapacityError, NonFiniteError, ValueError) as error:
            with pytest.raises(type(error)):
                getattr(self.table, method)(*args, **kwargs)
            return None
        actual = getattr(self.table, method)(*args, **kwargs)
        assert_same(actual, expected)
        return expected

    @rule(moment=st.integers(0, 20))
    def interrupt(self, moment: int) -> None:
        """A Ctrl-C comes in the next call that both make alike."""
        self.moment = moment

    def interrupted(self, moment: int, method: str, args: Any, kwargs: Any) -> None:
        """Calls both; an interrupt comes into that of the table, which is done, or not begun."""
        reader = None if self.readers is None else self.readers[1]
        before = copy.deepcopy((self.model, reader))
        raised = (BusyError, CapacityError, NonFiniteError, ValueError)
        with suppress(*raised):
            getattr(self.model, method)(*args, **kwargs)
        coming = Interrupting(moment)
        try:
            with suppress(*raised):
                coming.call(lambda: getattr(self.table, method)(*args, **kwargs))
        except KeyboardInterrupt as error:
            self.kept = error  # with its traceback, as Python keeps the last one of a session
        if coming.has_come and not self.is_like(self.model):
            self.model, reader = before
            if self.readers is not None:
                self.readers = self.readers[0], reader
        assert self.is_like(self.model), coming.where

    def is_like(self, model: ReferenceTable) -> bool:
        """Whether the table holds, and has counted, what the model has."""
        actual, expected = self.table.stats(), model.stats()
        has_counted = all(getattr(actual, name) == getattr(expected, name) for name in COUNTS)
        return has_counted and Content.of(self.table) == Content.of(model)

    @rule(ids=IDS, unsigned=st.booleans())
    def find_or_insert(self, ids: Any, unsigned: bool) -> None:
        ids = ids.view(np.uint64) if unsigned else ids
        self.both("find_or_insert", ids, return_outcomes=True)

    @rule(ids=IDS)
    def lookup(self, ids: Any) -> None:
        self.both("lookup", ids, return_outcomes=True)

    @rule(key=keys())
    def contains(self, key: int) -> None:
        self.both("__contains__", key)

    @rule(ids=IDS, insert=st.booleans())
    def map(self, ids: Any, insert: bool) -> None:
        try:
            expected_rows, expected = self.model.map(ids, insert=insert)
        except (BusyError, CapacityError, ValueError) as error:
            with pytest.raises(type(error)):
                self.table.map(ids, insert=insert)
            return
        rows, outcomes = self.table.map(ids, insert=insert)
        assert_same(outcomes, expected)
        has_row = outcomes <= Outcome.INSERTED
        assert_same(rows[has_row], expected_rows[has_row])

    @rule(data=st.data(), ids=IDS, with_state=st.booleans())
    def upsert(self, data: st.DataObject, ids: Any, with_state: bool) -> None:
        values = data.draw(vectors(len(ids), self.dim))
        state = None
        if with_state:
            state = {
                name: np.abs(data.draw(vectors(len(ids), width)))
                for name, width in self.model.state_fields
                if name != "step"
            }
            if ("step", 1) in self.model.state_fields:
                state["step"] = np.full((len(ids), 1), 3, np.float32)
        self.both("upsert", ids, values, state, return_outcomes=True)

    @rule(ids=IDS)
    def erase(self, ids: Any) -> None:
        self.both("erase", ids, return_outcomes=True)

    @rule()
    def clear(self) -> None:
        self.both("clear")

    @rule(data=st.data(), ids=IDS, bad=st.sampled_from([None, None, None, np.nan, np.inf]))
    def apply_gradients(self, data: st.DataObject, ids: Any, bad: float | None) -> None:
        grads = data.draw(vectors(len(ids), self.dim))
        if bad is not None and len(ids):
            grads[-1, -1] = bad
        self.both("apply_gradients", ids, grads, return_outcomes=True)

    @rule(batch=BAGS, pooling=st.sampled_from(["sum", "mean"]), insert=st.booleans())
    def pool(self, batch: Any, pooling: str, insert: bool) -> None:
        ids, offsets, weights = batch
        options = {"insert": insert, "return_outcomes": True}
        self.both("pool", ids, offsets, weights, pooling, **options)

    @rule(data=st.data(), batch=BAGS, pooling=st.sampled_from(["sum", "mean"]))
    def pool_backward(self, data: st.DataObject, batch: Any, pooling: str) -> None:
        ids, offsets, weights = batch
        grad = data.draw(vectors(len(offsets) - 1, self.dim))
        options = {"return_weights_grad": weights is not None}
        self.both("pool_backward", ids, offsets, grad, weights, pooling, **options)

    @rule(rate=st.sampled_from([0.0, 0.01, 0.3]))
    def set_learning_rate(self, rate: float) -> None:
        self.table.learning_rate = self.model.learning_rate = rate

    @rule(count=st.sampled_from([0, 1, 1000]))
    def set_update_count(self, count: int) -> None:
        self.table.update_count = self.model.update_count = count

    @rule(num_rows=st.sampled_from([0, 10, 5000]))
    def reserve(self, num_rows: int) -> None:
        self.both("reserve", num_rows)

    def num_known(self) -> int:
        """How many keys the tables know."""
        return len(self.model)

    @precondition(lambda self: self.max_rows is None and self.num_known() < self.MOST_KEYS)
    @rule(start=st.integers(-(2**62), 2**62), stride=st.sampled_from([1, 64, 2**20 + 1]))
    def insert_thousands(self, start: int, stride: int) -> None:
        """Enough keys for several splits of the index."""
        self.both("find_or_insert", start + stride * np.arange(3000), return_outcomes=True)

    @rule(start=st.integers(0, 5), stride=st.integers(2, 5))
    def erase_many(self, start: int, stride: int) -> None:
        """Every so-many-th key that there is."""
        present = [key for batch in self.model.export(state=False) for key in batch.keys]
        self.both("erase", np.array(present[start::stride], np.int64), return_outcomes=True)

    def take(self, step: int | None) -> tuple[Any, ReferenceLease]:
        note(f"step {step}")
        pair = self.table.lease(step), self.model.lease(step)
        self.taken.append(pair)
        return pair

    @rule(target=leases)
    def take_lease(self) -> tuple[Any, ReferenceLease]:
        return self.take(None)

    @rule(target=leases, ahead=st.integers(0, 2))
    def take_lease_of_a_step(self, ahead: int) -> tuple[Any, ReferenceLease]:
        self.last_step += ahead
        return self.take(self.last_step)

    @rule(pair=leases, ids=IDS, insert=st.booleans())
    def map_under_lease(self, pair: Any, ids: Any, insert: bool) -> None:
        lease, model_lease = pair
        if model_lease.is_released:
            with pytest.raises(ValueError, match="released"):
                self.table.map(ids, insert=insert, lease=lease)
            return
        try:
            expected_rows, expected = self.model.map(ids, insert=insert, lease=model_lease)
        except (BusyError, CapacityError, ValueError) as error:
            with pytest.raises(type(error)):
                self.table.map(ids, insert=insert, lease=lease)
            return
        rows, outcomes = self.table.map(ids, insert=insert, lease=lease)
        assert_same(outcomes, expected)
        has_row = outcomes <= Outcome.INSERTED
        assert_same(rows[has_row], expected_rows[has_row])

    @rule(pair=leases, batch=BAGS)
    def pool_under_lease(self, pair: Any, batch: Any) -> None:
        lease, model_lease = pair
        if model_lease.is_released:
            return
        try:
            expected = self.model.pool(*batch, insert=True, lease=model_lease)
        except (BusyError, CapacityError, ValueError) as error:
            with pytest.raises(type(error)):
                self.table.pool(*batch, insert=True, lease=lease)
            return
        assert_same(self.table.pool(*batch, insert=True, lease=lease), expected)

    @rule(pair=leases)
    def release_one(self, pair: Any) -> None:
        self.release(pair)

    def release(self, pair: tuple[Any, ReferenceLease]) -> None:
        for lease in pair:
            lease.release()

    @precondition(lambda self: any(not model.is_released for _, model in self.taken))
    @rule()
    def release_all(self) -> None:
        """So that writers, who wait for batches of a step, get their turn."""
        for pair in self.taken:
            self.release(pair)

    @precondition(lambda self: self.readers is None)
    @rule(on_overflow=st.sampled_from(["count", "raise"]))
    def begin_to_read_leavers(self, on_overflow: Any) -> None:
        try:
            model = self.model.leavers()
        except BusyError:
            with pytest.raises(BusyError):
                self.table.leavers(on_overflow=on_overflow)
            return
        self.readers = self.table.leavers(on_overflow=on_overflow), model

    @precondition(lambda self: self.readers is not None)
    @rule(max_rows=st.sampled_from([None, None, 3]))
    def read_leavers(self, max_rows: int | None) -> None:
        assert self.readers is not None
        actual, expected = (reader.read(max_rows) for reader in self.readers)
        for name in ("keys", "causes", "weights"):
            assert_same(getattr(actual, name), getattr(expected, name))
        assert_same(tuple(actual.state.values()), tuple(expected.state.values()))
        assert actual.state.keys() == expected.state.keys()

    @precondition(lambda self: self.readers is not None)
    @rule()
    def stop_reading_leavers(self) -> None:
        assert self.readers is not None
        self.read_leavers(None)
        for reader in self.readers:
            reader.close()
        self.readers = None

    @property
    def has_saved_here(self) -> bool:
        """Whether a delta would follow a save of `begin_to_save`."""
        position = self.table.position
        return position is not None and position.locations[-1].startswith(self.folder)

    @precondition(lambda self: self.save is None)
    @rule(kind=st.sampled_from(["full", "overwriting", "delta"]), held=st.sampled_from(HELD))
    def begin_to_save(self, kind: str, held: Held) -> None:
        """What it saves is compared once it has ended, whatever was done meanwhile."""
        is_delta = kind == "delta" and self.has_saved_here
        is_over = kind == "overwriting" and self.num_saved > 0
        self.num_saved += not is_over
        path = f"{self.folder}/{self.num_saved}"
        self.save = HeldSave(self.table, self.model, path, held, delta=is_delta, overwrite=is_over)
        self.saved = None
        if not self.model._leases and self.readers is None:
            self.saved = path, copy.deepcopy(self.model)

    @precondition(lambda self: self.save is None)
    @rule(
        kind=st.sampled_from(["full", "delta", "in the background"]), moment=st.integers(0, 2_000)
    )
    def interrupt_a_save(self, kind: str, moment: int) -> None:
        """A Ctrl-C comes in it: all is saved or nothing, and the next save goes well."""
        is_delta = kind == "delta" and self.has_saved_here
        expected, coming = Content.of(self.model), Interrupting(moment)
        paths = [f"{self.folder}/{self.num_saved + each}" for each in (1, 2)]
        self.num_saved += 2

        def save() -> None:
            if kind == "in the background":
                self.table.save_async(paths[0]).wait()
            else:
                (self.table.save_delta if is_delta else self.table.save)(paths[0])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of rows of steps that are over and still hidden
            try:
                coming.call(save)
            except KeyboardInterrupt as error:
                self.kept = error
            if kind == "in the background" and coming.has_come and self.table._handle is not None:
                self.table._handle._finished.wait()  # it may have begun
            self.table.save(paths[1])
        is_there = Path(paths[0]).joinpath("manifest.json").exists()
        assert is_there or coming.has_come
        for path in paths[not is_there :]:
            loaded = self.table.empty_copy()
            loaded.load(path)
            assert Content.of(loaded) == expected

    @precondition(lambda self: self.save is not None)
    @rule()
    def end_saving(self) -> None:
        assert self.save is not None
        save, self.save = self.save, None
        save.end()

    @precondition(lambda self: self.save is not None and self.save.is_held)
    @rule(how=st.sampled_from(["load", "replace", "rename"]))
    def replace_beside_a_save(self, how: str) -> None:
        """All are refused while it reads rows, and change nothing."""
        assert self.save is not None
        shapes = {"weight": self.dim, **dict(self.table.state_fields)}
        keys = np.array([3])[: self.table.max_rows]  # as many as fit
        made = {name: np.ones((len(keys), width), np.float32) for name, width in shapes.items()}
        rows = NewRows(keys=keys, weights=made.pop("weight"), state=made)
        calls = {
            "load": lambda: self.table.load(self.save.beside()),  # type: ignore[union-attr]
            "replace": lambda: replace_rows([(self.table, rows)]),
            "rename": lambda: self.table.rename("other"),
        }
        with pytest.raises(BusyError):
            calls[how]()
        assert self.is_like(self.model)

    @precondition(lambda self: self.can_go_back())
    @rule()
    def go_back(self) -> None:
        """Loads the last save; what was done since is undone, and deltas follow that save."""
        assert self.saved is not None
        path, model = self.saved
        stats = self.table.stats()
        self.table.load(path)
        self.model = copy.deepcopy(model)
        self.model.renumber()
        self.model._counts, self.model._num_erased = dict(stats.outcomes), stats.erased
        assert self.is_like(self.model)

    def can_go_back(self) -> bool:
        """Not where rules keep what a save leaves out, or its optimizer is another now."""
        if self.saved is None or self.save is not None or self.readers is not None:
            return False
        model, has_rules = self.saved[1], self.table.eviction or self.table.admission
        rate = self.table.learning_rate
        is_same = replace(model.optimizer, lr=rate) == self.table.optimizer
        return is_same and not has_rules and not self.model._leases

    @precondition(lambda self: self.readers is None)
    @rule(optimizer=st.sampled_from(OPTIMIZERS))
    def set_optimizer(self, optimizer: Any) -> None:
        if self.save is not None and self.save.is_held:
            with pytest.raises(BusyError):
                self.table.set_optimizer(optimizer)
            return
        if self.save is not None:
            self.end_saving()
        self.both("set_optimizer", optimizer)

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check_invariants()
        assert len(self.table) == len(self.model)
        assert self.table.update_count == self.model.update_count
        if self.readers is not None:
            actual, expected = self.readers
            assert (len(actual), actual.num_lost) == (len(expected), 0)
            if len(expected) > 4:
                self.read_leavers(None)

    @rule()
    def compare_everything(self) -> None:
        shared, wanted = self.table.shared_rows(), self.model.shared_rows()
        assert_same(shared.keys, wanted.keys)
        assert_same(shared.weights, wanted.weights)
        for name, values in wanted.state.items():
            assert_same(shared.state[name], values)
        exports = zip(self.table.export(7), self.model.export(7), strict=True)
        for actual, expected in exports:
            assert_same(actual.keys, expected.keys)
            assert_same(actual.weights, expected.weights)
            assert actual.state.keys() == expected.state.keys()
            for name in expected.state:
                assert_same(actual.state[name], expected.state[name])
        actual, expected = self.table.stats(), self.model.stats()
        for name in COUNTS:
            assert getattr(actual, name) == getattr(expected, name), name
        assert actual.nonfinite == expected.nonfinite

    def teardown(self) -> None:
        with self.opened:
            try:
                if hasattr(self, "table"):
                    self.compare_everything()
            finally:
                if self.save is not None:  # its thread waits
                    self.end_saving()


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to the bit: arrays with their NaNs, tuples of arrays, plain values."""
    if isinstance(expected, tuple):
        for part, expected_part in zip(actual, expected, strict=True):
            assert_same(part, expected_part)
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected, strict=True)
    else:
        assert actual == expected
