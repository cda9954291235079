"""Triton's kernels beside torch's operators; without a CUDA device they are interpreted.

Shape letters: N keys, B bags, L distinct rows, R rows of the store, D row width.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fused_batches
import numpy as np
import pytest
import torch
from fused_batches import DEVICE, Batch, Placing, Switches, Tables, batches, placings
from hypothesis import example, given, settings
from hypothesis import strategies as st

import optimizer_updates
from recsdk_core import optim
from recsdk_sharding.device import kernels
from recsdk_sharding.device.kernels import RowIndex
from recsdk_sharding.device.optimizers import Step
from recsdk_sharding.device.vectors import rows_of

pytest.importorskip("triton", reason="Triton is not installed")

from recsdk_sharding.device.fused import launching, planning, pooling, summing, updating
from recsdk_sharding.device.fused.checking import check
from recsdk_sharding.device.fused.formulas import formula_of

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE") == "full"
EPSILON = float(np.finfo(np.float32).eps)
ROUNDINGS = 4
"""Of the largest number that a field has before or after, as torch's operators are allowed."""
UPDATES = {case.name: case for case in optimizer_updates.read_cases() if "torch" in case.tables}
HOT = Batch(0, 3, (3, 4), None, 4300, 4200, is_weighted=True, is_mean=False)
MANY_TABLES = replace(HOT, table_rows=(2, 3) * 20, lengths=(100, 200), num_keys=300, num_hot=33)
"""More than are looked at together."""
WIDE = replace(MANY_TABLES, dim=520, table_rows=(2, 3, 7), lengths=(40, 60), num_keys=100)
"""Each row has several warps."""
PLACING = Placing(seed=0, gaps=(2, 0), most_features=3)
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.SGD(lr=0.1, clip_value=0.5, weight_decay=0.1),
    optim.Adagrad(lr=0.1, eps=1e-3, lr_decay=0.1),
    optim.Adagrad(lr=0.1, eps=1e-3, weight_decay=0.1, weight_decay_mode="decoupled"),
    optim.RowwiseAdagrad(lr=0.1, eps=1e-3),
    optim.RowwiseAdagrad(lr=0.1, eps=1e-3, clip_value=0.5, weight_decay=0.1),
    optim.Adam(lr=0.02),
    optim.Adam(lr=0.02, betas=(0.3, 0.9), weight_decay=0.1),
    optim.AdamW(lr=0.02, clip_value=0.5),
]
COMPILED = (
    ("80,90,100", "1,3,4,16,64,200,4096", "32,64", "all")
    if IS_FULL
    else ("90", "1,4,16,64", "32,64", "pairs")
)
"""Architectures, widths, bits of row numbers, and how many of the kernels."""
FIELDS = {optim.SGD: (), optim.Adagrad: ("sum",), optim.RowwiseAdagrad: ("sum",)}


def fewer(number: int) -> settings:
    """One in so many of the examples of the profile: an interpreted kernel takes long."""
    return settings(max_examples=max(10, settings().max_examples // number))


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.bfloat16])
def test_all_kernels_work_here(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        check(DEVICE)
    finally:
        torch.set_default_dtype(torch.float32)


# ---- pooling and planning -----------------------------------------------------------------------


@fewer(2)
@given(
    batch=batches(has_keys=False),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@example(batch=HOT, dtype=torch.float32)
@example(batch=WIDE, dtype=torch.bfloat16)
def test_bags_are_pooled_as_by_torch(batch: Batch, dtype: torch.dtype) -> None:
    store_RD = batch.numbers(batch.num_rows, batch.dim).to(dtype)
    index = batch.index()
    found_BD = pooling.pool_rows(store_RD, index)
    assert found_BD.dtype == torch.float32
    expected_BD = kernels.pool_rows(store_RD.float(), index)
    assert torch.allclose(found_BD, expected_BD, rtol=1e-5, atol=1e-5)
    assert torch.equal(pooling.pool_rows(store_RD, index), found_BD)


@fewer(2)
@given(batch=batches(has_keys=False), placing=placings())
@example(batch=HOT, placing=PLACING)
def test_bags_are_pooled_to_their_places(batch: Batch, placing: Placing) -> None:
    store_RD, index = batch.numbers(batch.num_rows, batch.dim), batch.index()
    matrix = placing.matrix(batch)
    expected_SC = matrix.values_SC.clone()
    replace(matrix, values_SC=expected_SC).take(pooling.pool_rows(store_RD, index))
    assert pooling.pool_into(store_RD, index, matrix)
    assert torch.equal(matrix.values_SC, expected_SC)
    assert torch.equal(matrix.joined(), pooling.pool_rows(store_RD, index))


@fewer(2)
@given(batch=batches())
def test_a_plan_is_that_of_torch(batch: Batch) -> None:
    index, shape = batch.index(), (batch.num_rows, batch.spare_row)
    found, expected = planning.plan_rows(index, *shape), kernels.plan_rows(index, *shape)
    for name in ("rows_L", "sorted_N", "order_N", "bag_N"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.run_N.long(), expected.run_N)
    assert found.begins_L is not None
    assert torch.equal(found.begins_L, summing.begins_of(expected))


# ---- sums ---------------------------------------------------------------------------------------


def planned(batch: Batch) -> tuple[RowIndex, torch.Tensor | None]:
    index = batch.index()
    return planning.plan_rows(index, batch.num_rows, batch.spare_row), index.weights_N


@fewer(2)
@given(batch=batches())
@example(batch=HOT)
@example(batch=replace(HOT, num_keys=4200, table_rows=(2,)))
def test_gradients_are_summed_as_by_torch(batch: Batch) -> None:
    plan, weights_N = planned(batch)
    grad_BD = batch.numbers(batch.num_bags, batch.dim)
    found_LD = summing.sum_gradients(grad_BD, plan, weights_N)
    wide_N = None if weights_N is None else weights_N.double()
    exact_LD = kernels.sum_gradients(grad_BD.double(), plan, wide_N)
    size_N = None if wide_N is None else wide_N.abs()
    size_LD = kernels.sum_gradients(grad_BD.double().abs(), plan, size_N)
    assert ((found_LD - exact_LD).abs() <= 64 * EPSILON * size_LD).all()
    again = summing.sum_gradients(grad_BD.T.contiguous().T, replace(plan, begins_L=None), weights_N)
    assert torch.equal(again, found_LD)


@fewer(4)
@given(batch=batches(), number=st.integers(0, 2**16))
@example(batch=HOT, number=0)
def test_the_sum_of_a_row_depends_on_its_own_gradients_alone(batch: Batch, number: int) -> None:
    plan, weights_N = planned(batch)
    grad_BD = batch.numbers(batch.num_bags, batch.dim)
    sums_LD = summing.sum_gradients(grad_BD, plan, weights_N)
    begins_L = summing.begins_of(plan)
    run = number % int(plan.run_N[-1] + 1)
    own = slice(int(begins_L[run]), int(begins_L[run + 1]))
    order_N = plan.order_N[own]
    alone = RowIndex(
        plan.rows_L[run : run + 1],
        plan.sorted_N[own],
        torch.zeros_like(order_N),
        order_N,
        plan.bag_N[own],
    )
    assert torch.equal(summing.sum_gradients(grad_BD, alone, weights_N)[0], sums_LD[run])


def sum_in_order(grad_ND: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One after the other, in float32."""
    total_D = np.zeros(grad_ND.shape[1], np.float32)
    for grad_D in grad_ND:
        total_D += grad_D
    return total_D


@fewer(4)
@given(batch=batches().map(lambda batch: replace(batch, is_weighted=False)))
@example(batch=replace(HOT, is_weighted=False))
def test_sums_are_added_in_the_order_that_is_written(batch: Batch) -> None:
    plan, _ = planned(batch)
    grad_BD = batch.numbers(batch.num_bags, batch.dim)
    found_LD = summing.sum_gradients(grad_BD, plan, None)
    grad_ND = grad_BD[plan.bag_N].cpu().numpy()
    begins = summing.begins_of(plan).tolist()
    for run in range(int(plan.run_N[-1]) + 1):
        keys_ND = grad_ND[begins[run] : begins[run + 1]]
        num_spans = len(keys_ND) // summing.SPAN
        in_pieces = keys_ND[: len(keys_ND) // summing.PIECE * summing.PIECE]
        pieces = [sum_in_order(piece) for piece in in_pieces.reshape(-1, summing.PIECE, batch.dim)]
        per_span = summing.SPAN // summing.PIECE
        spans = [
            sum_in_order(np.array(pieces[n * per_span : (n + 1) * per_span]))
            for n in range(num_spans)
        ]
        parts = [*spans, *pieces[num_spans * per_span :], *keys_ND[len(in_pieces) :]]
        assert np.array_equal(found_LD[run].cpu().numpy(), sum_in_order(np.array(parts)))


@given(st.integers(1, 2**30) | st.integers(0, 30).map(lambda bit: 2**bit), st.data())
def test_a_product_divides_the_numbers_of_bags(number: int, data: st.DataObject) -> None:
    factor, shift = launching.divider(number)
    assert factor < 2**31
    last = launching.MOST_BAGS - 1
    drawn = data.draw(st.lists(st.integers(0, last)))
    multiple = last // number * number
    for n in (0, number - 1, multiple - 1, multiple, last, *drawn):
        if 0 <= n <= last:
            assert n * factor >> 30 + shift == n // number


# ---- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_the_table_up_to_rounding(name: str) -> None:
    case = UPDATES[name]
    for update in case.updates:
        step = Step(replace(case.optimizer, lr=update.lr), update.t, update.log_decay)
        fields = {f: torch.from_numpy(v.copy())[None].to(DEVICE) for f, v in update.before.items()}
        grad_UD = torch.from_numpy(update.gradient)[None].to(DEVICE)
        state = {f: value for f, value in fields.items() if f != "weight"}
        rows_U = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        writes = updating.update_rows(step, fields["weight"], state, rows_U, grad_UD)
        assert (writes is None) == (formula_of(step) is not None)
        for write in writes or ():
            write()
        for field, expected in update.after.items():
            largest = np.maximum(np.abs(update.before[field]), np.abs(expected))
            error = np.abs(fields[field][0].cpu().numpy() - expected)
            assert (error <= ROUNDINGS * EPSILON * largest).all(), (field, error)


def test_the_common_optimizers_are_kernels() -> None:
    with_one = [case.optimizer for case in UPDATES.values() if formula_of(Step(case.optimizer, 1))]
    has_one = {type(optimizer).__name__ for optimizer in with_one}
    assert has_one == {"SGD", "Adagrad", "RowwiseAdagrad", "Adam", "AdamW"}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, with no numbers
@fewer(1)
@given(
    batch=batches(),
    optimizer=st.sampled_from(OPTIMIZERS),
    skips=st.booleans(),
    tracks=st.booleans(),
    bad=st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=3),
    placing=placings(),
)
@example(batch=HOT, optimizer=OPTIMIZERS[6], skips=True, tracks=True, bad=[np.nan], placing=PLACING)
@example(
    batch=MANY_TABLES,
    optimizer=OPTIMIZERS[4],
    skips=True,
    tracks=True,
    bad=[np.nan],
    placing=PLACING,
)
@example(batch=WIDE, optimizer=OPTIMIZERS[4], skips=False, tracks=False, bad=[], placing=PLACING)
def test_a_batch_trains_as_by_torch_step_by_step(
    batch: Batch, optimizer: Any, skips: bool, tracks: bool, bad: list[float], placing: Placing
) -> None:
    plan, weights_N = planned(batch)
    grad_BD = batch.numbers(batch.num_bags, batch.dim)
    for number, value in enumerate(bad):
        grad_BD[number % len(grad_BD), -1] = value
    step, how = Step(optimizer, 3), Switches(skips, tracks)
    fields = FIELDS.get(type(optimizer), ("exp_avg", "exp_avg_sq"))
    width = 1 if isinstance(optimizer, optim.RowwiseAdagrad) else batch.dim
    found, again, expected = (Tables(batch, fields, width, how) for _ in range(3))
    expected.train_by_steps(step, plan, kernels.sum_gradients(grad_BD, plan, weights_N))
    matrix = placing.matrix(batch)
    matrix.take(grad_BD)
    for tables, grads in ((found, matrix), (again, rows_of(grad_BD))):
        assert updating.train_rows(tables.update(step, plan), grads, plan, weights_N)
    # Sums that cancel keep the rounding of what was added up.
    sizes_N = None if weights_N is None else weights_N.abs()
    added = kernels.sum_gradients(grad_BD.abs(), plan, sizes_N).nan_to_num(0, 0, 0).max().item()
    atol = 2e-5 + 1e-6 * added
    for name, tensor in found.tensors().items():
        other = expected.tensors()[name]
        assert torch.allclose(tensor, other, rtol=2e-4, atol=atol, equal_nan=True), name
        assert torch.equal(tensor.view(torch.uint8), again.tensors()[name].view(torch.uint8)), name


def test_rows_that_are_too_wide_go_by_torchs_operators() -> None:
    batch = replace(WIDE, dim=4097)
    plan, weights_N = planned(batch)
    store_RD, index = batch.numbers(batch.num_rows, batch.dim), batch.index()
    pooled_BD = pooling.pool_rows(store_RD, index)
    assert torch.equal(pooled_BD, kernels.pool_rows(store_RD, index))
    assert not pooling.pool_into(store_RD, index, rows_of(pooled_BD))
    found_LD = summing.sum_gradients(pooled_BD, plan, weights_N)
    assert torch.equal(found_LD, kernels.sum_gradients(pooled_BD, plan, weights_N))
    tables, step = Tables(batch, ("sum",), 1, Switches(True, True)), Step(OPTIMIZERS[4], 1)
    before = {name: tensor.clone() for name, tensor in tables.tensors().items()}
    assert not updating.train_rows(tables.update(step, plan), rows_of(pooled_BD), plan, weights_N)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tables.tensors().items())
    state = {"sum": torch.ones(batch.num_rows, 1, device=DEVICE)}
    rows_U = torch.arange(2, device=DEVICE)
    assert updating.update_rows(step, store_RD, state, rows_U, pooled_BD) is not None


# ---- for the devices of others ------------------------------------------------------------------


@pytest.mark.skipif(DEVICE.type == "cuda", reason="they run here, so they were compiled")
def test_kernels_compile_for_devices_that_are_not_here(tmp_path: Path) -> None:
    script = Path(fused_batches.__file__).with_name("compile_kernels.py")
    left_out = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script), *COMPILED],
        env={**os.environ, **left_out},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kinds = {line.split()[0] for line in done.stdout.splitlines()}
    assert kinds == {
        "_find_runs",
        "_pool",
        "_sum_all",
        "_sum_pieces",
        "_sum_spans",
        "_update",
    }
