"""Batches for kernels: bags of rows of a store, some of them hot.

Shape letters: N keys, B bags, R rows of the store, T tables, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from device_type import IS_CUDA
from hypothesis import strategies as st

from recsdk_sharding.device.kernels import BagIndex, RowIndex, RowUpdate
from recsdk_sharding.device.optimizers import Step, update_rows
from recsdk_sharding.device.vectors import BagMatrix

DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
"""Kernels are interpreted on the cpu."""
LONGEST_RUNS = (0, 31, 32, 33, 64, 2047, 2048, 2049, 4200)
"""Around what kernels cut."""


@dataclass(frozen=True)
class Batch:
    """Keys of a store."""

    seed: int
    dim: int
    table_rows: tuple[int, ...]
    """Rows of each table, their spare ones included."""
    lengths: tuple[int, ...] | None
    """Of bags; None: each key is one."""
    num_keys: int
    num_hot: int
    """How many keys are of one row."""
    is_weighted: bool
    is_mean: bool

    @property
    def num_rows(self) -> int:
        return sum(self.table_rows)

    @property
    def spare_row(self) -> int:
        return self.num_rows - 1

    @property
    def num_bags(self) -> int:
        return self.num_keys if self.lengths is None else len(self.lengths)

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def ends(self) -> torch.Tensor:
        """As `RowUpdate.ends_2T`."""
        ends_T = np.cumsum(self.table_rows)
        return torch.from_numpy(np.stack([ends_T - 1, ends_T], 1).ravel()).to(DEVICE)

    def index(self) -> BagIndex:
        """Its keys, of spare rows too."""
        rng = self.rng()
        rows_N = rng.integers(0, self.num_rows, self.num_keys)
        rows_N[rng.permutation(self.num_keys)[: self.num_hot]] = rng.integers(0, self.num_rows)
        offsets = None
        if self.lengths is not None:
            offsets = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32).to(DEVICE)
        weights = torch.from_numpy(rng.normal(size=self.num_keys).astype(np.float32)).to(DEVICE)
        divisors = torch.from_numpy(rng.uniform(1, 4, self.num_bags).astype(np.float32)).to(DEVICE)
        return BagIndex(
            torch.from_numpy(rows_N.astype(np.int32)).to(DEVICE),
            offsets,
            weights if self.is_weighted else None,
            divisors if self.is_mean else None,
        )

    def numbers(self, *shape: int) -> torch.Tensor:
        """Normal ones, float32, others for each shape."""
        rng = np.random.default_rng([self.seed, *shape])
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(DEVICE)


@st.composite
def batches(draw: st.DrawFn, *, has_keys: bool = True) -> Batch:
    lengths = draw(st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=30).map(tuple))
    num_hot = draw(st.sampled_from(LONGEST_RUNS))
    num_others = draw(st.integers(int(has_keys and not num_hot), 40))
    num_keys = num_hot + num_others
    if lengths is not None:
        num_keys = max(num_keys, sum(lengths))
        whole, rest = divmod(num_keys - sum(lengths), 5)
        lengths = (*lengths, *[5] * whole, rest)
    return Batch(
        seed=draw(st.integers(0, 2**32 - 1)),
        dim=draw(st.integers(1, 9) | st.sampled_from([16, 31, 33, 64, 127, 128, 130])),
        table_rows=tuple(draw(st.lists(st.integers(2, 7), min_size=1, max_size=4))),
        lengths=lengths,
        num_keys=num_keys,
        num_hot=num_hot,
        is_weighted=draw(st.booleans()),
        is_mean=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Placing:
    """How the bags of a batch lie in a matrix, which has columns of others, too."""

    seed: int
    gaps: tuple[int, ...]
    """Columns of others before a feature, in turns."""
    most_features: int

    def matrix(self, batch: Batch) -> BagMatrix:
        """One of normal numbers, in any order of the features."""
        fitting = [n for n in range(1, self.most_features + 1) if batch.num_bags % n == 0]
        num_features = fitting[-1]
        gaps = [self.gaps[n % len(self.gaps)] for n in range(num_features)]
        ends = np.cumsum(np.array(gaps) + batch.dim)
        starts = np.random.default_rng(self.seed).permutation(ends - batch.dim)
        num_samples = batch.num_bags // num_features
        values_SC = batch.numbers(num_samples, int(ends[-1]) + self.gaps[-1])
        is_whole = num_features == 1 and starts[0] == 0
        starts_F = None if is_whole else torch.from_numpy(starts.astype(np.int32)).to(DEVICE)
        unit = 1 if (starts % 4).any() else 4
        return BagMatrix(values_SC, starts.tolist(), starts_F, batch.dim, unit)


def placings() -> st.SearchStrategy[Placing]:
    gaps = st.lists(st.integers(0, 4) | st.just(4), min_size=1, max_size=3).map(tuple)
    return st.builds(Placing, st.integers(0, 99), gaps, st.integers(1, 6))


class Switches(NamedTuple):
    """How tables are trained."""

    skips: bool
    tracks: bool


class Tables:
    """What an update writes."""

    def __init__(self, batch: Batch, fields: Sequence[str], width: int, how: Switches) -> None:
        """`width`: of each field of optimizer state."""
        self._how, self._ends_2T = how, batch.ends()
        self._store_RD = batch.numbers(batch.num_rows, batch.dim)
        numbers = batch.numbers(len(fields), batch.num_rows, width).square()
        self._state = dict(zip(fields, numbers, strict=True))
        self._counts_2T = torch.zeros(len(self._ends_2T), dtype=torch.int64, device=DEVICE)
        self._is_updated_R = torch.zeros(batch.num_rows, dtype=torch.uint8, device=DEVICE)

    def update(self, step: Step, plan: RowIndex) -> RowUpdate:
        return RowUpdate(
            step=step,
            store_RD=self._store_RD,
            state=self._state,
            places_L=plan.rows_L,
            skips_nonfinite=self._how.skips,
            nonfinite_2T=self._counts_2T,
            ends_2T=self._ends_2T,
            is_updated_R=self._is_updated_R if self._how.tracks else None,
        )

    def train_by_steps(self, step: Step, plan: RowIndex, grad_LD: torch.Tensor) -> None:
        """The same with torch's operators, one row after the other."""
        for row, grad_D in zip(plan.rows_L.tolist(), grad_LD, strict=True):
            if row in self._ends_2T[::2]:
                continue
            if not grad_D.isfinite().all():
                self._counts_2T[int((self._ends_2T <= row).sum())] += 1
                if self._how.skips:
                    continue
            rows_U = torch.tensor([row], device=DEVICE)
            for write in update_rows(step, self._store_RD, self._state, rows_U, grad_D[None]):
                write()
            self._is_updated_R[row] = self._how.tracks

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        return {
            "store": self._store_RD,
            **self._state,
            "counts": self._counts_2T,
            "is updated": self._is_updated_R,
        }
