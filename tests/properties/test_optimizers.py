"""The fused optimizers against torch.optim, torchrec and fbgemm on the same rows.

Shape letters: N keys, U unique keys, D row width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from hypothesis import given
from hypothesis import strategies as st
from torchrec.optim import SGD, Adagrad, Adam, RowWiseAdagrad

from recsdk_core import Table, init, optim
from recsdk_core.testing import vectors

# The order of operations within a formula is not torch's everywhere: the last bits differ.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}

DENSE = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.3}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.2}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.5, "weight_decay": 0.1, "eps": 1e-3}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.7}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"lr": 0.1, "betas": (0.3, 0.6), "eps": 1e-3, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"lr": 0.1, "betas": (0.3, 0.6), "eps": 1e-3, "weight_decay": 0.3}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"alpha": 0.7, "eps": 1e-3, "momentum": 0.6, "weight_decay": 0.2}),
    (torch.optim.RMSprop, {"alpha": 0.7, "eps": 1e-3, "centered": True}),
    (RowWiseAdagrad, {}),
    (RowWiseAdagrad, {"lr": 0.3, "weight_decay": 0.2, "eps": 1e-2}),
    (RowWiseAdagrad, {"initial_accumulator_value": 0.5}),
]


def names(case: Any) -> str:
    return str(case if isinstance(case, dict) else getattr(case, "__name__", case))


def make_rows(table: Table, num_rows: int) -> torch.Tensor:
    """Inserts the keys 7, 14, ... and returns their rows (U, D)."""
    return torch.from_numpy(table.find_or_insert(ids_of(np.arange(num_rows))))


def ids_of(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The key of each row of the dense matrix."""
    return (numbers + 1) * np.int64(-(2**60) + 7)


@st.composite
def steps(draw: st.DrawFn, num_rows: int, dim: int, *, touch_all: bool) -> list[Any]:
    """[(row of each gradient (N,), gradients (N, D)), ...], with duplicates.

    Gradients are multiples of 1/256, so that their sums are exact in any order: a sum that nearly
    cancels would leave a rounding error that Adam scales up.
    """
    row = st.integers(0, num_rows - 1)
    made = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.lists(row, max_size=12))
        if touch_all:
            rows = draw(st.permutations([*range(num_rows), *rows]))
        grads = np.round(draw(vectors(len(rows), dim)) * 256) / 256
        made.append((np.array(rows, np.int64), grads))
    return made


def summed(rows: Any, grads: Any, num_rows: int) -> torch.Tensor:
    dense = torch.zeros(num_rows, grads.shape[1])
    return dense.index_add_(0, torch.from_numpy(rows), torch.from_numpy(grads))


@pytest.mark.parametrize(("torch_class", "kwargs"), DENSE, ids=names)
@given(data=st.data(), dim=st.sampled_from([1, 5, 16, 33]))
def test_equals_torch_on_rows_that_every_step_touches(
    torch_class: Any, kwargs: dict[str, Any], data: st.DataObject, dim: int
) -> None:
    table = Table(
        dim, optimizer=optim.from_torch(torch_class, kwargs), initializer=init.Normal(), seed=3
    )
    weight = torch.nn.Parameter(make_rows(table, 6))
    optimizer = torch_class([weight], **kwargs)
    for rows, grads in data.draw(steps(6, dim, touch_all=True)):
        table.apply_gradients(ids_of(rows), grads)
        weight.grad = summed(rows, grads, 6)
        optimizer.step()
    actual = torch.from_numpy(table.lookup(ids_of(np.arange(6))))
    torch.testing.assert_close(actual, weight.detach(), **TOLERANCE)


@given(data=st.data(), dim=st.sampled_from([1, 4, 17]))
def test_adam_on_rows_that_some_steps_touch_equals_sparse_adam(
    data: st.DataObject, dim: int
) -> None:
    """SparseAdam, too, leaves other rows alone and counts updates of the whole table.

    It adds eps before it corrects the bias, others after: an eps that changes no sum hides that.
    """
    table = Table(dim, optimizer=optim.Adam(lr=0.1, eps=1e-20), initializer=init.Normal())
    weight = torch.nn.Parameter(make_rows(table, 6))
    optimizer = torch.optim.SparseAdam([weight], lr=0.1, eps=1e-20)
    for rows, grads in data.draw(steps(6, dim, touch_all=False)):
        table.apply_gradients(ids_of(rows), grads)
        weight.grad = torch.sparse_coo_tensor(
            rows[None], torch.from_numpy(grads), (6, dim), check_invariants=True
        )
        optimizer.step()
    actual = torch.from_numpy(table.lookup(ids_of(np.arange(6))))
    torch.testing.assert_close(actual, weight.detach(), **TOLERANCE)


@given(data=st.data())
def test_adam_with_a_count_per_row_equals_one_torch_adam_per_row(data: st.DataObject) -> None:
    optimizer = optim.Adam(lr=0.1, bias_correction="row", weight_decay=0.1)
    table = Table(3, optimizer=optimizer, initializer=init.Normal())
    weights = [torch.nn.Parameter(row.clone()) for row in make_rows(table, 4)]
    adams = [torch.optim.Adam([weight], lr=0.1, weight_decay=0.1) for weight in weights]
    for rows, grads in data.draw(steps(4, 3, touch_all=False)):
        table.apply_gradients(ids_of(rows), grads)
        dense = summed(rows, grads, 4)
        for row in set(rows.tolist()):
            weights[row].grad = dense[row]
            adams[row].step()
    actual = torch.from_numpy(table.lookup(ids_of(np.arange(4))))
    torch.testing.assert_close(actual, torch.stack(weights).detach(), **TOLERANCE)


def test_classes_of_torchrec() -> None:
    """Three of them are stand-ins that cannot run: torch's of the same name say what they mean."""
    assert optim.from_torch(SGD, {"lr": 0.5}) == optim.SGD(lr=0.5)
    assert optim.from_torch(Adagrad) == optim.Adagrad()
    assert optim.from_torch(Adam, {"betas": (0.5, 0.6)}) == optim.Adam(betas=(0.5, 0.6))
    assert optim.from_torch(RowWiseAdagrad) == optim.RowwiseAdagrad()


FBGEMM = [
    (EmbOptimType.EXACT_SGD, optim.SGD(lr=0.3), {}),
    (EmbOptimType.EXACT_ADAGRAD, optim.Adagrad(lr=0.3, eps=1e-3), {"eps": 1e-3}),
    (EmbOptimType.EXACT_ROWWISE_ADAGRAD, optim.RowwiseAdagrad(lr=0.3, eps=1e-3), {"eps": 1e-3}),
]


@pytest.mark.parametrize(("kind", "optimizer", "kwargs"), FBGEMM, ids=lambda case: names(case)[:24])
@given(data=st.data(), dim=st.sampled_from([4, 16, 20]))
def test_equals_fbgemm_on_rows_that_some_steps_touch(
    kind: EmbOptimType,
    optimizer: optim.Optimizer,
    kwargs: dict[str, Any],
    data: st.DataObject,
    dim: int,
) -> None:
    table = Table(dim, optimizer=optimizer, initializer=init.Normal())
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(6, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=kind,
        learning_rate=optimizer.lr,
        **kwargs,
    )
    [weight] = peer.split_embedding_weights()
    weight.data.copy_(make_rows(table, 6))
    for rows, grads in data.draw(steps(6, dim, touch_all=False)):
        offsets = torch.arange(len(rows) + 1)
        if len(rows):
            peer(torch.from_numpy(rows), offsets).backward(torch.from_numpy(grads))
        table.pool_backward(ids_of(rows), offsets.numpy(), grads)
    actual = torch.from_numpy(table.lookup(ids_of(np.arange(6))))
    torch.testing.assert_close(actual, weight.detach(), **TOLERANCE)


@given(data=st.data(), pooling=st.sampled_from(["sum", "mean"]))
def test_backward_of_bags_equals_gradients_by_key(data: st.DataObject, pooling: str) -> None:
    """What pool_backward does to rows is apply_gradients with each key's share."""
    tables = [
        Table(5, optimizer=optim.Adagrad(lr=0.1), initializer=init.Normal()) for _ in range(2)
    ]
    for table in tables:
        make_rows(table, 5)
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=5))
    offsets = np.cumsum([0, *lengths])
    rows = data.draw(
        st.lists(st.integers(0, 6), min_size=int(offsets[-1]), max_size=int(offsets[-1]))
    )
    ids, grad = ids_of(np.array(rows, np.int64)), data.draw(vectors(len(lengths), 5))
    tables[0].pool_backward(ids, offsets, grad, None, pooling)
    scale = np.array([1 / n if n and pooling == "mean" else 1 for n in lengths], np.float32)
    shares = np.repeat(grad * scale[:, None], lengths, axis=0)
    tables[1].apply_gradients(ids, shares)
    first, second = (table.lookup(ids_of(np.arange(5))) for table in tables)
    np.testing.assert_array_equal(first, second)
