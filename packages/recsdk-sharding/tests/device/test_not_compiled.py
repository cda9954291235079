"""Kernels that Triton does not compile: torch's operators do their work, and users are told."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fused_batches
import pytest
import torch
from fused_batches import DEVICE, Batch, Switches, Tables

from recsdk_core import BackendUnavailable, optim
from recsdk_sharding.device.kernel_choice import SETTING, fused_kernels
from recsdk_sharding.device.optimizers import Step
from recsdk_sharding.device.vectors import rows_of

pytest.importorskip("triton", reason="Triton is not installed")

from recsdk_sharding.device.fused import falling_back, planning, pooling, summing, updating
from recsdk_sharding.device.fused.launching import NotCompiled, launch

KERNELS = ("_find_runs", "_pool", "_sum_pieces", "_sum_spans", "_sum_all", "_update")
OF_OPERATION = {  # those that leave all of it to steps
    "pool_into": {"_pool"},
    "train_rows": {"_sum_pieces", "_sum_spans", "_update"},
}
BATCH = Batch(0, 3, (3, 4), (0, *[9] * 10), 90, 70, is_weighted=True, is_mean=True)
LONG = replace(BATCH, lengths=(5,) * 420, num_keys=2100, num_hot=2080)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)


@contextmanager
def refusing(names: set[str]) -> Iterator[None]:
    """As if Triton compiled none of these kernels, which nobody has been told yet."""

    def launch_or_not(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        if 0 in grid:
            return
        if kernel.fn.__name__ in names:
            raise NotCompiled(f"Triton does not compile {kernel.fn.__name__}")
        launch(kernel, grid, *args, **constants)

    with ExitStack() as patches:
        for module in (planning, pooling, summing, updating):
            patches.enter_context(mock.patch.object(module, "launch", launch_or_not))
        patches.enter_context(mock.patch.object(falling_back, "_told", set()))
        yield


def run_all(batch: Batch) -> dict[str, Any]:
    """What the operations give for a batch, by name."""
    offered, index = fused_kernels(), batch.index()
    store_RD = batch.numbers(batch.num_rows, batch.dim)
    grad_BD = batch.numbers(batch.num_bags, batch.dim)
    step = Step(optim.Adagrad(lr=0.1), 3)
    pooled_BD = torch.zeros(batch.num_bags, batch.dim, device=DEVICE)
    plan = offered["plan_rows"](index, batch.num_rows, batch.spare_row)
    sums_LD = offered["sum_gradients"](grad_BD, plan, index.weights_N)
    rows_U, count = plan.rows_L.unique(), int(plan.run_N[-1]) + 1
    state = {"sum": torch.ones(batch.num_rows, batch.dim, device=DEVICE)}
    stepped_RD, grad_UD = store_RD.clone(), grad_BD.new_ones(len(rows_U), batch.dim)
    for write in offered["update_rows"](step, stepped_RD, state, rows_U, grad_UD) or ():
        write()
    tables = Tables(batch, ("sum",), batch.dim, Switches(skips=True, tracks=True))
    before = {name: tensor.clone() for name, tensor in tables.tensors().items()}
    is_trained = offered["train_rows"](
        tables.update(step, plan), rows_of(grad_BD), plan, index.weights_N
    )
    is_same = [torch.equal(tensor, before[name]) for name, tensor in tables.tensors().items()]
    return {
        "plan_rows": plan.rows_L,
        "pool_rows": offered["pool_rows"](store_RD, index),
        "sum_gradients": sums_LD[:count],
        "update_rows": torch.cat([stepped_RD, state["sum"]]),
        "pool_into": offered["pool_into"](store_RD, index, rows_of(pooled_BD)),
        "train_rows": is_trained,
        "nothing is written": is_trained or all(is_same),
    }


@pytest.mark.parametrize(
    ("batch", "names"),
    [(BATCH, {name}) for name in KERNELS if name != "_sum_spans"]
    + [(replace(BATCH, lengths=None, is_weighted=False), {"_update", "_sum_all"})]
    + [(LONG, {"_sum_spans"}), (LONG, set(KERNELS))],
    ids=lambda value: f"{value.num_keys} keys" if isinstance(value, Batch) else str(sorted(value)),
)
def test_torchs_operators_do_what_was_not_compiled(batch: Batch, names: set[str]) -> None:
    expected = run_all(batch)
    with refusing(names), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = run_all(batch)
        if batch is BATCH:
            run_all(batch)
    for name, value in expected.items():
        if not isinstance(value, bool):
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-3), name
    assert found["nothing is written"]
    for name in ("pool_into", "train_rows"):
        assert found[name] == (not names & OF_OPERATION[name])
    told = [each for each in warned if "Triton does not compile" in str(each.message)]
    refused = [str(each.message).split()[4].strip(";") for each in told]
    never_tried = {"_sum_spans", "_sum_all"} if "_sum_pieces" in names else set()
    assert sorted(refused) == sorted(names - never_tried)  # once each
    assert all(each.category is RuntimeWarning and SETTING in str(each.message) for each in told)


def test_kernels_that_are_asked_for_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "triton")
    offered, store_RD = fused_kernels(), BATCH.numbers(BATCH.num_rows, BATCH.dim)
    with refusing({"_pool"}):
        for _ in range(2):
            with pytest.raises(BackendUnavailable, match=f"{SETTING}=triton: .*_pool.*unset"):
                offered["pool_rows"](store_RD, BATCH.index())


def test_the_first_trial_falls_back_to_nothing() -> None:
    from recsdk_sharding.device.fused.checking import check

    for name in ("_find_runs", "_pool", "_sum_all", "_update"):
        with refusing({name}), pytest.raises(NotCompiled, match=name):
            check(DEVICE)


def test_what_triton_refuses_is_told_from_what_a_device_refuses(tmp_path: Path) -> None:
    script = Path(fused_batches.__file__).with_name("launch_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    first, second, third, fourth, fifth = lines
    assert first[0] == "4"
    assert first[2] == "NotCompiled"
    assert "_fill here, for WIDTH=4" in first[3]
    assert "four is refused" in first[3]
    assert second == ["4", "0", *first[2:]]  # not tried again
    assert third[0] == "8"
    assert third[2] == "AttributeError"
    assert fourth[2] == "NotCompiled"
    assert "_fill here, for WIDTH=16: RuntimeError: sixteen is refused" in fourth[3]
    assert fifth == ["16", "0", *fourth[2:]]
