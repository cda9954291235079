"""Which keys a text such as "idle > 100 and count < 3" is true of.

One language for evicting by a condition, dry runs, and what `recsdk ckpt compact` and
`recsdk freeze` keep. It reads what a rule of eviction keeps of keys. Shape letter: n keys.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core.eviction import Evict

__all__ = ["COLUMNS", "Kept", "Predicate", "sources_of"]

COLUMNS: Mapping[str, str] = {
    "step": "with any rule of eviction",
    "idle": "with any rule of eviction",
    "time": "with Evict.lru(by='time') or Evict.function() of time",
    "count": "with Evict.lfu(), rare_count or Evict.function() of count",
    "score": "with Evict.score(), rules by shows and clicks, or Evict.function() of score",
    "age": "with min_age",
    "norm": "with Evict.low_norm()",
    "place": "with Evict.function()",
}
"""The columns of a predicate, and with which rule a table keeps each."""

_SOURCES = {
    "evict_step": ("step", "idle"),
    "evict_time": ("time",),
    "evict_count": ("count",),
    "evict_score": ("score",),
    "evict_born": ("age",),
    "evict_show_click": ("score",),
    "evict_totals": ("score",),
    "evict_norm": ("norm",),
    "evict_place": ("place",),
    "evict_worth": (),
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_TURNED = {
    operator.lt: operator.gt,
    operator.le: operator.ge,
    operator.gt: operator.lt,
    operator.ge: operator.le,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MOST_CHARACTERS = 1000
_COUNT_UNITS = 2.0**16
_MOST_WORTH = 2.0**62
_LOG2 = 0.6931471805599453
_INT64 = 2**63


@dataclass(frozen=True)
class Kept:
    """What a rule of eviction keeps of some keys."""

    metadata: Mapping[str, NDArray[Any]]
    """(n,) by the name that row files have, such as "evict_step" int64, "evict_score" float32."""
    step: int
    """The step of the last call that inserted: now."""
    half_life: float | None = None
    """Of `Evict.lfu`: counts are as of now."""
    decay: float | None = None
    """Of rules by shows and clicks: scores are as of now."""

    @staticmethod
    def by_rule(metadata: Mapping[str, NDArray[Any]], step: int, rule: Evict | None) -> Kept:
        """What a rule keeps; None: there is none."""
        if rule is None:
            return Kept(metadata, step)
        return Kept(metadata, step, rule.half_life, rule.decay)

    def column(self, name: str) -> NDArray[Any]:
        """A column (n,): int64, but count float64, and score, norm and place float32.

        `step` saw the key last, `idle` steps ago; `age` steps ago it came. `time` is the largest
        that came with it. Of a key of which nothing is known, step and time are -2**63.
        """
        if name in ("step", "time", "norm", "place"):
            return self.metadata["evict_" + name]
        if name == "idle":
            return self._steps_since("evict_step")
        if name == "age":
            return self._steps_since("evict_born")
        if name != "score":
            return self._counts()
        if "evict_totals" in self.metadata:
            return self._totals()
        return (
            self._shows() if "evict_show_click" in self.metadata else self.metadata["evict_score"]
        )

    def _steps_since(self, name: str) -> NDArray[np.int64]:
        steps_n: NDArray[np.int64] = self.metadata[name]
        now = np.uint64(self.step % 2**64)
        # In 64 bits without a sign the difference is right, and then held to what int64 has.
        elapsed_n = np.minimum(now - steps_n.view(np.uint64), np.uint64(_INT64 - 1))
        return np.where(steps_n < self.step, elapsed_n.astype(np.int64), 0)

    def _shows(self) -> NDArray[np.float64]:
        units_n = self.metadata["evict_show_click"].astype(np.float64)
        if self.decay is not None:
            elapsed_n = self._steps_since("evict_step")
            units_n = np.floor(units_n * _power(self.decay, elapsed_n))
        return units_n / _COUNT_UNITS

    def _totals(self) -> NDArray[np.float64]:
        units_n = self.metadata["evict_totals"].astype(np.float64)
        before_n = self.metadata["evict_worth"].astype(np.float64)
        decay = 1.0 if self.decay is None else self.decay
        left_n = np.floor(np.minimum((before_n + units_n) * decay, _MOST_WORTH))
        return np.where(before_n < 0, units_n, left_n) / _COUNT_UNITS

    def _counts(self) -> NDArray[np.float64]:
        units_n = self.metadata["evict_count"].astype(np.float64)
        if self.half_life is not None:
            elapsed_n = self._steps_since("evict_step").astype(np.float64)
            # As the engine lets counts decay, to the bit.
            units_n = np.floor(units_n * _exp_of_negative(-_LOG2 * (elapsed_n / self.half_life)))
        return units_n / _COUNT_UNITS


def sources_of(metadata: Iterable[str]) -> list[str]:
    """The columns that a predicate may use where a table keeps metadata of these names."""
    return [name for source in metadata for name in _SOURCES.get(source, ())]


def _power(base: float, exponents_n: NDArray[np.int64]) -> NDArray[np.float64]:
    """base**exponent by squaring, as the engine has it, to the bit."""
    found_n = np.ones(exponents_n.shape)
    rest_n = exponents_n.copy()
    while rest_n.any():
        found_n = np.where(rest_n & 1, found_n * base, found_n)
        base *= base
        rest_n >>= 1
    return found_n


def _exp_of_negative(x_n: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(x) for x <= 0, the same on all processors; 0 where a float could not hold it."""
    x_n = np.maximum(x_n, -104.0)
    total_n = np.ones_like(x_n)
    for n in range(14, 0, -1):
        total_n = 1.0 + total_n * (x_n / 256.0) / n
    for _ in range(8):
        total_n = total_n * total_n
    return np.where(x_n > -104.0, total_n, 0.0)


class Predicate:
    """A condition on what a rule of eviction keeps of a key.

    Comparisons (`<`, `<=`, `>`, `>=`, `==`, `!=`, also as `1 < age <= 5`) of a column with a
    number, joined by `and`, `or`, `not` and parentheses. Numbers may be sums, differences and
    products. Columns, of those that the table keeps:

    - `step`, the step that saw the key last, and `idle`, how many steps ago that was
    - `time`, the largest time that came with it
    - `count`, how often it was seen; with a half-life as of now
    - `score`, that the caller gave it, or that its shows and clicks make, as of now
    - `age`, how many steps ago it came
    - `norm`, that its row had at the latest look, or `place`, that a function gave it then;
      infinite before the first

    Comparisons of whole numbers are exact. Raises TypeError for what is no text, and ValueError,
    which says what cannot be read.

    >>> import numpy as np
    >>> from recsdk_core.predicates import Kept, Predicate
    >>> kept = Kept({"evict_step": np.array([4, 9])}, step=10)
    >>> Predicate("idle > 3 and not step == 7").matches(kept).tolist()
    [True, False]
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(
                f"a predicate must be a text such as 'idle > 100', got {type(text).__name__}"
            )
        self._text = text
        if len(text) > _MOST_CHARACTERS:
            raise self._wrong(f"has {len(text)} characters; {_MOST_CHARACTERS} are the most")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            why = error.msg if isinstance(error, SyntaxError) else str(error)
            raise self._wrong(f"cannot be read: {why}") from None
        found: set[str] = set()
        self._check(self._tree, found)
        self._columns = frozenset(found)

    @property
    def text(self) -> str:
        """As it was given."""
        return self._text

    @property
    def columns(self) -> frozenset[str]:
        """The columns that it names."""
        return self._columns

    def require(self, metadata: Iterable[str], of: str) -> None:
        """Raises ValueError unless the columns follow from metadata of these names.

        `of` names what keeps them in the message, such as "table 'user'".
        """
        kept = sources_of(metadata)
        missing = sorted(self._columns.difference(kept))
        if not missing:
            return
        has = f"it keeps {', '.join(kept)}" if kept else "it has no rule of eviction"
        raise self._wrong(
            f"names {missing[0]!r}, and {of} does not keep that: {has}. A table keeps "
            f"{missing[0]} {COLUMNS[missing[0]]}"
        )

    def matches(self, kept: Kept) -> NDArray[np.bool_]:
        """Of which keys it is true: bool (n,)."""
        return self._matches(self._tree, kept)

    def __repr__(self) -> str:
        return f"Predicate({self._text!r})"

    def _wrong(self, what: str) -> ValueError:
        shown = self._text if len(self._text) <= 100 else self._text[:100] + "..."
        return ValueError(f"predicate {shown!r}: {what}")

    def _part(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._text.strip(), node) or type(node).__name__

    def _check(self, node: ast.expr, found: set[str]) -> None:
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self._check(value, found)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand, found)
        elif isinstance(node, ast.Compare):
            self._check_comparison(node, found)
        else:
            raise self._wrong(
                f"{self._part(node)!r} is no comparison of a column with a number, such as "
                "'idle > 100'; join some by and, or, not"
            )

    def _check_comparison(self, node: ast.Compare, found: set[str]) -> None:
        sides = [node.left, *node.comparators]
        for left, right in itertools.pairwise(sides):
            if isinstance(left, ast.Name) == isinstance(right, ast.Name):
                raise self._wrong(f"{self._part(node)!r} must compare a column with a number")
        for operation in node.ops:
            if type(operation) not in _COMPARISONS:
                raise self._wrong(f"{self._part(node)!r} must compare by <, <=, >, >=, == or !=")
        for side in sides:
            if not isinstance(side, ast.Name):
                self._number(side)
            elif side.id in COLUMNS:
                found.add(side.id)
            else:
                raise self._wrong(
                    f"there is no column {side.id!r}; columns are {', '.join(COLUMNS)}"
                )

    def _number(self, node: ast.expr) -> int | float:
        """The value of constants; ValueError for anything else, and for what is not finite."""
        value: Any = None
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            value = node.value
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            operand = self._number(node.operand)
            value = -operand if isinstance(node.op, ast.USub) else operand
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            sides = self._number(node.left), self._number(node.right)
            try:
                value = _ARITHMETIC[type(node.op)](*sides)
            except OverflowError:
                value = math.inf
        if value is None:
            raise self._wrong(f"{self._part(node)!r} is no number")
        try:
            is_finite = math.isfinite(value)
        except OverflowError:
            is_finite = False
        if not is_finite:
            raise self._wrong(f"{self._part(node)!r} is too large for a number")
        found: int | float = value
        return found

    def _matches(self, node: ast.expr, kept: Kept) -> NDArray[np.bool_]:
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            found_n = self._matches(node.values[0], kept)
            for value in node.values[1:]:
                found_n = join(found_n, self._matches(value, kept))
            return found_n
        if isinstance(node, ast.UnaryOp):
            return np.logical_not(self._matches(node.operand, kept))
        assert isinstance(node, ast.Compare)
        parts = []
        sides = [node.left, *node.comparators]
        for left, operation, right in zip(sides, node.ops, sides[1:], strict=False):
            compare = _COMPARISONS[type(operation)]
            if isinstance(left, ast.Name):
                parts.append(_compare(kept.column(left.id), compare, self._number(right)))
            else:
                assert isinstance(right, ast.Name)
                turned = _TURNED.get(compare, compare)
                parts.append(_compare(kept.column(right.id), turned, self._number(left)))
        every_n: NDArray[np.bool_] = np.logical_and.reduce(parts)
        return every_n


def _compare(
    column_n: NDArray[Any], compare: Callable[[Any, Any], Any], number: int | float
) -> NDArray[np.bool_]:
    if column_n.dtype != np.int64:
        with np.errstate(over="ignore"):  # beyond float32 is infinite, and compares as it should
            found_n: NDArray[np.bool_] = compare(column_n, column_n.dtype.type(number))
        return found_n
    # Exact: with the whole number that is on the same side of all whole numbers.
    low, high = math.floor(number), math.ceil(number)
    bound = high if compare in (operator.lt, operator.ge) else low
    if low != high and compare in (operator.eq, operator.ne):
        return np.full(column_n.shape, compare is operator.ne)
    if not -_INT64 <= bound < _INT64:
        return np.full(column_n.shape, bool(compare(0, bound)))
    found_n = compare(column_n, np.int64(bound))
    return found_n
