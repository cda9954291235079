"""Compiles Triton's kernels for NVIDIA devices, of which none need be there.

    python compile_kernels.py ARCHITECTURES WIDTHS BITS HOW     as 80,90 1,64 32,64 all

It runs batches of each kind on the cpu. In the place of launching, Triton does all that comes
before: it looks at the arguments, as where an array begins, and compiles what they need. Prints a
line for each kernel: its name, bytes of shared memory, of machine code, and constants. Goes on
where one does not compile, or its warps race; the exit status is then 1, and the last lines tell of
which. BITS: of the numbers of rows. HOW: "all", or "pairs" for a sample that has each two constants
of a kernel together, its width one of them, and each type of its arrays.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, Literal

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from recsdk_core import optim
from recsdk_sharding.device.fused import planning, pooling, summing, updating
from recsdk_sharding.device.fused.launching import PARCELLED
from recsdk_sharding.device.kernels import BagIndex, RowIndex, RowUpdate
from recsdk_sharding.device.optimizers import Step
from recsdk_sharding.device.vectors import BagMatrix, rows_of

OPTIMIZERS = [
    (optim.SGD(lr=0.1, clip_value=1.0), []),
    (optim.Adagrad(weight_decay=0.1), ["sum"]),
    (optim.RowwiseAdagrad(), ["sum"]),
    (optim.AdamW(), ["exp_avg", "exp_avg_sq"]),
]
NUM_KEYS = 4096


class Compiler:
    """Compiles what it is asked to launch."""

    def __init__(self, *, is_sample: bool) -> None:
        self._is_sample = is_sample
        self._seen: set[str] = set()
        self._had: set[Any] = set()
        self.failed: list[str] = []
        self.num_guarded = 0
        """Kernels whose warps would race but for a barrier."""

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        for param in kernel.params:
            if param.name in PARCELLED and not param.do_not_specialize_on_alignment:
                sys.exit(f"{name}: {param.name} lies at another place in each batch")
        if self._is_sample and not self._has_news(kernel, args, constants):
            return
        try:
            made = kernel.warmup(*args, grid=grid, **constants)
        except Exception as error:
            self.failed.append(f"{name}: {type(error).__name__}: {error} {constants}")
            return
        if made.hash not in self._seen:
            self._seen.add(made.hash)
            code = made.asm["ttgir"]
            self.failed += [f"{name}: {said} {constants}" for said in races(code)]
            self.num_guarded += bool(races(_BARRIER.sub("", code)))
            print(name, made.metadata.shared, len(made.asm["cubin"]), constants, flush=True)

    def _has_news(self, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> bool:
        """Whether something of it was in no launch before."""
        target = driver.active.get_current_target().arch
        own = sorted((key, value) for key, value in constants.items() if key != "DIM")
        tensors = [
            (param.name, each.dtype, each.data_ptr() % 16 == 0)
            for param, each in zip(kernel.params, args, strict=False)
            if isinstance(each, torch.Tensor)
        ]
        news = {
            (kernel.fn, target, *each)
            for each in (*combinations(own, 2), *((each,) for each in tensors))
        }
        news -= self._had
        self._had |= news
        return bool(news)


_POINTERS = re.compile(r"(%\w+) = tt\.(?:splat|addptr) (%\w+)")
_NUMBERS_OF_ROWS = re.compile(r"tt\.(load|store) (%\w+).* : tensor<\d+x!tt\.ptr")
_BARRIER = re.compile(r"\b(?:gpu|ttg)\.barrier\b")


def races(code: str) -> list[str]:
    """What is wrong with a kernel's code, as Triton has it before it is one of the device.

    A number for each of a program's rows is read by every thread that has a part of the row, and
    written by one. So there must be a barrier between.
    """
    array_of: dict[str, str] = {}
    read: set[str] = set()
    found = []
    for line in code.splitlines():
        if pointers := _POINTERS.search(line):
            array_of[pointers[1]] = array_of.get(pointers[2], pointers[2])
        elif _BARRIER.search(line):
            read.clear()
        elif access := _NUMBERS_OF_ROWS.search(line):
            array = array_of.get(access[2], access[2])
            if access[1] == "load":
                read.add(array)
            elif array in read:
                found.append(f"{array} is written while other warps may still read it")
    return found


def device_of(architecture: int) -> Any:
    """What Triton asks of a device before it launches."""
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
    )


def indexes(number: torch.dtype) -> Iterator[BagIndex]:
    """Keys of a store's first row, whose numbers and offsets are of this type."""
    rows_N = torch.zeros(NUM_KEYS, dtype=number)
    offsets = torch.tensor([0, 0, NUM_KEYS], dtype=number)
    yield BagIndex(rows_N, None, None)
    yield BagIndex(rows_N, offsets, None)
    yield BagIndex(rows_N, offsets, torch.ones(NUM_KEYS), torch.ones(2))


def matrices(index: BagIndex, dim: int) -> Iterator[BagMatrix]:
    """Those that have the bags of two features, or of one, in rows that begin anywhere."""
    num_samples, starts_F = index.num_bags // 2, torch.tensor([0, dim], dtype=torch.int32)
    for unit in (4, 1) if dim % 4 == 0 else (1,):
        values_SC = torch.zeros(num_samples, 2 * dim)
        yield BagMatrix(values_SC, (0, dim), starts_F, dim, unit)
    yield BagMatrix(torch.zeros(num_samples, 2 * dim + 3)[:, 1:], (0, dim), starts_F, dim)
    yield rows_of(torch.zeros(index.num_bags, dim))
    yield rows_of(torch.zeros(index.num_bags, dim + 1)[:, 1:])


def pool(dim: int, index: BagIndex) -> None:
    """For rows of a width, whatever their type."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pooling.pool_rows(torch.zeros(2, dim, dtype=dtype), index)
    for matrix in matrices(index, dim):
        pooling.pool_into(torch.zeros(2, dim), index, matrix)


def train(dim: int, index: BagIndex) -> None:
    """By all optimizers, at once and by steps."""
    plan = planning.plan_rows(index, 2, 1)
    weights_N = index.weights_N
    for of_steps in (plan, replace(plan, begins_L=None)):
        summing.sum_gradients(torch.zeros(index.num_bags, dim), of_steps, weights_N)
    for optimizer, fields in OPTIMIZERS:
        width = 1 if isinstance(optimizer, optim.RowwiseAdagrad) else dim
        state = {name: torch.zeros(2, width) for name in fields}
        for matrix in matrices(index, dim):
            updating.train_rows(update_of(optimizer, state, dim, plan), matrix, plan, weights_N)
        rows_U, grad_UD = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dim)
        updating.update_rows(Step(optimizer, 1), torch.zeros(2, dim), state, rows_U, grad_UD)


def update_of(
    optimizer: Any, state: dict[str, torch.Tensor], dim: int, plan: RowIndex
) -> RowUpdate:
    """Of one table; what it counts and notes depends on the batch."""
    is_one_each = plan.bag_N is plan.order_N
    return RowUpdate(
        step=Step(optimizer, 1),
        store_RD=torch.zeros(2, dim),
        state=state,
        places_L=plan.rows_L,
        skips_nonfinite=is_one_each,
        nonfinite_2T=torch.zeros(2, dtype=torch.int64),
        ends_2T=torch.tensor([1, 2]),
        is_updated_R=torch.zeros(2).byte() if is_one_each else None,
    )


def main(architectures: str, widths: str, bits: str, how: Literal["all", "pairs"]) -> int:
    compiler = Compiler(is_sample=how == "pairs")
    for module in (planning, pooling, summing, updating):
        module.launch = compiler.launch  # type: ignore[attr-defined]
    for architecture in architectures.split(","):
        driver.set_active(device_of(int(architecture)))
        for dim in map(int, widths.split(",")):
            for number in bits.split(","):
                for index in indexes({"32": torch.int32, "64": torch.int64}[number]):
                    pool(dim, index)
                    train(dim, index)
    if not compiler.num_guarded:
        compiler.failed.append("without barriers no kernel races: `races` looks for other words")
    print("\n".join(compiler.failed), file=sys.stderr)
    return int(bool(compiler.failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
