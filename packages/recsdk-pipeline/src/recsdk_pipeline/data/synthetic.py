"""A seeded stream of clicks on raw 64-bit ids, whose labels the ids explain.

Every drawn number is a pure function of (seed, example, purpose), and every hidden taste of an id a
pure function of (seed, id). So any rank can make any part of the stream alone, the stream is the
same for any number of ranks, and the generator knows the probability of each click.

Shapes: B examples, N ids of one feature, R width of the hidden taste vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from recsdk_pipeline._internal.checks import int_of, int_within
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.examples import Examples, IdBags, Share, check_step
from recsdk_pipeline.data.keys import (
    Float64s,
    Int64s,
    UInt64s,
    normals,
    stream_key,
    uniforms,
)
from recsdk_sharding.placement.ranks import mix64

_EXPONENT = 1.05
_TASTE_WIDTH = 2
_MOST_IDS_A_BAG = 8
_BIAS = -0.7
_DENSE_WEIGHTS = (0.5, -0.4, 0.3, 0.0)
_PAIR_WEIGHT = 0.6
_FIRST_BORN = np.uint64(1 << 40)


@dataclass(frozen=True, kw_only=True)
class _Feature:
    """How the ids of one feature are drawn and what they weigh."""

    name: str
    num_ids: int
    """Ids that exist from the start, drawn by power law."""

    births: float
    """New ids per example of the stream."""

    weight: float
    """Standard deviation of the effect of a bag of one id on the logit."""

    bag_weights: tuple[float, ...] = ()
    """Odds of a bag of 0, 1, 2, ... ids; empty: always one id."""


_FEATURES = (
    _Feature(name="user", num_ids=200_000, births=0.02, weight=0.7),
    _Feature(name="item", num_ids=50_000, births=0.01, weight=0.9),
    _Feature(name="site", num_ids=2_000, births=0.001, weight=0.5),
    _Feature(name="tags", num_ids=20_000, births=0.002, weight=0.7, bag_weights=(2, 3, 2, 1, 1)),
    _Feature(
        name="words", num_ids=100_000, births=0.01, weight=0.7, bag_weights=(3, 2, 2, 1, 1, 1)
    ),
)
_BORN_SHARE = 0.1


class SyntheticClicks:
    """`num_train` examples to train on, then `num_held_out` later ones to evaluate on.

    Ids follow a power law of exponent 1.05 and are arbitrary int64, negatives included. In one draw
    of ten the id is a recent one: new ids arrive all the time, and the held-out part, which comes
    later, has ids that training never saw. Users, items and sites are single-valued; tags and words
    are bags of 0 to 5 ids.
    """

    features = tuple(feature.name for feature in _FEATURES)
    num_dense = len(_DENSE_WEIGHTS)

    def __init__(self, *, num_train: int, num_held_out: int, seed: int = 0) -> None:
        self.num_train = int_within("num_train", num_train, 1)
        self.num_held_out = int_within("num_held_out", num_held_out, 1)
        self.seed = int_of("seed", seed)

    def train(self, *, epoch: int, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's part of each step; each epoch is the same stream again."""
        int_within("epoch", epoch, 0)
        return self._batches(0, self.num_train, batch_size, share)

    def held_out(self, *, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's part of the examples that come after the training ones."""
        stop = self.num_train + self.num_held_out
        return self._batches(self.num_train, stop, batch_size, share)

    def held_out_truth(self) -> tuple[Float64s, Float64s]:
        """Return (probabilities, labels) of the whole held-out part, both (num_held_out,).

        The labels were drawn by these probabilities: no model can know more.
        """
        stop = self.num_train + self.num_held_out
        examples, probabilities = self.draw(self.num_train, stop)
        return probabilities, examples.labels.astype(np.float64)

    def draw(self, start: int, stop: int) -> tuple[Examples, Float64s]:
        """Return the examples start..stop of the stream and their click probabilities."""
        first, end = int_within("start", start, 0), int_of("stop", stop)
        example = np.arange(first, end, dtype=np.uint64)
        bags = {feature.name: self._bags(feature, example) for feature in _FEATURES}
        dense = np.stack(
            [normals(self._key(f"dense/{c}"), example) for c in range(self.num_dense)], axis=1
        )
        logits = _BIAS + dense @ np.array(_DENSE_WEIGHTS) + self._effects(bags)
        probabilities: Float64s = 1.0 / (1.0 + np.exp(-logits))
        labels = uniforms(self._key("label"), example) < probabilities
        examples = Examples(
            labels=labels.astype(np.float32), dense=dense.astype(np.float32), bags=bags
        )
        return examples, probabilities

    def _batches(
        self, start: int, stop: int, batch_size: int, share: Share
    ) -> Iterator[ClickBatch]:
        size = check_step(batch_size, share)
        steps = ((first, min(first + size, stop)) for first in range(start, stop, size))
        return (self.draw(*share.bounds(*step))[0].batch() for step in steps)

    def _key(self, name: str) -> np.uint64:
        return stream_key(self.seed, name)

    def _bags(self, feature: _Feature, example: UInt64s) -> IdBags:
        lengths = self._lengths(feature, example)
        starts = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
        owner = np.repeat(example, lengths)
        draw = owner * np.uint64(_MOST_IDS_A_BAG) + within.astype(np.uint64)
        return IdBags.of_lengths(self._ids(feature, owner, draw), lengths)

    def _lengths(self, feature: _Feature, example: UInt64s) -> Int64s:
        if not feature.bag_weights:
            return np.ones(len(example), dtype=np.int64)
        odds = np.cumsum(feature.bag_weights) / np.sum(feature.bag_weights)
        uniform = uniforms(self._key(f"{feature.name}/length"), example)
        return np.searchsorted(odds, uniform).astype(np.int64)

    def _ids(self, feature: _Feature, owner: UInt64s, draw: UInt64s) -> Int64s:
        """Ids (N,) of the draws; `owner` is each draw's example."""
        rank = _power_law(uniforms(self._key(f"{feature.name}/rank"), draw), feature.num_ids)
        born_so_far = (owner.astype(np.float64) * feature.births).astype(np.uint64)
        is_born = uniforms(self._key(f"{feature.name}/born"), draw) < _BORN_SHARE
        youth = np.minimum(rank, born_so_far)
        number: UInt64s = np.where(is_born, _FIRST_BORN + born_so_far - youth, rank)
        key = self._key(f"{feature.name}/id")
        return mix64(np.bitwise_xor(number, key)).view(np.int64)

    def _effects(self, bags: dict[str, IdBags]) -> Float64s:
        effects = sum(
            f.weight * _bag_means(bags[f.name], self._normal(f"{f.name}/effect", bags[f.name]))
            for f in _FEATURES
        )
        pairs = sum(
            self._normal(f"user/taste/{r}", bags["user"])
            * self._normal(f"item/taste/{r}", bags["item"])
            for r in range(_TASTE_WIDTH)
        )
        return np.asarray(effects + _PAIR_WEIGHT / np.sqrt(_TASTE_WIDTH) * pairs)

    def _normal(self, name: str, bags: IdBags) -> Float64s:
        return normals(self._key(name), bags.values.view(np.uint64))


def _power_law(uniform: Float64s, num_ids: int) -> UInt64s:
    """Ranks 0 .. num_ids - 1, rank r about in proportion to (r + 1) ** -1.05.

    The floor of a continuous power law cut off at num_ids + 1, by its inverse.
    """
    slope = 1.0 - _EXPONENT
    last = float(num_ids + 1) ** slope
    value = (1.0 - uniform * (1.0 - last)) ** (1.0 / slope)
    rank: UInt64s = np.minimum(value.astype(np.uint64) - np.uint64(1), np.uint64(num_ids - 1))
    return rank


def _bag_means(bags: IdBags, values: Float64s) -> Float64s:
    """Mean of each bag's values (B,); an empty bag's is 0."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    totals = sums[bags.offsets[1:]] - sums[bags.offsets[:-1]]
    means: Float64s = totals / np.maximum(bags.lengths, 1)
    return means
