"""A batch on its way between processes: cut by the shards of its keys, read where it arrives.

What goes to a shard is one run of int64 words: how many bags each feature has, how many bytes a
length takes, how many keys of the shard each bag has, and those keys. Lengths lie one behind the
other, filled up to a whole word; they take 1, 2, 4 or 8 bytes, as many as the batch's longest bag
needs. If every key is a bag, the lengths and their size are left out.

Shape letters: N keys, F features, G bags of all features, W shards, P processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._internal.checks import require_one_of
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS

__all__ = [
    "ArrivedBags",
    "CutBags",
    "count_keys",
    "cut_bags",
    "join_offsets",
    "lay_out_offsets",
    "read_bags",
]

Array: TypeAlias = Any
"""A numpy array, a torch CPU tensor, or any DLPack CPU array."""

_RULES = ("virtual_shard", "modulo")


def count_keys(
    lengths: Array, num_bags: Sequence[int], num_keys: int
) -> tuple[list[int], list[bool]]:
    """Counts the keys of each of F features; also says whether each of its bags has one key.

    `lengths`: keys of each bag, int64 or int32 (G,), feature by feature. `num_bags`: bags of each
    feature, F numbers. `num_keys`: of all. Raises ValueError for lengths that are negative or do
    not add up to that. Cost: one pass over the lengths, on the threads of `set_num_threads`.

    >>> import numpy as np
    >>> count_keys(np.array([1, 1, 2, 0]), [2, 2], 4)
    ([2, 2], [True, False])
    """
    return _ext.count_keys(lengths, num_bags, num_keys)


def lay_out_offsets(lengths: Array, num_bags: Sequence[int]) -> Array:
    """Where the bags of each of F features begin among its keys: int64 (G + F,).

    `lengths`: keys of each bag, int64 or int32 (G,), feature by feature. `num_bags`: bags of each
    feature, F numbers. A feature has one offset more than it has bags, from 0 to the number of its
    keys. Raises ValueError for lengths that are negative or add up to 2^63 and more, or whose
    number is not that of the bags. Cost: one pass over the lengths, two over those of features with
    more than 16,384 bags, on the threads of `set_num_threads`.

    >>> import numpy as np
    >>> lay_out_offsets(np.array([1, 1, 2, 0]), [2, 2])
    array([0, 1, 2, 0, 2, 2])
    """
    return _ext.lay_out_offsets(lengths, num_bags)


def join_offsets(offsets: Sequence[Array | None], num_keys: Array, out: Array) -> None:
    """Writes the offsets of all bags of P pieces, whose keys lie one behind the other.

    `offsets`: of each piece, int64, one more than it has bags, from 0 to the number of its keys, in
    ascending order; None: each of its keys is a bag. `num_keys`: int64 (P,). `out`: int32 or int64
    (B + 1,), of all bags. Raises ValueError, with `out` unspecified, for another size of `out`,
    offsets that descend or run otherwise, and 2^31 keys and more if `out` is int32. Cost: one pass
    over the bags, on the threads of `set_num_threads`.

    >>> import numpy as np
    >>> out = np.empty(5, np.int32)
    >>> join_offsets([np.array([0, 2, 2]), None], np.array([2, 2]), out)
    >>> out
    array([0, 2, 2, 3, 4], dtype=int32)
    """
    _ext.join_offsets(offsets, num_keys, out)


@dataclass(frozen=True)
class CutBags:
    """A batch, shard by shard; within a shard its keys keep their order."""

    words: Array
    """int64, what goes to each shard, one after the other."""
    num_words: list[int]
    """Words for each shard, W."""
    num_keys: list[int]
    """Keys of each shard, W."""
    places: Array | None
    """int64 (N,), where in the batch each of those keys was; None if that was not wanted."""
    filled: Array
    """int32, which bags have keys on a shard, from 0 within their feature or within the batch, in
    ascending order; shard by shard, feature by feature."""
    num_filled: NDArray[np.int64]
    """How many these are: W times F numbers, shard by shard."""


def cut_bags(
    keys: Array,
    lengths: Array | None,
    num_bags: Sequence[int],
    num_shards: int,
    *,
    rule: str = "virtual_shard",
    wants_places: bool = False,
    num_virtual_shards: int = NUM_VIRTUAL_SHARDS,
    counts_in_batch: bool = False,
    filled: Array | None = None,
) -> CutBags:
    """Cuts the bags of F features by the shard that owns each key.

    `keys`: int64, uint64 or int32 (N,), feature by feature, bag by bag. `lengths`: keys of each
    bag, int64 (G,); None: every key is a bag. `num_bags`: bags of each feature, F numbers below
    2^31.
    `num_shards`: 1 to 65,536. `rule`: "virtual_shard", or "modulo" of the key as an unsigned
    number. `num_virtual_shards`: of "virtual_shard", a power of two; a shard owns whole ones, which
    are runs of the 65,536. `counts_in_batch`: whether `filled` counts bags within the batch, which
    has less than 2^31 then. `filled`: where these are written, a numpy array or torch tensor of
    int32, whose beginning is returned; the lesser of N and G times W numbers are room enough. None:
    new memory. Raises TypeError or ValueError for parts that do not fit each other.
    Cost: two passes over the keys, on the threads of `set_num_threads`; the result does not depend
    on them.
    """
    require_one_of("cut_bags", _RULES, rule=rule)
    if filled is not None and not hasattr(filled, "__getitem__"):
        raise TypeError(
            f"filled must be a numpy array or a torch tensor, got {type(filled).__name__}"
        )
    words, places, found, num_words, num_keys, num_filled = _ext.cut_bags(
        keys,
        lengths,
        num_bags,
        num_shards,
        rule == "modulo",
        wants_places,
        num_virtual_shards,
        filled,
        counts_in_batch,
    )
    return CutBags(
        words=words,
        num_words=num_words,
        num_keys=num_keys,
        places=places if wants_places else None,
        filled=found if filled is None else found[: num_filled.sum()],
        num_filled=num_filled,
    )


class ArrivedBags(NamedTuple):
    """Where bags lie in the words that P processes sent, for all A features of their batches."""

    first_keys: NDArray[np.int64]
    """(P * A,): where the keys of each feature begin among the words."""
    num_keys: NDArray[np.int64]
    """(P * A,)."""
    num_filled: NDArray[np.int64]
    """(P * A,): bags of each feature that have keys."""
    offsets: list[Array | None]
    """Of each process and batch, int64, of the bags that have keys: `num_filled` + 1 for each of
    its features, from 0 on; None: each of them has one key."""


def read_bags(
    words: Array,
    num_words: Sequence[int],
    num_features: Sequence[int],
    *,
    every_key_is_a_bag: Sequence[bool],
) -> ArrivedBags:
    """Reads what `cut_bags` made for one shard, on each of P processes.

    `words`: int64, `num_words` of each process. It has sent one or more batches, of `num_features`
    each, the same for all. `every_key_is_a_bag`: whether those of a process were cut without
    lengths. Raises ValueError for words that do not fit each other. Cost: two passes over the
    lengths.
    """
    return ArrivedBags(*_ext.read_bags(words, num_words, num_features, every_key_is_a_bag))
