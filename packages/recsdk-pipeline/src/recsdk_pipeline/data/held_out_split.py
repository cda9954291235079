"""Examples in memory, a random tenth of them held out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recsdk_pipeline._internal.checks import int_within
from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.examples import Examples, Share, check_step
from recsdk_pipeline.data.rows import Rows

_FEWEST_EXAMPLES = 10


class HeldOutSplit:
    """Trains on nine tenths of `examples`, in a new order each epoch; the rest is held out.

    The split and the orders are pure functions of `seed`. It keeps a copy of the examples. Raises
    ValueError if they are too few to hold a tenth out.
    """

    def __init__(
        self, features: tuple[str, ...], examples: Examples | Rows, *, seed: int = 0
    ) -> None:
        if not isinstance(examples, (Examples, Rows)):
            raise TypeError(f"examples must be Examples, got {type(examples).__name__}")
        self._seed = int_within("seed", seed, 0)
        if len(examples) < _FEWEST_EXAMPLES:
            raise ValueError(
                f"{len(examples)} examples are too few to hold out a tenth; "
                f"pass at least {_FEWEST_EXAMPLES}"
            )
        self.features = features
        self.num_dense = examples.dense.shape[1]
        shuffled = np.random.default_rng(self._seed).permutation(len(examples))
        self.num_held_out = len(examples) // 10
        self.num_train = len(examples) - self.num_held_out
        self._held_out = examples.take(shuffled[: self.num_held_out])
        self._train = examples.take(shuffled[self.num_held_out :])

    def train(self, *, epoch: int, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's part of each step of `batch_size` examples."""
        size, number = check_step(batch_size, share), int_within("epoch", epoch, 0)
        order = np.random.default_rng([self._seed, number]).permutation(self.num_train)
        parts = _parts(self.num_train, size, share)
        return (self._train.take(order[first:last]).batch() for first, last in parts)

    def held_out(self, *, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's part of the held-out tenth."""
        parts = _parts(self.num_held_out, check_step(batch_size, share), share)
        return (self._held_out.part(*part).batch() for part in parts)


def _parts(num_examples: int, batch_size: int, share: Share) -> Iterator[tuple[int, int]]:
    """The rank's part of each step."""
    for start in range(0, num_examples, batch_size):
        yield share.bounds(start, min(start + batch_size, num_examples))
