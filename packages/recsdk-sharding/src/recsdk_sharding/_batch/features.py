"""From a `KeyedJaggedTensor` to mapped bags: what the unsharded and the sharded modules share.

Shape letters: N keys, F features, B samples, G bags of all features, P pieces, T tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from recsdk_core import (
    Index,
    KeyData,
    Lease,
    StoreNumbers,
    Table,
    count_keys,
    lay_out_offsets,
    lease_tables,
    map_joined,
)
from recsdk_core.batch_leases import BatchLeases, leave_failed
from recsdk_sharding._batch.jagged_data import data_of

__all__ = [
    "Features",
    "KeyPieces",
    "MappedKeys",
    "features_on_host",
    "keys_of",
    "map_under_leases",
    "mean_divisor",
    "positions_of",
    "read_features",
    "sums_of",
    "weights_of",
]

_KEY_TYPES = (torch.int64, torch.int32, torch.uint64)
_LENGTH_TYPES = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Features:
    """Checked bags of F features, in the order that they were asked for."""

    keys_N: torch.Tensor
    """Keys, int64 (N,): feature by feature, bag by bag."""
    lengths: torch.Tensor
    """Keys per bag, int64 or int32 (G,), feature by feature."""
    num_bags: list[int]
    """Bags of each feature, F numbers; B each unless batches vary."""
    weights_N: torch.Tensor | None
    """float32 (N,), if weighted."""
    batch_size: int
    """Samples B."""
    counts: list[int]
    """Keys of each feature."""
    has_one_key_each_F: list[bool]
    """Whether each bag of a feature has one key."""
    bag_of_sample: list[torch.Tensor] | None = None
    """The bag of each sample, F times int64 (B,); None: bag b is that of sample b."""
    key_spans: list[slice] | None = None
    """Where each feature's keys were in the batch; None: as they are here."""
    data: dict[str, torch.Tensor] = field(default_factory=dict)
    """What comes with the keys for rules of admission and eviction, (N,) by name of `KeyData`."""

    @cached_property
    def lengths_G(self) -> torch.Tensor:
        """Keys per bag, int64 (G,)."""
        return self.lengths.to(torch.int64)

    @cached_property
    def has_one_key_each(self) -> bool:
        """Whether every bag has one key."""
        return all(self.has_one_key_each_F)

    def offsets(self) -> Sequence[torch.Tensor]:
        """Where the bags of each feature begin among its keys, F times int64 (its bags + 1,)."""
        offsets: torch.Tensor = lay_out_offsets(self.lengths, self.num_bags)
        return offsets.split_with_sizes([count + 1 for count in self.num_bags])


def features_on_host(source: Any) -> Any:
    """The same features with their tensors on the cpu; waits for the device if they are on one.

    Pipelines of recsdk pass what is on the host already.
    """
    if isinstance(source, KeyedJaggedTensor) and source.values().device.type != "cpu":
        return source.to(torch.device("cpu"))
    return source


def read_features(
    source: Any, names: Sequence[str], is_weighted: bool, takes: Sequence[str] = ()
) -> Features:
    """The features `names` of a KeyedJaggedTensor (or TensorDict) on the cpu, checked.

    Keys int64, int32 (widened) or uint64 (the same bits). With another batch size per feature the
    inverse indices say which bag is whose. `takes`: what is read of what comes with the keys.
    Raises TypeError or ValueError that says what is wrong: a missing feature, another dtype or
    device, lengths that do not match the keys.
    """
    kjt = source if type(source) is KeyedJaggedTensor else maybe_td_to_kjt(source, None)
    if not isinstance(kjt, KeyedJaggedTensor):
        raise TypeError(f"features must be a KeyedJaggedTensor, got {type(source).__name__}")
    positions = positions_of(kjt, names)
    varies = kjt.variable_stride_per_key()
    batch_size: int = kjt.stride()
    num_bags: list[int] = kjt.stride_per_key() if varies else [batch_size] * len(kjt.keys())
    keys_N, lengths = keys_of(kjt), _lengths_of(kjt, num_bags)
    num_keys = keys_N.numel()
    counts, has_one_key_each_F = count_keys(lengths, num_bags, num_keys)
    batch = Features(
        keys_N=keys_N,
        lengths=lengths,
        num_bags=num_bags,
        weights_N=weights_of(kjt, num_keys) if is_weighted else None,
        batch_size=batch_size,
        counts=counts,
        has_one_key_each_F=has_one_key_each_F,
        data=data_of(kjt, takes, num_keys) if takes else {},
    )
    if positions is not None:
        batch = _select(batch, positions)
    return _with_samples(batch, kjt, names) if varies else batch


def positions_of(kjt: KeyedJaggedTensor, names: Sequence[str]) -> list[int] | None:
    """Where the features are among those of the batch; None: they are all, in this order."""
    if kjt.keys() == list(names) and len(set(names)) == len(names):
        return None
    found = {name: index for index, name in enumerate(kjt.keys())}
    missing = sorted(set(names) - set(found))
    if missing:
        raise ValueError(f"the batch lacks the features {missing}; it has {list(kjt.keys())}")
    if len(found) < len(kjt.keys()):
        counts = Counter(kjt.keys())
        repeated = [name for name in names if counts[name] > 1]
        if repeated:
            raise ValueError(
                f"the batch has the features {repeated} more than once, so that it is not clear "
                "which ids are meant; give each feature a name of its own"
            )
    return [found[name] for name in names]


def _select(batch: Features, positions: Sequence[int]) -> Features:
    keys = list(accumulate(batch.counts, initial=0))
    bags = list(accumulate(batch.num_bags, initial=0))
    key_spans = [slice(keys[i], keys[i + 1]) for i in positions]
    weights_N = batch.weights_N
    return Features(
        keys_N=torch.cat([batch.keys_N[span] for span in key_spans]),
        lengths=torch.cat([batch.lengths[bags[i] : bags[i + 1]] for i in positions]),
        num_bags=[batch.num_bags[i] for i in positions],
        weights_N=None if weights_N is None else torch.cat([weights_N[s] for s in key_spans]),
        batch_size=batch.batch_size,
        counts=[batch.counts[i] for i in positions],
        has_one_key_each_F=[batch.has_one_key_each_F[i] for i in positions],
        key_spans=key_spans,
        data={n: torch.cat([own[span] for span in key_spans]) for n, own in batch.data.items()},
    )


def _with_samples(batch: Features, kjt: KeyedJaggedTensor, names: Sequence[str]) -> Features:
    """The same with the bag of each sample, from the inverse indices."""
    given = kjt.inverse_indices_or_none()
    if given is None:
        raise ValueError(
            "a batch with another batch size per feature needs inverse_indices, which say which "
            "bag each sample has"
        )
    found = dict(zip(given[0], given[1].to(torch.int64), strict=True))
    missing = sorted(set(names) - set(found))
    if missing:
        raise ValueError(
            f"inverse_indices must be of all features, got {sorted(found)}; add {missing}"
        )
    samples = [found[name] for name in names]
    for name, bags, count in zip(names, samples, batch.num_bags, strict=True):
        if len(bags) and (int(bags.min()) < 0 or int(bags.max()) >= count):
            raise ValueError(
                f"inverse_indices of {name!r} must be 0 to {count - 1}, its bags, got "
                f"{int(bags.min())} to {int(bags.max())}"
            )
    return replace(batch, batch_size=given[1].shape[1], bag_of_sample=samples)


def keys_of(kjt: KeyedJaggedTensor) -> torch.Tensor:
    """The keys of a batch, int64 (N,), checked."""
    values: torch.Tensor = kjt.values()
    if values.dtype is torch.int64 and values.is_cpu and values.dim() == 1:
        return values if values.is_contiguous() else values.contiguous()
    if values.device.type != "cpu":
        raise ValueError(f"ids must be on the cpu, got a tensor on {values.device}")
    if values.dtype not in _KEY_TYPES or values.dim() != 1:
        raise TypeError(
            f"ids must be a 1-d tensor of int64, got {values.dim()}-d {values.dtype}; convert them "
            "with .to(torch.int64), or hash other categories to 64 bits"
        )
    values = values.contiguous()  # a column of a matrix is not
    if values.dtype == torch.uint64:
        return values.view(torch.int64)
    return values.to(torch.int64)


def _lengths_of(kjt: KeyedJaggedTensor, num_bags: list[int]) -> torch.Tensor:
    """Int64 or int32 (G,): as they are if they can be, since each call of torch takes time."""
    lengths: torch.Tensor = kjt.lengths()
    if lengths.numel() != sum(num_bags):
        raise ValueError(
            f"lengths must have a number for each of {sum(num_bags)} bags of {len(num_bags)} "
            f"features, got {lengths.numel()} numbers"
        )
    if lengths.dtype not in _LENGTH_TYPES:
        lengths = lengths.to(torch.int64)
    is_plain = lengths.dim() == 1 and lengths.is_contiguous()
    return lengths if is_plain else lengths.flatten().contiguous()


def weights_of(kjt: KeyedJaggedTensor, num_keys: int) -> torch.Tensor:
    """The weights of a batch, float32 (N,), checked."""
    weights: torch.Tensor | None = kjt.weights_or_none()
    if weights is None:
        raise ValueError(
            "the collection is weighted, but the batch has no weights; pass weights, one for each "
            "key, or make the collection with is_weighted=False"
        )
    if weights.dim() != 1 or weights.numel() != num_keys or not weights.is_floating_point():
        raise ValueError(
            f"weights must be floating point, one for each of the {num_keys} ids, got "
            f"{weights.dtype} of shape {tuple(weights.shape)}"
        )
    return weights.to(torch.float32)


def mean_divisor(features: Features, is_mean: Sequence[bool]) -> torch.Tensor:
    """What to divide sums by, float32 (G,): the mean's count or sum of weights, else 1.

    Infinite where that is 0, so that both the mean and its gradient are 0. It carries the autograd
    graph of the weights.
    """
    divisor_G = features.lengths_G.to(torch.float32)
    if features.weights_N is not None:
        bag_N = torch.repeat_interleave(features.lengths_G)
        divisor_G = torch.zeros_like(divisor_G).index_add(0, bag_N, features.weights_N)
    divisor_G = divisor_G.masked_fill(divisor_G == 0, torch.inf)
    is_mean_G = torch.from_numpy(np.repeat(np.array(is_mean, np.bool_), features.num_bags))
    return divisor_G.masked_fill(~is_mean_G, 1.0)


class KeyPieces(NamedTuple):
    """Keys of many tables in one tensor: P pieces, table by table."""

    keys_N: torch.Tensor
    """int64; pieces may leave some of them out."""
    counts_P: NDArray[np.int64]
    """Keys of each piece."""
    begins_P: NDArray[np.int64] | None = None
    """Where each begins; None: one after the other, to the last key."""


class MappedKeys(NamedTuple):
    """Keys of many tables, mapped: those of each table one after the other."""

    rows_N: torch.Tensor | None
    """Row numbers int64 (N,); None: they were written where they were wanted."""
    outcomes_N: torch.Tensor
    """Outcomes uint8 (N,)."""
    leases: Sequence[Lease]
    """What each table's keys are under."""

    def leave_failed(self) -> None:
        """Leaves the leases, as those of a batch that failed."""
        leave_failed([BatchLeases(self.leases)])


def map_under_leases(
    tables: Sequence[Table | Index],
    keys: KeyPieces,
    num_pieces_T: NDArray[np.int64],
    *,
    insert: bool,
    step: int | None,
    data: Sequence[KeyData | None] | None = None,
    numbers: StoreNumbers | None = None,
) -> MappedKeys:
    """Maps the keys of T tables, of so many pieces each, each table under a lease of its own.

    A key without a row gets one with `insert`. `data`: what comes with the keys of each table.
    `numbers`: where row numbers are written; None: they are returned. If it raises, the leases are
    left as those of a batch that failed.
    """
    leases = lease_tables(tables, step)
    try:
        rows_N, outcomes_N = map_joined(
            tables,
            keys.keys_N,
            keys.counts_P,
            insert=insert,
            leases=leases,
            data=data,
            begins=keys.begins_P,
            num_pieces=num_pieces_T,
            store=numbers,
        )
        return MappedKeys(rows_N, outcomes_N, leases)
    except BaseException:
        leave_failed([BatchLeases(leases)])  # the traceback would keep them open
        raise


def sums_of(numbers: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sums of parts of `numbers`, which are `sizes` long."""
    ends = np.concatenate([[0], sizes.cumsum()])
    totals: NDArray[np.int64] = np.diff(np.concatenate([[0], np.cumsum(numbers)])[ends])
    return totals
