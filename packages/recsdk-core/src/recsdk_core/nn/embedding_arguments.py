"""What nn.Embedding and nn.EmbeddingBag take and a table does not know.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from recsdk_core import _ext
from recsdk_core._internal.checks import (
    int_if_given,
    int_within,
    is_int,
    require_number,
)
from recsdk_core.outcome import Default, Outcome
from recsdk_core.table import Lease, Table

__all__ = [
    "NO_MARKS",
    "Marks",
    "accumulation_of",
    "check_default",
    "check_ends",
    "check_norms",
    "left_out",
    "map_without",
    "marks_of",
    "padding_among",
    "padding_of",
    "refuse_others",
    "sizes_of",
]

_INT64, _UINT64 = 2**63, 2**64
_PRETRAINED = "use from_pretrained(keys, weights, freeze=...)"
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "sparse": ((False,), "gradients are of the touched rows in any case; leave it out"),
    "device": (
        (None, "cpu", torch.device("cpu")),
        "rows lie in the memory of the host; recsdk-sharding has tables on devices",
    ),
    "_weight": ((None,), _PRETRAINED),
    "_freeze": ((False,), _PRETRAINED),
}
"""Arguments of torch's modules: the values that ask for nothing, and why no other is taken."""


def refuse_others(kind: str, others: Mapping[str, Any]) -> None:
    """Raises for arguments that would be ignored: ValueError with the reason, or TypeError."""
    for name, value in others.items():
        if name not in _REFUSED:
            raise TypeError(f"{kind} has no argument {name!r}; see the docstring of HashEmbedding")
        neutral, reason = _REFUSED[name]
        if value not in neutral:
            raise ValueError(f"{kind}: {name}={value!r} is not supported: {reason}")


def sizes_of(
    kind: str, sizes: tuple[int, ...], num_embeddings: int | None, embedding_dim: int | None
) -> tuple[int | None, int]:
    """(num_embeddings, embedding_dim), of `(dim)`, `(num_embeddings, dim)` or keywords."""
    given: dict[str, Any] = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
    is_width = len(sizes) == 1 and embedding_dim is None
    names = ["embedding_dim"] if is_width else ["num_embeddings", "embedding_dim"]
    if len(sizes) > len(names) or any(given[name] is not None for name in names[: len(sizes)]):
        raise TypeError(
            f"{kind} takes (embedding_dim) or (num_embeddings, embedding_dim), each once, and all "
            f"else by name; got {sizes} and { {n: v for n, v in given.items() if v is not None} }"
        )
    given.update(zip(names, sizes, strict=False))
    if given["embedding_dim"] is None:
        raise TypeError(f"{kind} needs embedding_dim, the width of its rows")
    planned = int_if_given(kind, 1, _INT64, num_embeddings=given["num_embeddings"])
    return planned, int_within(kind, 1, _INT64, embedding_dim=given["embedding_dim"])


def accumulation_of(kind: str, accumulate_steps: int, is_fused: bool) -> int:
    """The steps; ValueError or TypeError unless an optimizer of the module can accumulate so."""
    steps = int_within(kind, 1, _INT64, accumulate_steps=accumulate_steps)
    if steps > 1 and not is_fused:
        raise ValueError(
            f"{kind}: accumulate_steps={steps} goes with optimizer=; a RowOptimizer "
            "accumulates until the loop calls its step"
        )
    return steps


def check_norms(kind: str, max_norm: float | None, norm_type: float) -> None:
    """Raises ValueError or TypeError unless rows can have such a largest norm."""
    require_number(kind, norm_type=norm_type)
    if max_norm is not None:
        require_number(kind, max_norm=max_norm)
    if max_norm is not None and not max_norm >= 0:
        raise ValueError(f"{kind}: max_norm must be 0 or more, got {max_norm}; None: no limit")
    if not norm_type > 0:
        raise ValueError(f"{kind}: norm_type must be above 0, got {norm_type}")


# ---- what comes with keys ----------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """What comes with keys for rules of eviction and admission, of the shape of the keys.

    All but scores may be one for all.
    """

    times: torch.Tensor | int | None = None
    scores: torch.Tensor | None = None
    counts: torch.Tensor | int | None = None
    clicks: torch.Tensor | int | None = None

    @property
    def are_given(self) -> bool:
        """Whether there are any."""
        return any(each is not None for each in self._all)

    @property
    def _all(self) -> tuple[torch.Tensor | int | None, ...]:
        return self.times, self.scores, self.counts, self.clicks

    def check(self, kind: str, keys: torch.Tensor) -> None:
        """Raises TypeError or ValueError for what does not fit the keys."""
        for name, value in self.for_table().items():
            dtype = torch.float32 if name == "scores" else torch.int64
            is_tensor = isinstance(value, torch.Tensor)
            is_one = name != "scores" and not _has_dimensions(value) and is_int(value)
            if value is None or is_one:
                continue
            if not is_tensor or value.dtype != dtype:
                got = value.dtype if is_tensor else repr(value)
                raise TypeError(f"{kind}: {name} must be a tensor of {dtype}, got {got}")
            if value.shape != keys.shape:
                raise ValueError(
                    f"{kind}: {name} must have the shape of keys, {tuple(keys.shape)}, got "
                    f"{tuple(value.shape)}"
                )

    def flat(self) -> Marks:
        """In one dimension, as a table takes them."""
        return Marks(*map(_flat, self._all))

    def at(self, kept: torch.Tensor) -> Marks:
        """Those of some keys, bool (N,)."""
        return Marks(*(_of_some(each, kept) for each in self._all))

    def for_table(self) -> dict[str, Any]:
        """As arguments of a table's `map`."""
        return dict(zip(("times", "scores", "counts", "clicks"), self._all, strict=True))


NO_MARKS = Marks()


def marks_of(*given: Any) -> Marks:
    """What comes with keys; the same object where nothing does, which is most often."""
    return NO_MARKS if all(each is None for each in given) else Marks(*given)


def _has_dimensions(value: Any) -> bool:
    """Whether there is one for each key, not one for all."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _flat(value: Any) -> Any:
    return value.reshape(-1).contiguous() if _has_dimensions(value) else value


def _of_some(value: Any, kept: torch.Tensor) -> Any:
    return value[kept] if _has_dimensions(value) else value


# ---- padding -----------------------------------------------------------------------------------


def padding_of(kind: str, padding_idx: int | None) -> tuple[int | None, int | None]:
    """The key that stands for nothing, as it was given and as a signed number."""
    key = int_if_given(kind, -_INT64, _UINT64, padding_idx=padding_idx)
    return key, key if key is None or key < _INT64 else key - _UINT64


def padding_among(keys: torch.Tensor, padding: int | None) -> torch.Tensor | None:
    """Which keys are padding, bool of their shape; None if no key can be."""
    if padding is None:
        return None
    return _words(keys) == padding


def _words(keys: torch.Tensor) -> torch.Tensor:
    return keys.view(torch.int64) if keys.dtype == torch.uint64 else keys


def check_default(
    kind: str, default: Default, padding_idx: int | None, max_norm: float | None
) -> None:
    """Raises TypeError or ValueError for what keys without a row cannot read, or not beside the
    other arguments."""
    if not isinstance(default, Default):
        raise TypeError(
            f"{kind}: default must be a Default, as Default.constant(0.5), got {default!r}"
        )
    if max_norm is not None and default.kind == "initial_row":
        raise ValueError(
            f"{kind}: max_norm scales rows back where they are, and Default.initial_row() keeps "
            "none; take another default, or leave max_norm out"
        )
    if padding_idx is not None and default.kind == "shared_rows":
        raise ValueError(
            f"{kind}: padding_idx has no row and is never trained, and Default.shared_rows() "
            "trains those that keys without a row share; leave padding_idx out, or take another "
            "default"
        )


def map_without(
    table: Table,
    keys: torch.Tensor,
    padding: int | None,
    insert: bool,
    lease: Lease,
    marks: Marks = Marks(),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps keys (N,), of which padding is MISSING whatever rows there are."""
    is_padding = padding_among(keys, padding)
    if is_padding is None or not is_padding.numpy().any():
        mapped: tuple[torch.Tensor, torch.Tensor] = table.map(
            keys, insert=insert, lease=lease, **marks.for_table()
        )
        return mapped
    kept = ~is_padding
    rows_N = torch.zeros_like(keys, dtype=torch.int64)
    outcomes_N = torch.full_like(keys, int(Outcome.MISSING), dtype=torch.uint8)
    others = marks.at(kept).for_table()
    rows_N[kept], outcomes_N[kept] = table.map(keys[kept], insert=insert, lease=lease, **others)
    return rows_N, outcomes_N


def left_out(
    keys: torch.Tensor, ends: torch.Tensor, padding: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags without their padding: keys (N,), ends (B + 1,)."""
    is_padding = padding_among(keys, padding)
    if is_padding is None:
        return keys, ends
    kept = ~is_padding
    num_before = functional.pad(kept.cumsum(0), (1, 0))
    return keys[kept], num_before[ends.long()]


def check_ends(ends: torch.Tensor, num_keys: int) -> None:
    """Raises ValueError unless bags run from the first key to the last."""
    if _ext.bags_fit(ends, num_keys):
        return
    words = ends.numpy()
    got = f"{words[0]} to {words[-1]}" if len(words) else "none"
    is_sorted = bool((words[1:] >= words[:-1]).all())
    raise ValueError(
        f"offsets must ascend from 0 to the number of keys, {num_keys}; got {got}"
        f"{'' if is_sorted else ', and they descend in between'}"
    )
