"""Which columns of Parquet files a batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recsdk_pipeline._internal.checks import list_of, number_of

_LARGEST = 3.4028234663852886e38
"""Of float32."""


@dataclass(frozen=True, kw_only=True)
class IdColumn:
    """A feature, and the columns that its ids come from."""

    name: str
    """Of the feature in batches."""

    column: str | None = None
    """int or uint of up to 64 bits, strings or bytes, one or a list of them a row; a null is an
    empty bag. Default: `name`."""

    weight: str | None = None
    """A column of numbers, one beside each id. Default: none, which means 1."""

    timestamp: str | None = None
    """A column of integers, kept as they are, or of timestamps, which become microseconds since
    1970; one beside each id. Default: none."""

    space: str | None = None
    """Strings and bytes become `category_keys(space, ...)`; equal ones of one space get one id.
    Default: `name`."""


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """All columns in use."""

    ids: tuple[IdColumn, ...]
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    missing: float | None
    """What a null in a dense column reads as; None: it is malformed."""

    @classmethod
    def of(
        cls,
        ids: Sequence[str | IdColumn],
        dense: Sequence[str],
        labels: str | Sequence[str],
        missing: float | None,
    ) -> Mapping:
        """What the arguments of `ParquetData` mean; ValueError for features of one name."""
        features = [
            IdColumn(name=each) if isinstance(each, str) else each for each in list_of("ids", ids)
        ]
        for each in features:
            if not isinstance(each, IdColumn):
                raise TypeError(f"ids must be names of columns or IdColumn(...), got {each!r}")
            for field, text in vars(each).items():
                if not isinstance(text, str) and (field == "name" or text is not None):
                    raise TypeError(f"ids: {field} must be a string, got {each!r}")
        number = None if missing is None else _missing_of(missing)
        names = [each.name for each in features]
        if len(set(names)) < len(names) or not all(names):
            raise ValueError(f"ids must have a name each of its own, got {names}")
        named = (labels,) if isinstance(labels, str) else _columns("labels", labels)
        if not named:
            raise ValueError("labels must be at least one column, got none")
        filled = tuple(replace(each, column=each.column or each.name) for each in features)
        return cls(ids=filled, dense=_columns("dense", dense), labels=named, missing=number)

    def columns(self) -> list[str]:
        """All columns, each once."""
        found = [*self.labels, *self.dense]
        for each in self.ids:
            found += filter(None, (each.column, each.weight, each.timestamp))
        return list(dict.fromkeys(found))


def _columns(name: str, given: Any) -> tuple[str, ...]:
    """Names of columns; TypeError, which names the argument, for what is none."""
    found = list_of(name, given)
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"{name} must be names of columns, got {each!r}")
    return tuple(found)


def _missing_of(missing: Any) -> float:
    number = number_of("missing_dense", missing)
    if not abs(number) <= _LARGEST:
        raise ValueError(f"missing_dense must be finite in single precision, got {number}")
    return number
