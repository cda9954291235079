"""Jagged tensors with what rules of admission and eviction take beside each id.

Shape letters: N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsdk_sharding._configs.checking import check_switch, int_of
from recsdk_sharding._configs.data_taken import DTYPES

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "JaggedTensorWithCount",
    "JaggedTensorWithData",
    "JaggedTensorWithTimestamp",
    "KeyedJaggedTensorWithCount",
    "KeyedJaggedTensorWithData",
    "KeyedJaggedTensorWithTimestamp",
    "data_of",
    "with_clicks",
    "with_data_of",
]

Tensors = Mapping[str, torch.Tensor]


class _WithData:
    """What the classes below have in common; mixed into torchrec's."""

    _data: dict[str, torch.Tensor]
    _shown: ClassVar[Mapping[str, str]] = {}
    """What arguments of data are called, where it is otherwise."""

    def _take_data(
        self, values: Any, data: Mapping[str, torch.Tensor | None], **others: Any
    ) -> None:
        """Takes what is given of `data`; TypeError or ValueError for what does not fit the values.

        `others`: further tensors that torchrec's class takes.
        """
        for name, tensor in {"values": values, **others, **data}.items():
            is_absent = tensor is None and name != "values"
            if not is_absent and not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{type(self).__name__}: {self._shown.get(name, name)} must be a tensor, got "
                    f"{type(tensor).__name__}"
                )
        self._data = {name: tensor for name, tensor in data.items() if tensor is not None}
        for name, tensor in self._data.items():
            what, dtype = f"{type(self).__name__}: {self._shown.get(name, name)} must", DTYPES[name]
            if tensor.shape != values.shape:
                raise ValueError(
                    f"{what} have the shape of values, {tuple(values.shape)}, got "
                    f"{tuple(tensor.shape)}"
                )
            if tensor.dtype != dtype:
                raise ValueError(f"{what} be {dtype}, got {tensor.dtype}; pass it .to({dtype})")

    @property
    def data(self) -> dict[str, torch.Tensor]:
        """What comes with the ids: (N,) each, by its name in `recsdk_core.KeyData`."""
        return dict(self._data)

    def _like(self, plain: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """torchrec's tensor as one of this class, with changed data."""
        data = {name: change(own) for name, own in self._data.items()}
        made: Self = _made(type(self), plain, data)
        return made

    def to(self, device: torch.device, non_blocking: bool = False, **options: Any) -> Self:
        """As torchrec's."""
        check_switch("to: non_blocking", non_blocking)
        plain = super().to(device, non_blocking=non_blocking, **options)  # type: ignore[misc]
        return self._like(plain, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """As torchrec's."""
        super().record_stream(stream)  # type: ignore[misc]
        for tensor in self._data.values():
            tensor.record_stream(stream)


def _numbers_of(call: str, name: str, given: Any) -> list[int]:
    """A list of ints as Python's; TypeError for what is none."""
    is_array = isinstance(given, np.ndarray) or (isinstance(given, torch.Tensor) and given.is_cpu)
    if is_array and given.ndim == 1:
        given = given.tolist()
    if not isinstance(given, (list, tuple, range)):
        raise TypeError(f"{call} takes a list of ints as {name}, got {given!r:.100}")
    return [int_of(f"{call}: {name}[{number}]", each) for number, each in enumerate(given)]


def _check_same(indices: list[int], tensor: Any) -> None:
    """Raises unless the tensor has the same numbers, of which torchrec's kernel reads its own."""
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"permute: indices_tensor must be a tensor or None, got {tensor!r:.100}")
    if tensor.shape != (len(indices),) or tensor.layout is not torch.strided:
        raise ValueError(
            f"permute: indices_tensor must have a number for each of {len(indices)} indices, got "
            f"shape {tuple(tensor.shape)}"
        )
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"permute: indices_tensor must be int32 or int64, got {tensor.dtype}")
    if tensor.is_cpu and tensor.tolist() != indices:  # on a device it would be waited for
        raise ValueError(f"permute: indices_tensor is {tensor.tolist()}, but indices {indices}")


def _made(kind: Any, plain: Any, data: Tensors) -> Any:
    """torchrec's tensor as one of ours."""
    made = kind.__new__(kind)
    made.__dict__.update(plain.__dict__)
    made._data = dict(data)
    return made


class JaggedTensorWithData(_WithData, JaggedTensor):  # type: ignore[misc]
    """torchrec's `JaggedTensor` with what rules of admission and eviction take beside each id.

    `times`, `scores`, `counts` and `clicks` as those of `KeyedJaggedTensorWithData`.
    """

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        *,
        times: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        clicks: torch.Tensor | None = None,
    ) -> None:
        data = {"times": times, "scores": scores, "counts": counts, "clicks": clicks}
        self._take_data(values, data, weights=weights, lengths=lengths, offsets=offsets)
        super().__init__(values, weights, lengths, offsets)


class KeyedJaggedTensorWithData(_WithData, KeyedJaggedTensor):  # type: ignore[misc]
    """torchrec's `KeyedJaggedTensor` with what rules of admission and eviction take beside each id.

    Collections of hash tables take it in place of torchrec's, sharded or not: what comes with an id
    goes with it to the rank that has its row. `times` int64, `scores` float32, `counts` and
    `clicks` int64 have the shape of the values. `times`, in any unit, are for
    `Evict.lru(by="time")`: the largest that came with an id says when it was seen last, and the
    largest of a table's ids what time it is. `scores` are for `Evict.score()`, which needs them.
    `counts`, 1 or more, are for tables with admission or eviction by shows and clicks: how many
    occurrences an id stands for. `clicks`, 0 or more, are for rules by shows and clicks, see also
    `with_clicks`. Tables whose rules take none of them, and evaluation, do not look at them.

    `to`, `pin_memory`, `record_stream`, `permute`, `split`, `[]` and `to_dict` keep them, and so
    does `concat` of this class. What `KeyedJaggedTensor` makes of it does not: torchrec's `concat`
    and `empty_like` know keys, values, weights and lengths only. Raises TypeError or ValueError for
    what does not fit.

    >>> import torch
    >>> batch = KeyedJaggedTensorWithData(
    ...     keys=["user"],
    ...     values=torch.tensor([7, 8]),
    ...     lengths=torch.tensor([1, 1]),
    ...     times=torch.tensor([1732550400, 1732550460]),
    ... )
    >>> batch["user"].data["times"].tolist()
    [1732550400, 1732550460]
    """

    _of_feature: ClassVar[type[JaggedTensorWithData]] = JaggedTensorWithData

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        *,
        times: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        clicks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """`options`: further arguments of torchrec's class."""
        data = {"times": times, "scores": scores, "counts": counts, "clicks": clicks}
        self._take_data(values, data, weights=weights, lengths=lengths, offsets=offsets)
        super().__init__(keys, values, weights, lengths, offsets, **options)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, Any]) -> Self:
        """The features of a dictionary of jagged tensors, by name, with what comes with their ids.

        Raises ValueError for none, and if something comes with some features and not with others.
        """
        if not isinstance(jt_dict, Mapping):
            raise TypeError(f"{cls.__name__}: jt_dict must be a dict, got {type(jt_dict).__name__}")
        for name, each in jt_dict.items():
            if not isinstance(each, JaggedTensor):
                raise TypeError(
                    f"{cls.__name__}: jt_dict must hold jagged tensors, got a "
                    f"{type(each).__name__} of {name!r}"
                )
        if not jt_dict:
            raise ValueError(f"{cls.__name__}.from_jt_dict: there must be a feature, got none")
        joined = cls._joined("from_jt_dict", list(jt_dict), list(jt_dict.values()))
        made: Self = _made(cls, KeyedJaggedTensor.from_jt_dict(dict(jt_dict)), joined)
        return made

    @classmethod
    def concat(cls, kjt_list: Sequence[KeyedJaggedTensor]) -> Self:
        """The features of some batches of one size, one batch after the other.

        Raises TypeError for what are no batches, ValueError for none, and if something comes with
        some of them and not with others, and as torchrec's.
        """
        if not isinstance(kjt_list, Sequence) or isinstance(kjt_list, str):
            raise TypeError(
                f"{cls.__name__}: kjt_list must be a list of KeyedJaggedTensor, got "
                f"{type(kjt_list).__name__}"
            )
        for each in kjt_list:
            if not isinstance(each, KeyedJaggedTensor):
                raise TypeError(
                    f"{cls.__name__}: kjt_list must hold KeyedJaggedTensor, got a "
                    f"{type(each).__name__}"
                )
        if not kjt_list:
            raise ValueError(f"{cls.__name__}.concat: kjt_list is empty; pass at least one batch")
        of = [str(batch.keys()) for batch in kjt_list]
        made: Self = _made(
            cls, KeyedJaggedTensor.concat(list(kjt_list)), cls._joined("concat", of, kjt_list)
        )
        return made

    @classmethod
    def _joined(cls, call: str, names: Sequence[str], parts: Sequence[Any]) -> Tensors:
        """What comes with the ids of all parts; ValueError if it comes with some of them only."""
        data = [getattr(part, "_data", {}) for part in parts]
        given = sorted({name for each in data for name in each})
        for name in given:
            lacking = [own for own, each in zip(names, data, strict=True) if name not in each]
            if lacking:
                raise ValueError(
                    f"{cls.__name__}.{call}: {cls._shown.get(name, name)} come with some "
                    f"features, and {lacking} have none"
                )
        return {name: torch.cat([each[name] for each in data]) for name in given}

    def pin_memory(self) -> Self:
        """As torchrec's."""
        return self._like(super().pin_memory(), torch.Tensor.pin_memory)

    def permute(self, indices: list[int], indices_tensor: torch.Tensor | None = None) -> Self:
        """As torchrec's. Raises TypeError or ValueError for what are no numbers of features."""
        most = len(self.keys()) - 1
        indices = _numbers_of("permute", "indices", indices)
        wrong = [index for index in indices if not 0 <= index <= most]
        if wrong:
            raise ValueError(f"permute takes 0 to {most} as indices, got {wrong[0]}")
        _check_same(indices, indices_tensor)
        spans = [self._span(index) for index in indices]
        plain = super().permute(indices, indices_tensor)
        return self._like(plain, lambda own: torch.cat([own[:0], *(own[span] for span in spans)]))

    def split(self, segments: list[int]) -> list[Self]:
        """As torchrec's. Raises TypeError or ValueError for what are no numbers of features."""
        segments = _numbers_of("split", "segments", segments)
        if min(segments, default=0) < 0 or sum(segments) > len(self.keys()):
            raise ValueError(
                f"split: segments must be at least 0 and add up to at most {len(self.keys())}, the "
                f"number of features, got {segments}"
            )
        ends, bounds = self.offset_per_key(), [0, *accumulate(segments)]
        spans = [slice(ends[begin], ends[end]) for begin, end in pairwise(bounds)]
        return [
            self._like(plain, itemgetter(span))
            for plain, span in zip(super().split(segments), spans, strict=True)
        ]

    def flatten_lengths(self) -> Self:
        """As torchrec's."""
        return self._like(super().flatten_lengths(), lambda tensor: tensor)

    def __getitem__(self, key: str) -> JaggedTensorWithData:
        return self._feature(key, super().__getitem__(key))

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensorWithData]:
        """As torchrec's."""
        check_switch("to_dict: compute_offsets", compute_offsets)
        plain = super().to_dict(compute_offsets)
        return {name: self._feature(name, tensor) for name, tensor in plain.items()}

    def _feature(self, key: str, plain: JaggedTensor) -> JaggedTensorWithData:
        span = self._span(self._key_indices()[key])
        data = {name: tensor[span] for name, tensor in self._data.items()}
        made: JaggedTensorWithData = _made(self._of_feature, plain, data)
        return made

    def _span(self, index: int) -> slice:
        """Where a feature's ids lie."""
        return slice(*self.offset_per_key()[index : index + 2])


class _Timestamps(_WithData):
    """`times` by Rec SDK's name."""

    _shown: ClassVar[Mapping[str, str]] = {"times": "timestamps"}

    @property
    def timestamps(self) -> torch.Tensor | None:
        """int64, of the values' shape."""
        return self._data.get("times")


class JaggedTensorWithTimestamp(_Timestamps, JaggedTensorWithData):
    """Rec SDK's jagged tensor with a timestamp for each id: `times` of `JaggedTensorWithData`."""

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets, times=timestamps)


class KeyedJaggedTensorWithTimestamp(_Timestamps, KeyedJaggedTensorWithData):
    """Rec SDK's batch with a timestamp for each id: `times` of `KeyedJaggedTensorWithData`."""

    _of_feature = JaggedTensorWithTimestamp

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        timestamps: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """`options`: further arguments of torchrec's class."""
        super().__init__(keys, values, weights, lengths, offsets, times=timestamps, **options)


class _Counts(_WithData):
    """`counts` by Rec SDK's name."""

    @property
    def counts(self) -> torch.Tensor | None:
        """int64, of the values' shape."""
        return self._data.get("counts")


class JaggedTensorWithCount(_Counts, JaggedTensorWithData):
    """Rec SDK's jagged tensor with a count for each id: `counts` of `JaggedTensorWithData`."""

    def __init__(
        self,
        values: torch.Tensor,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets, counts=counts)


class KeyedJaggedTensorWithCount(_Counts, KeyedJaggedTensorWithData):
    """Rec SDK's batch with a count for each id: `counts` of `KeyedJaggedTensorWithData`."""

    _of_feature = JaggedTensorWithCount

    def __init__(
        self,
        keys: list[str],
        values: torch.Tensor,
        counts: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """`options`: further arguments of torchrec's class."""
        super().__init__(keys, values, weights, lengths, offsets, counts=counts, **options)


def with_clicks(features: KeyedJaggedTensor, click_labels: torch.Tensor) -> Any:
    """The same batch with clicks: each id has those of its sample.

    `click_labels`: how often each sample was clicked, (B,), whole numbers of any dtype, where the
    features are. What comes with ids stays, clicks too. For a `KeyedJaggedTensor` with one batch
    size; gives a `KeyedJaggedTensorWithData`, of the class of `features` if it is one. Raises
    ValueError for labels that do not fit.

    >>> import torch
    >>> batch = KeyedJaggedTensor(["user"], torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))
    >>> with_clicks(batch, torch.tensor([0.0, 1.0])).data["clicks"].tolist()
    [0, 0, 1]
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(
            f"with_clicks: features must be a KeyedJaggedTensor, got {type(features).__name__}"
        )
    if not isinstance(click_labels, torch.Tensor):
        raise TypeError(
            f"with_clicks: click_labels must be a tensor, got {type(click_labels).__name__}"
        )
    has_data = isinstance(features, KeyedJaggedTensorWithData)
    data = dict(features._data) if has_data else {}
    if "clicks" in data:
        return features
    if features.variable_stride_per_key():
        raise ValueError(
            "with_clicks: features must have one batch size, for labels are of samples, got "
            f"{features.stride_per_key()}"
        )
    if click_labels.shape != (features.stride(),):
        raise ValueError(
            f"with_clicks: click_labels must have one for each of {features.stride()} samples, got "
            f"{tuple(click_labels.shape)}"
        )
    clicks_B = click_labels.to(torch.int64)
    if not bool((clicks_B == click_labels).all()):
        wrong = click_labels[clicks_B != click_labels][0].item()
        raise ValueError(
            f"with_clicks: click_labels must be whole numbers, got {wrong}; pass how often each "
            "sample was clicked"
        )
    lengths_G = features.lengths().view(-1)
    data["clicks"] = clicks_B.repeat(len(features.keys())).repeat_interleave(lengths_G)
    return _made(type(features) if has_data else KeyedJaggedTensorWithData, features, data)


def with_data_of(given: KeyedJaggedTensorWithData, made: KeyedJaggedTensor) -> Any:
    """What was made of features, of each one's ids, with what came with these.

    `made` may have fewer features, in another order, and some of what came already. ValueError if
    it has other numbers of ids.
    """
    has_data = isinstance(made, KeyedJaggedTensorWithData)
    own = made._data if has_data else {}
    missing = {what: numbers for what, numbers in given._data.items() if what not in own}
    if not missing:
        return made
    counts = dict(zip(given.keys(), given.length_per_key(), strict=True))
    for name, count in zip(made.keys(), made.length_per_key(), strict=True):
        if counts.get(name) != count:
            raise ValueError(
                f"feature {name!r}: its processor made {count} ids of {counts.get(name, 0)}, so "
                "that it is not known which of the times and all else belongs to which id; it may "
                "set weights only"
            )
    names, data = list(made.keys()), dict(own)
    for what, numbers in missing.items():
        parts = numbers.split_with_sizes(given.length_per_key())
        of_features = dict(zip(given.keys(), parts, strict=True))
        data[what] = torch.cat([of_features[name] for name in names])
    return _made(type(made) if has_data else KeyedJaggedTensorWithData, made, data)


def data_of(
    source: KeyedJaggedTensor, wanted: Sequence[str], num_keys: int
) -> dict[str, torch.Tensor]:
    """What comes with the ids of a batch on the host, of what is `wanted`; (N,) each.

    Raises ValueError for what does not fit the ids any more.
    """
    given = source._data if isinstance(source, KeyedJaggedTensorWithData) else {}
    found = {name: given[name].contiguous() for name in wanted if name in given}
    for name, tensor in found.items():
        if tensor.device.type != "cpu" or tensor.shape != (num_keys,):
            raise ValueError(
                f"{name} must be on the cpu, one for each of the {num_keys} ids, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
    return found
