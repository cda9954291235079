"""The ids that the tables of `policy_cases` see step by step, and in which shape.

Shape letters: G bags of a feature, N ids, S samples.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_sharding import KeyedJaggedTensorWithData

TABLES = ("user", "item", "ad", "full")
NUM_SAMPLES = 12
ENDS = (0, 1, 3, 5, 6, 12)
"""Where the samples of one of at most 4 ranks may begin or end."""
FEATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "one": {name: (name,) for name in TABLES},
    "two": {name: (name, f"{name} too") for name in TABLES},
    "shared": {
        "user": ("user", "ad"),
        "item": ("item",),
        "ad": ("ad",),
        "full": ("full", "item"),
    },
}
"""What each table reads."""
Array: TypeAlias = np.ndarray[Any, Any]


def batches(first: int, last: int) -> list[list[list[int]]]:
    """Keys of 12 samples for each table, step by step: popular ones that drift, duplicates too."""
    found = []
    for step in range(first, last):
        random = np.random.default_rng(step)
        keys = random.zipf(1.3, (len(TABLES), NUM_SAMPLES, 2)) % 900 + 11 * step
        found.append((keys * 0x9E3779B97F4A7C1).tolist())
    return found


def time_of(step: int) -> int:
    return 3 * (step // 2)


def data_of(step: int) -> dict[str, Array]:
    """What comes with the keys of a step, each as they are; of some steps there is less."""
    random = np.random.default_rng(1_000 + step)
    shape = (len(TABLES), NUM_SAMPLES, 2)
    times = time_of(step) + random.integers(-4, 5, shape)
    scores = random.integers(-9, 10, shape).astype(np.float32)
    needed = {"scores": scores, "clicks": random.integers(0, 3, shape)}
    more = {"counts": random.integers(1, 4, shape), "times": times}
    return needed | (more if step % 5 != 4 else {})


@dataclass(frozen=True)
class Shape:
    """How ids come, and what is made of their vectors."""

    features: str = "one"
    """One of FEATURES."""
    is_mean: bool = False
    is_weighted: bool = False
    is_processed: bool = False
    """Whether a processor makes the weights of ids; else they come with them."""
    has_any_bags: bool = False
    """If not, each bag has two ids, and each sample's vector the gradient 1."""
    batches_vary: bool = False
    """Whether each feature has bags of its own number, which samples share or leave."""

    @property
    def shown(self) -> dict[tuple[str, str], str]:
        """What the vectors that a table has of a feature are called, by both names."""
        of_tables = FEATURES[self.features]
        readers = Counter(name for names in of_tables.values() for name in names)
        return {
            (table, name): name if readers[name] == 1 else f"{name}@{table}"
            for table, names in of_tables.items()
            for name in names
        }

    @property
    def names(self) -> list[str]:
        """The features that a batch has."""
        return list(dict.fromkeys(name for _, name in self.shown))


@dataclass(frozen=True)
class Bags:
    """The ids of a feature in some samples of a step."""

    keys_N: Array
    data: dict[str, Array]
    """(N,) each."""
    weights_N: Array
    lengths_G: Array
    bag_S: Array
    """Which bag a sample has."""
    firsts: Array
    """At the beginning of each sample, and at the end, which bag comes first of all after it."""

    @property
    def bag_N(self) -> Array:
        return np.repeat(np.arange(len(self.lengths_G)), self.lengths_G)

    def own(self, begin: int, end: int) -> Bags:
        """Those of some samples, which are all of some ranks."""
        bags = slice(self.firsts[begin], self.firsts[end])
        first, last = np.cumsum([0, *self.lengths_G])[[bags.start, bags.stop]]
        return Bags(
            self.keys_N[first:last],
            {name: each[first:last] for name, each in self.data.items()},
            self.weights_N[first:last],
            self.lengths_G[bags],
            self.bag_S[begin:end] - bags.start,
            self.firsts[begin : end + 1] - bags.start,
        )

    def positions(self) -> Array:
        """Which of the ids the samples have, one sample after another."""
        of_samples = [np.flatnonzero(self.bag_N == bag) for bag in self.bag_S]
        return np.concatenate([np.zeros(0, np.int64), *of_samples])

    def _factors_N(self, shape: Shape) -> Array:
        """How much of its vector each id adds to that of its bag."""
        factors_N = self.weights_N if shape.is_weighted else np.ones_like(self.weights_N)
        if not shape.is_mean:
            return factors_N
        sums_G = np.bincount(self.bag_N, factors_N, len(self.lengths_G)).astype(np.float32)
        return factors_N / sums_G[self.bag_N]

    def pooled(self, values_N: Array, shape: Shape) -> Array:
        """(S,), of what ids read."""
        factors_N = self._factors_N(shape)
        return np.bincount(self.bag_N, values_N * factors_N, len(self.lengths_G))[self.bag_S]

    def gradients(self, of_samples_S: Array, shape: Shape) -> Array:
        """(N,), of the vectors of ids; those of sequences are neither weighted nor meant."""
        of_bags_G = np.bincount(self.bag_S, of_samples_S, len(self.lengths_G)).astype(np.float32)
        return of_bags_G[self.bag_N] * self._factors_N(shape)


def jagged(
    bags: dict[str, Bags],
    *,
    has_weights: bool,
    batches_vary: bool,
    has_data: bool,
    time: int | None = None,
) -> KeyedJaggedTensor:
    """The ids of some features; without data they have this time, if any."""
    names, each_of = list(bags), list(bags.values())
    more: dict[str, Any] = {"lengths": joined([each.lengths_G for each in each_of])}
    if has_weights:
        more["weights"] = joined([each.weights_N for each in each_of])
    if batches_vary:
        of_samples = torch.from_numpy(np.stack([each.bag_S for each in each_of]))
        more["inverse_indices"] = names, of_samples
        more["stride_per_key_per_rank"] = [[len(each.lengths_G)] for each in each_of]
    keys_N = joined([each.keys_N for each in each_of])
    data = {name: joined([each.data[name] for each in each_of]) for name in each_of[0].data}
    if not has_data:
        if time is None:
            return KeyedJaggedTensor(names, keys_N, **more)
        data = {"times": torch.full_like(keys_N, time)}
    return KeyedJaggedTensorWithData(names, keys_N, **more, **data)


def joined(parts: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


@functools.cache
def bags_of(shape: Shape, step: int) -> dict[str, Bags]:
    """The ids of all ranks in a step, by feature."""
    made = {}
    [lists], data = batches(step, step + 1), data_of(step)
    source = np.random.default_rng([step, 2])
    for position, table in enumerate(TABLES):
        keys_N = np.array(lists[position]).reshape(-1)
        of_table = {name: each[position].reshape(-1) for name, each in data.items()}
        given_N = source.integers(1, 9, len(keys_N)).astype(np.float32) / 4
        names = FEATURES[shape.features][table][: 2 if shape.features == "two" else 1]
        middle = int(source.integers(0, len(keys_N) + 1)) if shape.has_any_bags else NUM_SAMPLES
        ends = [0, middle, len(keys_N)] if len(names) == 2 else [0, len(keys_N)]
        for name, first, last in zip(names, ends[:-1], ends[1:], strict=True):
            own = {which: each[first:last] for which, each in of_table.items()}
            cut = _cut(shape, source, last - first)
            weights_N = halves(cut[0]) if shape.is_processed else given_N[first:last]
            made[name] = Bags(keys_N[first:last], own, weights_N, *cut)
    return made


def halves(lengths_G: Array) -> Array:
    """(N,), the weights that a processor of `policy_cases` makes: 1, 1/2, 1/4 by turns."""
    place_N = np.arange(lengths_G.sum()) - np.repeat(np.cumsum(lengths_G) - lengths_G, lengths_G)
    weights_N: Array = np.float32(0.5) ** (place_N % 3)
    return weights_N.astype(np.float32)


def _cut(shape: Shape, source: Any, num_keys: int) -> tuple[Array, Array, Array]:
    """The lengths of bags, which bag each sample has, and which is the first from each on."""
    firsts, bag_S = np.arange(NUM_SAMPLES + 1), np.arange(NUM_SAMPLES)
    if shape.batches_vary:
        sizes = np.diff(ENDS)
        num_bags = [int(source.integers(1, size + 2)) for size in sizes]
        starts = np.cumsum([0, *num_bags])
        firsts = np.append(np.repeat(starts[:-1], sizes), starts[-1])
        bag_S = firsts[:-1] + source.integers(0, np.repeat(num_bags, sizes))
    if not shape.has_any_bags and not shape.batches_vary:
        return np.full(NUM_SAMPLES, num_keys // NUM_SAMPLES), bag_S, firsts
    chosen_N = source.integers(0, firsts[-1], num_keys)
    return np.bincount(chosen_N, minlength=firsts[-1]), bag_S, firsts


def of_samples(shape: Shape, step: int, table: str) -> Array:
    """(S,), the gradients of the vectors of all ranks' samples."""
    if not shape.has_any_bags:
        return np.ones(NUM_SAMPLES, np.float32)
    numbers_S = 5 * np.arange(NUM_SAMPLES) + 3 * TABLES.index(table) + step
    return (numbers_S % 7 - 2).astype(np.float32) / 4
