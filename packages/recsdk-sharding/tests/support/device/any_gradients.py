"""Collections of any widths and poolings whose gradients lie in memory in any way, beside the cpu.

Shape letters: S samples, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from device_type import DEVICE_TYPE
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import rows_of

from recsdk_core import Default, optim
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig, RowOptimizer
from recsdk_sharding.device import kernels
from recsdk_sharding.device.vectors import BagMatrix

Layout = Callable[[torch.Tensor, int, int], torch.Tensor]

LAYOUTS: dict[str, Layout] = {
    "whole": lambda numbers, s, c: numbers[: s * c].view(s, c),
    "one row for all": lambda numbers, s, c: numbers[:c].expand(s, c),
    "one number of a row": lambda numbers, s, c: numbers[:s, None].expand(s, c),
    "one number": lambda numbers, s, c: numbers[0].expand(s, c),
    "by columns": lambda numbers, s, c: numbers[: s * c].view(c, s).t(),
    "within": lambda numbers, s, c: numbers[: (s + 2) * (c + 3)].view(s + 2, c + 3)[1:-1, 2:-1],
    "every second column": lambda numbers, s, c: numbers[: 2 * s * c].view(s, 2 * c)[:, ::2],
    "every second row": lambda numbers, s, c: numbers[: 2 * s * c].view(2 * s, c)[::2],
    "rows over each other": lambda numbers, s, c: numbers.as_strided((s, c), (1, 1)),
}
"""A matrix (S, C) of some of a row of numbers, enough of them."""
OPTIMIZERS = [
    optim.SGD(lr=0.1),
    optim.Adagrad(lr=0.1, eps=1e-2),
    optim.RowwiseAdagrad(lr=0.1, eps=1e-2),
    optim.Adam(lr=0.02, eps=1e-3),
]
DEFAULTS = [Default.zeros(), Default.constant(0.5), Default.shared_rows(2), Default.initial_row()]


def _collection(rng: np.random.Generator, device: str) -> HashEmbeddingBagCollection:
    """Tables that differ in all that pooling and updates depend on, or one."""
    num_tables = int(rng.integers(1, 5))
    configs, first = [], 0
    for number in range(num_tables):
        num_features = int(rng.integers(1, 4)) if num_tables > 1 else 1
        configs.append(
            HashEmbeddingBagConfig(
                name=f"t{number}",
                embedding_dim=int(rng.choice([1, 3, 8, 8])),
                num_embeddings=70,
                feature_names=[f"f{n}" for n in range(first, first + num_features)],
                pooling=rng.choice([PoolingType.SUM, PoolingType.MEAN]),
                max_rows=[None, 7][rng.integers(2)],
                default=DEFAULTS[rng.integers(len(DEFAULTS))],
                on_nonfinite=str(rng.choice(["apply", "skip", "raise"])),
                accumulate_steps=int(rng.choice([1, 1, 1, 2])),
            )
        )
        first += num_features
    is_weighted = bool(rng.random() < 0.5)
    ebc = HashEmbeddingBagCollection(configs, is_weighted=is_weighted, device=torch.device(device))
    if rng.random() < 0.1:
        return ebc.requires_grad_(False)
    for rows in ebc.embedding_bags.values():
        settings = OPTIMIZERS[rng.integers(len(OPTIMIZERS))]
        apply_optimizer_in_backward(RowOptimizer, [rows.weight], {"settings": settings})
    return ebc


def _lengths(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    kind = rng.random()
    lengths = rng.integers(0, 4, num_samples)
    if kind < 0.4:
        lengths[:] = 1
    elif kind > 0.9:
        lengths[:] = 0
    return lengths


def _batch(
    rng: np.random.Generator, ebc: HashEmbeddingBagCollection, num_samples: int
) -> KeyedJaggedTensor:
    names = [name for each in ebc.embedding_bag_configs() for name in each.feature_names]
    lengths = [_lengths(rng, num_samples) for _ in names]
    if rng.random() < 0.3:
        lengths = [np.ones(num_samples, np.int64) for _ in names]
    all_lengths = np.concatenate(lengths)
    ids = rng.integers(-9, [2, 30][rng.integers(2)], int(all_lengths.sum()))
    weights = None
    if ebc.is_weighted():
        weights = torch.from_numpy(rng.uniform(0.5, 2, len(ids)).astype(np.float32))
        weights.requires_grad_(bool(rng.random() < 0.5))
    return KeyedJaggedTensor(
        names, torch.from_numpy(ids), weights, lengths=torch.from_numpy(all_lengths)
    )


def train(seed: int) -> str:
    """Trains a collection, drawn by `seed`, on the cpu and on a device; says what differs."""
    both = [_collection(np.random.default_rng(seed), device) for device in ("cpu", DEVICE_TYPE)]
    rng = np.random.default_rng([seed, 1])
    for step in range(4):
        num_samples = int(rng.choice([0, 1, 2, 5, 16, 70]))
        layout = str(rng.choice(list(LAYOUTS)))
        batches = [_batch(np.random.default_rng([seed, step]), ebc, num_samples) for ebc in both]
        outputs = [ebc(batch).values() for ebc, batch in zip(both, batches, strict=True)]
        shape = tuple(outputs[0].shape)
        numbers = torch.from_numpy(rng.normal(size=2000 + 6 * outputs[0].numel())).float()
        for out in outputs:
            if out.requires_grad:
                out.backward(LAYOUTS[layout](numbers.to(out.device), *shape))
        if differs := _difference(both, batches, outputs):
            return f"step {step}, {layout}, {shape}: {differs}"
    return ""


def _difference(
    both: Sequence[HashEmbeddingBagCollection],
    batches: Sequence[KeyedJaggedTensor],
    outputs: Sequence[torch.Tensor],
) -> str:
    if not torch.allclose(outputs[1].cpu(), outputs[0], rtol=1e-4, atol=1e-4):
        return "outputs"
    grads = [batch.weights().grad for batch in batches if both[0].is_weighted()]
    is_same = [grad is None for grad in grads] in ([], [True, True], [False, False])
    if not is_same or (
        grads and grads[0] is not None and not torch.allclose(*grads, rtol=1e-3, atol=1e-3)
    ):
        return "gradients of weights"
    found = [rows_of(ebc.tables()) for ebc in both]
    for name, rows in found[0].items():
        if set(rows) != set(found[1][name]):
            return f"keys of {name}"
        for key, (weight, state) in rows.items():
            other, other_state = found[1][name][key]
            pairs = [(weight, other), *((state[f], other_state[f]) for f in state)]
            if not all(np.allclose(*pair, rtol=1e-3, atol=1e-3) for pair in pairs):
                return f"row {key} of {name}"
    return ""


def train_with_own_pooling(seed: int) -> tuple[str, list[bool]]:
    """The same with a kernel of the caller's that pools straight to its place, or declines."""
    did: list[bool] = []

    def pool_into(store_RD: torch.Tensor, index: kernels.BagIndex, matrix: BagMatrix) -> bool:
        assert index.num_bags == matrix.num_bags
        did.append((seed + len(did)) % 3 > 0)
        if did[-1]:
            matrix.take(kernels.pool_rows(store_RD, index))
        return did[-1]

    kernels.register_kernel(DEVICE_TYPE, "pool_into", pool_into)
    try:
        return train(seed), did
    finally:
        kernels.register_kernel(DEVICE_TYPE, "pool_into", None)
