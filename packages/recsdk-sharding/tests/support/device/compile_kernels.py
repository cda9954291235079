"""Compiles Triton's kernels for NVIDIA devices, of which none need be there.

    python compile_kernels.py ARCHITECTURES WIDTHS      as 80,90 1,64

It runs a batch of each kind on the cpu, with compiling in the place of launching, and prints a line
for each kernel: its name, bytes of shared memory, of machine code, and constants.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recsdk_core import optim
from recsdk_sharding.device.fused import planning, pooling, summing, updating
from recsdk_sharding.device.fused.launching import PARCELLED
from recsdk_sharding.device.kernels import BagIndex, RowUpdate
from recsdk_sharding.device.optimizers import Step
from recsdk_sharding.device.vectors import BagMatrix

OPTIMIZERS = [
    (optim.SGD(lr=0.1, clip_value=1.0), []),
    (optim.Adagrad(weight_decay=0.1), ["sum"]),
    (optim.RowwiseAdagrad(), ["sum"]),
    (optim.AdamW(), ["exp_avg", "exp_avg_sq"]),
]
NUM_KEYS = 4096
_TYPES = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
}


def signature_of(arg: Any) -> str:
    if arg is None:
        return "constexpr"
    if isinstance(arg, torch.Tensor):
        return _TYPES[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"


class Compiler:
    """Compiles what it is asked to launch."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        self._seen: set[Any] = set()

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        for param in kernel.params:
            if param.name in PARCELLED and not param.do_not_specialize_on_alignment:
                sys.exit(f"{kernel.fn.__name__}: {param.name} lies at another place in each batch")
        signature = {name: signature_of(value) for name, value in named.items()}
        known = {name: None for name, value in named.items() if value is None}
        key = kernel.fn.__name__, tuple(signature.items()), tuple(constants.items())
        if key in self._seen:
            return
        self._seen.add(key)
        source = ASTSource(
            fn=kernel,
            signature={**signature, **dict.fromkeys(constants, "constexpr")},
            constexprs={**known, **constants},
        )
        made = triton.compile(source, target=self._target)
        size = len(made.asm["cubin"])
        print(kernel.fn.__name__, made.metadata.shared, size, constants, flush=True)


def batches(dim: int, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, BagIndex]]:
    """A store of one row, and keys of it."""
    rows_N = torch.zeros(NUM_KEYS, dtype=torch.int32)
    offsets = torch.tensor([0, 0, NUM_KEYS], dtype=torch.int32)
    store_RD = torch.zeros(2, dim, dtype=dtype)
    yield store_RD, BagIndex(rows_N, None, None)
    yield store_RD, BagIndex(rows_N, offsets, torch.ones(NUM_KEYS), torch.ones(2))


def matrix_of(index: BagIndex, dim: int) -> BagMatrix:
    """A matrix with room for the bags of two features."""
    values_SC = torch.zeros(index.num_bags // 2, 2 * dim)
    starts_F = torch.tensor([0, dim], dtype=torch.int32)
    return BagMatrix(values_SC, (0, dim), starts_F, dim, unit=1 if dim % 4 else 4)


def run(dim: int) -> None:
    """All kernels, for rows of a width."""
    for store_RD, index in batches(dim, torch.bfloat16):
        pooling.pool_rows(store_RD, index)
        pooling.pool_into(store_RD, index, matrix_of(index, dim))
    for store_RD, index in batches(dim, torch.float32):
        grad_BD = pooling.pool_rows(store_RD, index)
        matrix = matrix_of(index, dim)
        plan = planning.plan_rows(index, 2, 1)
        summing.sum_gradients(grad_BD, plan, index.weights_N)
        for optimizer, fields in OPTIMIZERS:
            width = 1 if isinstance(optimizer, optim.RowwiseAdagrad) else dim
            update = RowUpdate(
                step=Step(optimizer, 1),
                store_RD=store_RD,
                state={name: torch.zeros(2, width) for name in fields},
                places_L=plan.rows_L,
                skips_nonfinite=index.weights_N is None,
                nonfinite_2T=torch.zeros(2, dtype=torch.int64),
                ends_2T=torch.tensor([1, 2]),
                is_updated_R=None if index.weights_N is None else torch.zeros(2).byte(),
            )
            updating.train_rows(update, matrix, plan, index.weights_N)
            rows_U = torch.zeros(1, dtype=torch.int64)
            updating.update_rows(update.step, store_RD, update.state, rows_U, grad_BD[:1])


def main(architectures: str, widths: str) -> None:
    for architecture in architectures.split(","):
        compiler = Compiler(int(architecture))
        for module in (planning, pooling, summing, updating):
            module.launch = compiler.launch  # type: ignore[attr-defined]
        for dim in widths.split(","):
            run(int(dim))


if __name__ == "__main__":
    main(*sys.argv[1:])
