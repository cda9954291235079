"""Whether Triton's kernels do on this machine what torch's operators do."""

from __future__ import annotations

import torch

from recsdk_core import optim
from recsdk_sharding.device import kernels, optimizers
from recsdk_sharding.device.fused import planning, pooling, summing, updating
from recsdk_sharding.device.kernels import BagIndex, RowUpdate
from recsdk_sharding.device.vectors import rows_of

__all__ = ["check"]

_NUM_ROWS, _DIM = 5, 3


def check(device: torch.device) -> None:
    """Runs each kernel on a small batch; raises what it raises, RuntimeError if results differ.

    Waits for the device.
    """

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    index = BagIndex(
        rows_N=torch.tensor([2, 0, 2, 2, 3], dtype=torch.int32, device=device),
        offsets=torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=device),
        weights_N=numbers(1.0, 0.5, 2.0, 1.0, 3.0),
    )
    store_RD = numbers(*(number / 8 - 1 for number in range(_NUM_ROWS * _DIM))).view(-1, _DIM)
    pooled_BD = kernels.pool_rows(store_RD, index)
    _require_close("pool_rows", pooling.pool_rows(store_RD, index), pooled_BD)
    plan = planning.plan_rows(index, _NUM_ROWS, _NUM_ROWS - 1)
    sums_LD = kernels.sum_gradients(
        pooled_BD, kernels.plan_rows(index, _NUM_ROWS, _NUM_ROWS - 1), index.weights_N
    )
    found_LD = summing.sum_gradients(pooled_BD, plan, index.weights_N)
    _require_close("sum_gradients", found_LD[:3], sums_LD[:3])
    step = optimizers.Step(optim.RowwiseAdagrad(lr=0.1), 1)
    expected_RD, total_R1 = store_RD.clone(), store_RD.new_zeros(_NUM_ROWS, 1)
    rows_3 = plan.rows_L[:3]
    for write in optimizers.update_rows(
        step, expected_RD, {"sum": total_R1.clone()}, rows_3, sums_LD[:3]
    ):
        write()
    stepped_RD, trained_RD = store_RD.clone(), store_RD.clone()
    updating.update_rows(step, stepped_RD, {"sum": total_R1.clone()}, rows_3, found_LD[:3])
    _require_close("update_rows", stepped_RD, expected_RD)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    update = RowUpdate(
        step=step,
        store_RD=trained_RD,
        state={"sum": total_R1},
        places_L=plan.rows_L,
        skips_nonfinite=True,
        nonfinite_2T=counts,
        ends_2T=counts + torch.tensor([_NUM_ROWS - 1, _NUM_ROWS], device=device),
        is_updated_R=None,
    )
    updating.train_rows(update, rows_of(pooled_BD), plan, index.weights_N)
    _require_close("train_rows", trained_RD, expected_RD)


def _require_close(operation: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
        raise RuntimeError(f"{operation} gives {found.tolist()}, expected {expected.tolist()}")
