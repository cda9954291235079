"""Strategies for keys, bags, vectors, and sequences of table operations.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

__all__ = [
    "EDGE_KEYS",
    "Operation",
    "bags",
    "key_arrays",
    "keys",
    "operations",
    "predicates",
    "vectors",
]

_LOW, _HIGH = -(2**63), 2**63 - 1

EDGE_KEYS: tuple[int, ...] = (
    0, 1, -1, 2, -2, _LOW, _LOW + 1, _HIGH, _HIGH - 1,
    2**31, -(2**31), 2**32, 2**32 - 1, 2**53, 2**62, -(2**62),
    0x5555555555555555, 0x0123456789ABCDEF,
)  # fmt: skip
"""Keys that implementations are tempted to treat as special."""


def keys() -> st.SearchStrategy[int]:
    """A key as an int: edge values, small numbers that collide, and any 64-bit pattern."""
    return st.one_of(st.sampled_from(EDGE_KEYS), st.integers(-8, 8), st.integers(_LOW, _HIGH))


def key_arrays(
    min_size: int = 0,
    max_size: int = 32,
    *,
    unsigned: bool = False,
    elements: st.SearchStrategy[int] | None = None,
) -> st.SearchStrategy[NDArray[Any]]:
    """Keys (N,), int64 (uint64 with `unsigned`), often with duplicates, maybe empty.

    `elements` draws each key; by default `keys()`.
    """
    dtype = np.uint64 if unsigned else np.int64
    one = keys() if elements is None else elements
    return st.lists(one, min_size=min_size, max_size=max_size).map(
        lambda drawn: np.array(drawn, dtype=np.int64).view(dtype)
    )


def predicates(columns: Sequence[str]) -> st.SearchStrategy[str]:
    """Texts for `recsdk_core.predicates.Predicate` over some of its columns."""
    numbers = st.one_of(
        st.integers(-4, 12).map(str),
        st.sampled_from(["0.5", "2.25", "1 + 2 * 3", "-(2 - 5)", "1e30", str(2**63), str(_LOW)]),
    )
    comparisons = st.tuples(
        st.sampled_from(columns), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), numbers
    )
    leaves = st.one_of(
        comparisons.map(" ".join),
        comparisons.map(lambda parts: " ".join(reversed(parts))),
        st.tuples(numbers, st.sampled_from(columns), numbers).map(" <= ".join),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            inner.map(lambda text: f"not ({text})"),
            st.tuples(inner, inner).map(lambda texts: f"({texts[0]} and {texts[1]})"),
            st.tuples(inner, inner).map(lambda texts: f"({texts[0]}) or {texts[1]}"),
        ),
        max_leaves=4,
    )


def vectors(
    num_rows: int, width: int, *, magnitude: float = 4.0
) -> st.SearchStrategy[NDArray[np.float32]]:
    """Finite float32 (num_rows, width) within +-magnitude, drawn as a whole from a seed."""

    def make(seed: int) -> NDArray[np.float32]:
        drawn = np.random.default_rng(seed).uniform(-magnitude, magnitude, (num_rows, width))
        return drawn.astype(np.float32)

    return st.integers(0, 2**32 - 1).map(make)


@st.composite
def bags(
    draw: st.DrawFn,
    max_bags: int = 6,
    max_keys: int = 6,
    *,
    weighted: bool | None = None,
    elements: st.SearchStrategy[int] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    """(keys (N,), offsets (B + 1,), weights (N,) or None); bags and batches may be empty.

    `weighted` None draws with and without weights; some weights are 0. `elements` as in
    `key_arrays`.
    """
    lengths = draw(st.lists(st.integers(0, max_keys), max_size=max_bags))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    drawn = draw(key_arrays(total, total, elements=elements))
    if not (draw(st.booleans()) if weighted is None else weighted):
        return drawn, offsets, None
    weight = st.sampled_from([0.0, 0.5, 1.0, 1.5, -0.25, 3.0])
    weights = draw(st.lists(weight, min_size=total, max_size=total))
    return drawn, offsets, np.array(weights, dtype=np.float32)


@dataclass(frozen=True)
class Operation:
    """One call of a table's method."""

    method: str
    """Name of the method."""
    args: tuple[Any, ...] = ()
    """Positional arguments."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments."""

    def run(self, table: Any) -> Any:
        """Calls the method of a Table or a ReferenceTable."""
        return getattr(table, self.method)(*self.args, **self.kwargs)


_OUTCOMES = {"return_outcomes": True}


@st.composite
def _operation(draw: st.DrawFn, dim: int) -> Operation:
    method = draw(
        st.sampled_from(
            ["find_or_insert", "lookup", "erase", "upsert", "apply_gradients", "pool",
             "pool_backward", "clear"]
        )
    )  # fmt: skip
    if method == "clear":
        return Operation(method)
    if method in ("pool", "pool_backward"):
        return draw(_bag_operation(method, dim))
    drawn = draw(key_arrays())
    if method in ("upsert", "apply_gradients"):
        return Operation(method, (drawn, draw(vectors(len(drawn), dim))), _OUTCOMES)
    return Operation(method, (drawn,), _OUTCOMES)


@st.composite
def _bag_operation(draw: st.DrawFn, method: str, dim: int) -> Operation:
    drawn, offsets, weights = draw(bags())
    pooling = draw(st.sampled_from(["sum", "mean"]))
    if method == "pool":
        options = {**_OUTCOMES, "insert": draw(st.booleans())}
        return Operation(method, (drawn, offsets, weights, pooling), options)
    grad = draw(vectors(len(offsets) - 1, dim))
    options = {"return_weights_grad": weights is not None}
    return Operation(method, (drawn, offsets, grad, weights, pooling), options)


def operations(dim: int, max_size: int = 12) -> st.SearchStrategy[list[Operation]]:
    """Sequences of calls of a table of width `dim` that read, insert, write, train and erase."""
    return st.lists(_operation(dim), max_size=max_size)
