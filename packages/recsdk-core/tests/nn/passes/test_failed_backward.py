"""What a table refuses while batches are in flight, after a backward that raised.

torch keeps the nodes whose turn would have come next, and they keep their batches in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import Evict, Index, Table, optim
from recsdk_core.errors import BusyError
from recsdk_core.nn import HashEmbedding, RowOptimizer

DIM = 2
KEYS = torch.arange(3)


class HoldsLease(torch.autograd.Function):
    """As a framework's own: its node holds the lease of what it read."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, lease: Any) -> torch.Tensor:
        ctx.lease = lease
        return leaf * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def fail_in_backward(num_left: int, hold: Callable[[int], torch.Tensor]) -> None:
    """Leaves nodes behind: the first to come raises once all are ready."""
    values = [hold(number) for number in range(num_left)]
    last = torch.ones((), requires_grad=True)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("on purpose")

    product = last * 1.0
    product.register_hook(fail)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError):
        (torch.stack([each.sum() for each in values]).sum() + product).backward()


def holding(*tables: Table | Index, step: int | None = None) -> Callable[[int], torch.Tensor]:
    leaf = torch.ones(1, requires_grad=True)

    def hold(number: int) -> torch.Tensor:
        return HoldsLease.apply(leaf, [each.lease(step) for each in tables])

    return hold


REPLACING: dict[str, Callable[[Table, Path], Any]] = {
    "load": lambda table, folder: table.load(folder),
    "set_optimizer": lambda table, _: table.set_optimizer(optim.Adagrad()),
    "rename": lambda table, _: table.rename("other"),
    "check_idle": lambda table, _: table.check_idle(),
}
OF_STEPS: dict[str, Callable[[Table, Path], Any]] = {
    "erase": lambda table, _: table.erase(KEYS),
    "clear": lambda table, _: table.clear(),
    "evict": lambda table, _: table.evict(max_rows=1),
    "expire": lambda table, _: table.expire(),
    "leavers": lambda table, _: table.leavers(),
    "upsert": lambda table, _: table.upsert(KEYS, torch.ones(3, DIM)),
    "find_or_insert": lambda table, _: table.find_or_insert(KEYS),
    "map": lambda table, _: table.map(KEYS, insert=True),
    "pool": lambda table, _: table.pool(KEYS, torch.tensor([0, 3]), insert=True),
}


@pytest.mark.parametrize("step", [None, 5])
@pytest.mark.parametrize("call", REPLACING | OF_STEPS)
def test_calls_go_on_after_a_backward_that_raised(
    tmp_path: Path, call: str, step: int | None
) -> None:
    table = Table(DIM, optimizer=optim.SGD(), max_rows=9, eviction=Evict.lru().expiring(ttl=100))
    run = (REPLACING | OF_STEPS)[call]
    table.save(tmp_path / "saved")
    fail_in_backward(2, holding(table, step=step))
    with torch.inference_mode():
        run(table, tmp_path / "saved")
    held = table.lease(6)
    with pytest.raises(BusyError, match="in flight|open"):  # whose owner can end it
        run(table, tmp_path / "saved")
    held.release()
    run(table, tmp_path / "saved")


@pytest.mark.parametrize("step", [None, 5])
@pytest.mark.parametrize("call", ["assign", "clear", "erase", "map"])
def test_calls_of_an_index_go_on_after_a_backward_that_raised(call: str, step: int | None) -> None:
    index = Index()
    fail_in_backward(2, holding(index, step=step))
    given: dict[str, Any] = {"insert": True} if call == "map" else {}
    getattr(index, call)(*([] if call == "clear" else [np.arange(3)]), **given)
    assert len(index) == (3 if call in ("assign", "map") else 0)


@given(st.integers(1, 60), st.booleans())
def test_all_nodes_that_a_backward_left_are_let_go_of(num_left: int, is_twice: bool) -> None:
    table = Table(DIM)
    for _ in range(1 + is_twice):
        fail_in_backward(num_left, holding(table))
    table.check_idle()


def test_modules_take_other_rows_and_optimizers_after_a_backward_that_raised(
    tmp_path: Path,
) -> None:
    def module() -> HashEmbedding:
        evicts: Any = {"max_rows": 9, "eviction": Evict.lru()}
        return HashEmbedding(DIM, name="ids", **evicts)

    def fail(*modules: HashEmbedding) -> None:
        fail_in_backward(len(modules), lambda number: modules[number](KEYS))

    one, other = module(), module()
    saved = one.state_dict()
    optimizer = RowOptimizer([one.weight, other.weight], torch.optim.SGD, lr=0.5)
    for replace in (
        lambda: one.load_state_dict(saved),
        lambda: one.reset_parameters(),
        lambda: one.table.load(tmp_path),
        lambda: RowOptimizer([one.weight, other.weight], torch.optim.Adagrad, lr=0.5),
    ):
        if not any(tmp_path.iterdir()):
            one.table.save(tmp_path)
        fail(one, other)
        optimizer.zero_grad()
        replace()
    one.table.check_idle()


def test_a_batch_of_another_thread_stays_in_flight() -> None:
    table = Table(DIM)
    ready, done = threading.Event(), threading.Event()

    def train() -> None:
        fail_in_backward(1, holding(table))
        ready.set()
        done.wait()
        table.check_idle()

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    with pytest.raises(BusyError):
        table.check_idle()
    done.set()
    thread.join()
    table.check_idle()


def test_a_call_within_a_backward_is_refused_as_before() -> None:
    table = Table(DIM)
    held = table.lease()
    leaf = torch.ones(1, requires_grad=True)
    raised = []

    def replace(grad: torch.Tensor) -> None:
        with pytest.raises(BusyError):
            table.check_idle()
        raised.append(grad)

    product = leaf * 2
    product.register_hook(replace)  # type: ignore[no-untyped-call]
    (product + HoldsLease.apply(leaf, held)).sum().backward()
    assert len(raised) == 1
    assert leaf.grad is not None
    assert leaf.grad.item() == 3


CHANGED_BY_TORCH: dict[str, Callable[[Callable[[torch.Tensor], Any]], Any]] = {
    "grad": torch.func.grad,
    "vmap": torch.func.vmap,
    "compile": lambda call: torch.compile(call, backend="eager"),
}


@pytest.mark.parametrize("how", CHANGED_BY_TORCH)
def test_a_call_in_what_torch_changes_is_refused_in_our_words(how: str) -> None:
    table = Table(DIM)
    held = table.lease()

    def call(values: torch.Tensor) -> torch.Tensor:
        table.check_idle()
        return values.sum()

    with pytest.raises(BusyError, match="release and finish them first"):
        CHANGED_BY_TORCH[how](call)(torch.ones(3))
    held.release()
    fail_in_backward(1, holding(table))
    if how == "compile":
        assert torch.compile(call, backend="eager")(torch.ones(3)).item() == 3
    table.check_idle()
