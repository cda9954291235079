"""Of which keys a predicate is true, one key at a time, in plain Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recsdk_core.eviction import Evict
from recsdk_core.testing._eviction import KeyMeta, decayed, decayed_score

__all__ = ["columns_of", "is_true"]

_OPERATIONS: dict[type, Any] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_SINGLES = ("score", "norm", "place")
"""Columns of single precision, but for scores of shows and clicks."""


def columns_of(meta: KeyMeta, rule: Evict, step: int) -> dict[str, int | float]:
    """The columns of a key at a step, of those that the rule keeps."""
    columns: dict[str, int | float] = {"step": meta.step, "idle": _elapsed(meta.step, step)}
    if rule.by == "time":
        columns["time"] = meta.time
    if rule.order == "lfu" or rule.rare_count is not None or "count" in rule.columns:
        columns["count"] = decayed(meta, rule, step) / 2**16
    if rule.order == "score" or "score" in rule.columns:
        columns["score"] = meta.score or 0.0
    if rule.takes_clicks:
        columns["score"] = decayed_score(meta, rule, step) / 2**16
    if rule.order in ("low_norm", "function"):
        columns["norm" if rule.order == "low_norm" else "place"] = meta.measured
    if rule.min_age > 0:
        columns["age"] = _elapsed(meta.born, step)
    return columns


def _elapsed(since: int, step: int) -> int:
    return min(max(step - since, 0), 2**63 - 1)


def is_true(text: str, columns: Mapping[str, int | float], rule: Evict) -> bool:
    """Whether a predicate is true of a key; KeyError for a column that there is not."""
    singles = () if rule.takes_clicks else _SINGLES
    return _is_true(ast.parse(text, mode="eval").body, columns, singles)


def _is_true(node: Any, columns: Mapping[str, int | float], singles: Sequence[str]) -> bool:
    if isinstance(node, ast.BoolOp):
        join = all if isinstance(node.op, ast.And) else any
        return join([_is_true(value, columns, singles) for value in node.values])
    if isinstance(node, ast.UnaryOp):
        return not _is_true(node.operand, columns, singles)
    sides = [node.left, *node.comparators]
    is_single = any(getattr(side, "id", "") in singles for side in sides)
    values = [_value(side, columns, is_single) for side in sides]
    return all(
        _OPERATIONS[type(operation)](left, right)
        for left, operation, right in zip(values, node.ops, values[1:], strict=False)
    )


def _value(node: Any, columns: Mapping[str, int | float], is_single: bool) -> int | float:
    if isinstance(node, ast.Name):
        return columns[node.id]
    value = _number(node)
    return float(np.float32(value)) if is_single else value


def _number(node: Any) -> int | float:
    if isinstance(node, ast.Constant):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp):
        value = -_number(node.operand) if isinstance(node.op, ast.USub) else _number(node.operand)
    else:
        value = _OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    found: int | float = value
    return found
