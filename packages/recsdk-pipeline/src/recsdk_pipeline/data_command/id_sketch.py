"""How many different ids a column has, how often each comes and when, in bounded memory.

A sample of ids with exact counts: those whose hash starts with `level` zero bits. When more than
`most` ids are held, the level rises and half of them go. An id that is held was counted from its
first occurrence, and which ids are held follows from hashes alone, so the sample is a fair one of
the different ids, and their number is that of the sample times 2 ** level.

Source: Flajolet, "On adaptive sampling", Computing 43 (1990), with the standard error 1.20 / sqrt
of `most`.

Shapes: N ids, S ids of the sample, K different counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from recsdk_core.virtual_shards import mix64

MOST_IDS = 1 << 16
_PENDING_IDS = 1 << 18
_SMALLEST_COUNT = 6
_FEWEST_IDS = 100
_MOST_FITS = 64

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]


class IdSketch:
    """Takes ids and says what it saw. Not thread-safe.

    Holds at most 5 MiB by default, 6 with times. While it counts it takes 32 MiB more, 40 with
    times.
    """

    def __init__(self, most: int = MOST_IDS) -> None:
        self._most = most
        self._level = 0
        self._hashes: UInt64s = np.empty(0, np.uint64)
        self._counts: Int64s = np.empty(0, np.int64)
        self._times: tuple[Int64s, Int64s] | None = None
        """When each id came first and last."""
        self._pending: list[UInt64s] = []
        self._pending_times: list[Int64s] = []
        self._num_pending = 0

    def add(self, ids: Any, times: Any | None = None) -> None:
        """Count `ids`, int64 (N,), which came at `times`, int64 (N,). 40 to 140 ns each.

        Give times always or never.
        """
        for start in range(0, len(ids), _PENDING_IDS):
            stop = start + _PENDING_IDS
            # A bijection, so that hashes stand for ids.
            hashes = mix64(np.ascontiguousarray(ids[start:stop]).view(np.uint64))
            is_kept = self._is_sampled(hashes)
            self._pending.append(hashes[is_kept])
            if times is not None:
                self._pending_times.append(times[start:stop][is_kept])
            self._num_pending += len(self._pending[-1])
            if self._num_pending >= _PENDING_IDS:
                self._merge()

    @property
    def num_distinct(self) -> int:
        """Different ids, exact while `standard_error` is 0."""
        self._merge()
        return len(self._hashes) << self._level

    @property
    def standard_error(self) -> float:
        """Of `num_distinct`, relative."""
        self._merge()
        return 0.0 if self._level == 0 else 1.20 / math.sqrt(self._most)

    @property
    def ids_a_sample(self) -> int:
        """For how many different ids each of the sample stands."""
        self._merge()
        return 1 << self._level

    def counts(self) -> Int64s:
        """How often each id of the sample came (S,), the largest first."""
        self._merge()
        counts: Int64s = np.sort(self._counts)[::-1]
        return counts

    def times(self) -> tuple[Int64s, Int64s] | None:
        """When each id of the sample came first and last, (S,) each; None without times."""
        self._merge()
        return self._times

    def _is_sampled(self, hashes: UInt64s) -> Any:
        if self._level == 0:
            return slice(None)
        return hashes >> np.uint64(64 - self._level) == 0

    def _merge(self) -> None:
        if not self._pending:
            return
        new, places, new_counts = np.unique(
            np.concatenate(self._pending), return_inverse=True, return_counts=True
        )
        new_times = _ends(places, len(new), self._pending_times, self._pending_times)
        self._pending, self._pending_times, self._num_pending = [], [], 0
        hashes, places = np.unique(np.concatenate([self._hashes, new]), return_inverse=True)
        counts = np.zeros(len(hashes), np.int64)
        np.add.at(counts, places, np.concatenate([self._counts, new_counts]))
        both = [each for each in (self._times, new_times) if each is not None]
        times = _ends(places, len(hashes), [first for first, _ in both], [last for _, last in both])
        kept = len(hashes)
        while kept > self._most:
            self._level += 1
            kept = int(self._is_sampled(hashes).sum())  # they are sorted, so the front
        self._hashes, self._counts = hashes[:kept], counts[:kept]
        self._times = None if times is None else (times[0][:kept], times[1][:kept])


def _ends(
    places: Any, num: int, first: list[Int64s], last: list[Int64s]
) -> tuple[Int64s, Int64s] | None:
    """The earliest and the latest of the times at each of `num` places; None if there are none."""
    if not first:
        return None
    limits = np.iinfo(np.int64)
    earliest, latest = np.full(num, limits.max), np.full(num, limits.min)
    np.minimum.at(earliest, places, np.concatenate(first))
    np.maximum.at(latest, places, np.concatenate(last))
    return earliest, latest


@dataclass(frozen=True, kw_only=True)
class ZipfFit:
    """The id of rank r comes as often as r ** -exponent, down to `smallest_count`."""

    exponent: float
    smallest_count: int
    """Ids that come less often were left out of the fit."""
    num_ids: int
    """Ids of the sample in the fit."""


def fit_zipf(counts: Any) -> ZipfFit | None:
    """Fit Zipf's law to how often ids come (S,); None if fewer than 100 ids come 6 times.

    Counts under Zipf's law of exponent s have the density x ** -(1 + 1 / s). Its exponent is
    estimated by maximum likelihood from the counts of at least m, and m is the one for which the
    largest distance of the two distribution functions is least.

    Source: Clauset, Shalizi, Newman, "Power-law distributions in empirical data", SIAM Review 51
    (2009), equations 3.7 and 3.9.
    """
    counts = np.sort(counts)
    most = len(counts) - _FEWEST_IDS
    if most < 0 or counts[most] < _SMALLEST_COUNT:
        return None
    smallest = np.unique(counts[: most + 1])
    smallest = smallest[smallest >= _SMALLEST_COUNT]
    if not len(smallest):
        smallest = np.array([_SMALLEST_COUNT])
    places = np.linspace(0, len(smallest) - 1, min(len(smallest), _MOST_FITS)).astype(np.int64)
    fits = [_fit(counts, int(each)) for each in smallest[places]]
    return min(fits, key=lambda fit: fit[0])[1]


def _fit(counts: Int64s, smallest: int) -> tuple[float, ZipfFit]:
    """(distance of the distribution functions, fit)."""
    tail = counts[np.searchsorted(counts, smallest) :]
    exponent = float(np.log(tail / (smallest - 0.5)).mean())  # 1 / (alpha - 1)
    values, first = np.unique(tail, return_index=True)
    seen = 1 - first / len(tail)
    expected = ((values - 0.5) / (smallest - 0.5)) ** (-1 / exponent)
    distance = float(np.abs(seen - expected).max())
    return distance, ZipfFit(exponent=exponent, smallest_count=smallest, num_ids=len(tail))
