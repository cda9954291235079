"""A Ctrl-C in a call: it is done, or had not begun, and nothing is left that later calls meet.

The error is kept with its traceback meanwhile, as Python keeps the last one of a session. What
`find_or_insert` and the like do is in the machines of `tests/stateful`.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from held_saves import Content
from interrupting import Interrupting
from quick_folders import quick_folder
from recsdk_core import Admit, CheckpointError, Default, Evict, Table, optim
from recsdk_core.checkpoint.replacing import NewRows, replace_rows
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, RowOptimizer, l2
from recsdk_core.nn.drawn_names import DRAWN_NAME, name_of
from recsdk_core.serving import freeze, open_tables
from sampling import crossed, sampled

NUM_MOMENTS = 5
"""Of each call how many are drawn, under `ci`."""
TABLES: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": optim.Adam(lr=0.1)},
    "evicting": {"max_rows": 40, "eviction": Evict.lru(), "optimizer": optim.Adagrad(lr=0.1)},
    "admitting": {
        "max_rows": 60,
        "admission": Admit.count(2, max_records=30),
        "default": Default.shared_rows(4),
    },
}
MODULES: dict[str, dict[str, Any]] = {
    "in backward": {"name": "user", "optimizer": optim.Adam(lr=0.1)},
    "every other backward": {
        "name": "user",
        "optimizer": optim.Adagrad(lr=0.1),
        "accumulate_steps": 2,
    },
    "evicting": {
        "name": "user",
        "optimizer": optim.Adagrad(lr=0.1),
        "max_rows": 40,
        "eviction": Evict.lru(),
    },
    "without a name": {"optimizer": optim.Adagrad(lr=0.1)},
    "by a RowOptimizer": {"name": "user"},
}
MADE = [HashEmbedding, HashEmbeddingBag]


def moments_of(make: Callable[[str], Callable[[], Any]]) -> list[int]:
    """Some of those at which a Ctrl-C may come in what `make` gives, and one at its end."""
    counting = Interrupting(2**60)
    with quick_folder() as folder:
        counting.call(make(folder))
    assert counting.num_moments > 0
    return [*sampled(range(counting.num_moments), NUM_MOMENTS), counting.num_moments]


def interrupted(work: Callable[[], Any], moment: int) -> tuple[Interrupting, Any]:
    """Where it came, and the error."""
    coming = Interrupting(moment)
    try:
        coming.call(work)
    except KeyboardInterrupt as error:
        return coming, error
    return coming, None


# ---- tables ------------------------------------------------------------------------------------


def train(table: Table, first: int) -> None:
    keys_N = np.arange(first, first + 20)
    table.find_or_insert(keys_N)
    table.apply_gradients(keys_N, np.ones((20, 3), np.float32))


def a_table(kind: str, folder: str) -> Table:
    """One that has saved a snapshot and a delta, and trained since, at another rate."""
    table = Table(3, name="user", **TABLES[kind])
    for first in (0, 0, 10):
        train(table, first)
    table.save(f"{folder}/0")
    train(table, 15)
    table.learning_rate = 0.05
    table.save_delta(f"{folder}/1")
    train(table, 5)
    return table


def replace(table: Table, _: str) -> None:
    rows = np.ones((2, 3), np.float32)
    state = {name: np.ones((2, width), np.float32) for name, width in table.state_fields}
    replace_rows([(table, NewRows(keys=np.array([7, 700]), weights=rows, state=state))])


CALLS: dict[str, Callable[[Table, str], Any]] = {
    "save": lambda table, folder: table.save(f"{folder}/2"),
    "save over another": lambda table, folder: table.save(f"{folder}/1", overwrite=True),
    "save_delta": lambda table, folder: table.save_delta(f"{folder}/2"),
    "save_async": lambda table, folder: table.save_async(f"{folder}/2", delta=True).wait(),
    "load": lambda table, folder: table.load(f"{folder}/0"),
    "load a chain": lambda table, folder: table.load(f"{folder}/1"),
    "replace": replace,
    "set_optimizer": lambda table, _: table.set_optimizer(optim.Adagrad(lr=0.3)),
    "rename": lambda table, _: table.rename("other"),
    "learning_rate": lambda table, _: setattr(table, "learning_rate", 0.3),
}


@pytest.mark.parametrize(("kind", "call"), crossed(TABLES, CALLS, size=12))
def test_a_table_is_as_before_or_after(kind: str, call: str) -> None:
    def made(folder: str) -> Callable[[], Any]:
        table = a_table(kind, folder)
        return lambda: CALLS[call](table, folder)

    with quick_folder() as folder:
        table = a_table(kind, folder)
        before = Content.of(table)
        CALLS[call](table, folder)
        after = Content.of(table)
    for moment in moments_of(made):
        with quick_folder() as folder:
            table = a_table(kind, folder)
            coming, kept = interrupted(lambda: CALLS[call](table, folder), moment)  # noqa: B023
            if coming.has_come and call == "save_async":
                wait_for_end(table)
            assert Content.of(table) in (before, after), coming.where
            check(table, folder, call, coming.where)
            del kept


def wait_for_end(table: Table) -> None:
    """Until what it may save in the background has ended."""
    if table._handle is not None:
        table._handle._finished.wait()


def check(table: Table, folder: str, call: str, where: str) -> None:
    """It goes on: a delta follows what the table says that it has saved, and rates are its own."""
    table.check_invariants()
    train(table, 3)
    if table.position is not None:
        has_followed = True
        if call == "save over another":  # and was interrupted: no delta follows the one before
            with suppress(CheckpointError):
                table.save_delta(f"{folder}/delta")
            has_followed = Path(f"{folder}/delta").exists()
        else:
            table.save_delta(f"{folder}/delta")
        if has_followed:
            compare(table, list(table.position.locations), where)
    table.save(f"{folder}/full")
    compare(table, f"{folder}/full", where)


def compare(table: Table, path: Any, where: str) -> None:
    loaded = table.empty_copy()
    loaded.load(path)
    assert Content.of(loaded) == Content.of(table), where
    for each in (loaded, table):
        train(each, 0)
    assert Content.of(loaded) == Content.of(table), where


# ---- modules -----------------------------------------------------------------------------------


class Trained:
    """A module, and what steps its rows."""

    def __init__(self, kind: str, made: type) -> None:
        torch.manual_seed(1)  # which draws names
        self.module = made(3, **MODULES.get(kind, {"name": "user"}))
        self.table = self.module.table
        self.dense_D = nn.Parameter(torch.ones(3))
        self.optimizer = None
        if kind == "by a RowOptimizer":
            parameters = [self.module.weight, self.dense_D]
            self.optimizer = RowOptimizer(parameters, torch.optim.Adagrad, lr=0.1)

    def look_up(self, first: int = 20) -> torch.Tensor:
        return self.module(torch.arange(first, first + 20).reshape(-1, 2))

    def step(self, first: int = 20) -> None:
        loss = (self.look_up(first) * self.dense_D).sum()
        if self.optimizer is None:
            loss.backward()
            return
        (loss + 0.1 * l2(self.module)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seen(self) -> tuple[Any, ...]:
        """What it holds, and by which names."""
        drawn = self.module.state_dict().get(DRAWN_NAME)
        names = {self.table.name, self.module.weight.table_name}
        names |= set() if drawn is None else {name_of(int(drawn))}
        return Content.of(self.table), names, self.dense_D.tolist()

    def keeps_leases(self) -> bool:
        """Whether the batches whose gradients add up are in flight."""
        accumulation = self.module._gradients.accumulation
        return accumulation is None or not any(x.is_released for x in accumulation._leases)

    def evaluate(self) -> None:
        self.module.eval()
        try:
            self.look_up()
        finally:
            self.module.train()

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


def a_module(kind: str, made: type) -> Trained:
    """One before a call; of gradients that add up one waits."""
    trained = Trained(kind, made)
    for first in (0, 10, 15):
        trained.step(first)
    return trained


@pytest.mark.parametrize(
    ("kind", "call", "made"),
    crossed(MODULES, ["step", "evaluate", "load", "reset"], MADE, size=12),
)
def test_a_module_is_as_before_or_after(kind: str, call: str, made: type) -> None:
    other = a_module(kind, made)
    for first in (30, 50):
        other.step(first)
    if kind == "without a name":
        other.module.reset_parameters()
        other.step(70)
    state = {name: value.clone() for name, value in other.module.state_dict().items()}
    expected = other.seen()[:2]

    def work_of(trained: Trained) -> Callable[[], Any]:
        return {
            "step": trained.step,
            "evaluate": trained.evaluate,
            "load": lambda: trained.load(state),
            "reset": trained.module.reset_parameters,
        }[call]

    trained = a_module(kind, made)
    allowed = [trained.seen()]
    work_of(trained)()
    allowed.append(trained.seen())
    if call == "step":  # or it has looked up alone
        trained = a_module(kind, made)
        trained.look_up()
        allowed.append(trained.seen())
    for moment in moments_of(lambda _: work_of(a_module(kind, made))):
        trained = a_module(kind, made)
        coming, kept = interrupted(work_of(trained), moment)
        found = trained.seen()
        assert found in allowed, coming.where
        assert trained.keeps_leases(), coming.where
        if is_begun_backward(coming):
            continue
        if trained.optimizer is not None and found != allowed[1]:
            trained.optimizer.zero_grad()
        trained.load(state)  # BusyError if a batch were in flight
        assert trained.seen()[:2] == expected, coming.where
        trained.step()
        del kept


def is_begun_backward(coming: Interrupting) -> bool:
    """Whether it came as torch had called a backward, before its first line: that keeps a batch
    until the error is let go of."""
    return coming.where.endswith("backward, at its start")


@pytest.mark.parametrize("made", MADE)
def test_another_optimizer_is_taken_or_not(made: type) -> None:
    def taking(trained: Trained) -> Callable[[], Any]:
        return lambda: RowOptimizer(trained.module, torch.optim.Adam, lr=0.1)

    for moment in moments_of(lambda _: taking(a_module("by a RowOptimizer", made))):
        trained = a_module("by a RowOptimizer", made)
        coming, kept = interrupted(taking(trained), moment)
        assert trained.optimizer is not None
        is_taken = isinstance(trained.table.optimizer, optim.Adam)
        assert is_taken == (trained.table.update_count == 0), coming.where
        if is_taken:
            with pytest.raises(RuntimeError, match="another RowOptimizer trains it since"):
                trained.step()
        else:
            trained.step()
        del kept


@pytest.mark.parametrize("made", MADE)
def test_an_optimizer_in_backward_is_taken_whole(made: type) -> None:
    def given() -> Trained:
        trained = Trained("trained by nobody", made)
        parameters = [trained.module.weight]
        apply_optimizer_in_backward(torch.optim.Adagrad, parameters, {"lr": 0.1})
        return trained

    expected = given()
    expected.step()
    for moment in moments_of(lambda _: given().look_up):
        trained = given()
        coming, kept = interrupted(trained.look_up, moment)
        trained.step()
        assert trained.seen() == expected.seen(), coming.where
        del kept


def test_a_chain_is_frozen_or_not(tmp_path: Path) -> None:
    a_table("plain", str(tmp_path))

    def made(folder: str) -> Callable[[], Any]:
        return lambda: freeze(f"{tmp_path}/1", f"{folder}/frozen")

    for moment in moments_of(made):
        with quick_folder() as folder:
            coming, kept = interrupted(made(folder), moment)
            freeze(f"{tmp_path}/1", f"{folder}/frozen", overwrite=True)
            assert len(open_tables(f"{folder}/frozen")["user"]) == 35, coming.where
            del kept
