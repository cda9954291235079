"""What Parquet files hold, column by column, in one pass and bounded memory.

Shapes: N rows, K ids of one column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recsdk_core.simulation import DESCRIPTION_FORMAT
from recsdk_pipeline._internal.parquet_types import holds_bags, holds_ids, holds_times
from recsdk_pipeline.data.dealing import Piece
from recsdk_pipeline.data.parquet_columns import IdColumn, Mapping
from recsdk_pipeline.data.parquet_files import Reader, find_files
from recsdk_pipeline.data.parquet_rows import bags_of, problems_of, times_of
from recsdk_pipeline.data_command.id_sketch import IdSketch, ZipfFit, fit_zipf

_LONGEST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class BagLengths:
    """How many ids a row has; a null is an empty bag."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of a time of each different id."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Ages:
    """How old the different ids are at the latest time of all rows."""

    unit: str
    """"s"; of a column of integers "1", what they count."""
    age: Percentiles
    """Since an id came first."""
    idle: Percentiles
    """Since it came last: at most that for which a row must be kept to be there still."""


@dataclass(frozen=True, kw_only=True)
class Ids:
    """The ids of a column."""

    num_ids: int
    num_distinct: int
    standard_error: float
    """Of `num_distinct`, relative; 0: it is exact."""
    zipf: ZipfFit | None
    """None: too few ids come often enough for a fit."""
    bag_lengths: BagLengths | None
    """None: no lists."""
    ages: Ages | None
    """None: no column of times was named, or the column has no id."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column."""

    name: str
    type: str
    """As Arrow writes it."""
    nulls: int
    """Rows without a value."""
    malformed: int
    """Rows whose bag has a null; what else they hold is not counted."""
    ids: Ids | None
    """None: the column can be no ids."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What `recsdk data describe` found."""

    source: str
    rows: int
    row_groups: int
    time: str | None
    """The column of times, which is not among the others."""
    columns: list[Column]
    curves: dict[str, tuple[Any, int]]
    """By column of ids: how often each sampled id came, the largest first, and for how many
    different ids each stands."""

    def as_json(self) -> dict[str, Any]:
        """What is written as JSON."""
        columns = [asdict(each) for each in self.columns]
        return {
            "format": DESCRIPTION_FORMAT,
            "source": self.source,
            "rows": self.rows,
            "row_groups": self.row_groups,
            "time": self.time,
            "columns": columns,
        }


def describe_files(
    source: str, progress: Callable[[int, int], None], time: str | None = None
) -> Description:
    """Read all of `source` once; `progress` hears of rows read and of all rows.

    `time` names a column of integers or timestamps, when each row was. Memory: 5 MiB a column of
    ids, 6 with times, half a MiB more for one of bags, 32 or 40 MiB at work on one, and what Arrow
    decodes at a time. Raises FileNotFoundError, OSError or ValueError for what cannot be read,
    TypeError for a column of times of another type; a row without a time is a ValueError.
    """
    names = list(dict.fromkeys(find_files(source, (), None, {}).schema.names))
    files = find_files(source, names, None, {})
    clock = None if time is None else _Clock(files.schema, time, source)
    seen = [_Seen(field) for field in files.schema if field.name != time]
    reader = Reader(files, names, None, {}, threads=True)
    rows, total = 0, sum(group.rows for group in files.groups)
    for number, group in enumerate(files.groups):
        for _, batch in reader.read(Piece(number, 0, group.rows)):
            times = None if clock is None else clock.times(batch)
            for each in seen:
                each.add(batch, times)
            rows += len(batch)
            progress(rows, total)
    return Description(
        source=source,
        rows=rows,
        row_groups=len(files.groups),
        time=time,
        columns=[each.column(clock) for each in seen],
        curves={each.name: each.curve() for each in seen if each.has_ids},
    )


class _Clock:
    """The times of rows."""

    def __init__(self, schema: Any, name: str, source: str) -> None:
        if name not in schema.names:
            raise ValueError(
                f"{source}: there is no column {name!r}; there are {', '.join(schema.names)}"
            )
        kind = schema.field(name).type
        if not holds_times(kind):
            raise TypeError(
                f"{source}: column {name!r} must hold integers or timestamps, got {kind}"
            )
        self._name, self._source = name, source
        self.latest = np.iinfo(np.int64).min
        self.unit, self.scale = ("s", 1e-6) if pa.types.is_timestamp(kind) else ("1", 1.0)

    def times(self, batch: Any) -> Any:
        """Of each row (N,)."""
        column = batch.column(self._name)
        if column.null_count:
            raise ValueError(
                f"{self._source}: column {self._name!r} has a row without a time; leave such rows "
                "out"
            )
        times = times_of(column)
        self.latest = max(self.latest, int(times.max(initial=self.latest)))
        return times


class _Seen:
    """What was seen of a column."""

    def __init__(self, field: Any) -> None:
        self.name, self._type = field.name, field.type
        self.has_ids, self._has_bags = holds_ids(field.type), holds_bags(field.type)
        self._ids_of = IdColumn(name=self.name, column=self.name)
        self._mapping = Mapping(ids=(self._ids_of,), dense=(), labels=(), missing=None)
        self._nulls = self._malformed = self._num_ids = self._longest = 0
        self._sketch = IdSketch()
        # Bags by length; the last are those of _LONGEST or more.
        self._bags = np.zeros(_LONGEST + 1 if self._has_bags else 0, np.int64)

    def add(self, batch: Any, times: Any | None) -> None:
        self._nulls += batch.column(self.name).null_count
        if not self.has_ids:
            return
        wrong = [row for row, _, _ in problems_of(batch, self._mapping)]
        if wrong:
            self._malformed += len(wrong)
            right = np.delete(np.arange(len(batch)), wrong)
            batch = batch.take(pa.array(right))
            times = None if times is None else times[right]
        bags = bags_of(batch, self._ids_of).plain()
        lengths = bags.lengths(len(batch))
        self._num_ids += len(bags.values)
        self._sketch.add(bags.values, None if times is None else np.repeat(times, lengths))
        if self._has_bags and len(batch):
            self._longest = max(self._longest, int(lengths.max()))
            self._bags += np.bincount(np.minimum(lengths, _LONGEST), minlength=_LONGEST + 1)

    def column(self, clock: _Clock | None) -> Column:
        return Column(
            name=self.name,
            type=str(self._type),
            nulls=self._nulls,
            malformed=self._malformed,
            ids=self._ids(clock) if self.has_ids else None,
        )

    def curve(self) -> tuple[Any, int]:
        return self._sketch.counts(), self._sketch.ids_a_sample

    def _ids(self, clock: _Clock | None) -> Ids:
        return Ids(
            num_ids=self._num_ids,
            num_distinct=self._sketch.num_distinct,
            standard_error=self._sketch.standard_error,
            zipf=fit_zipf(self._sketch.counts()),
            bag_lengths=self._lengths() if self._has_bags and self._bags.any() else None,
            ages=None if clock is None else self._ages(clock),
        )

    def _ages(self, clock: _Clock) -> Ages | None:
        times = self._sketch.times()
        if times is None or not len(times[0]):
            return None
        # The difference of two int64 is a uint64.
        ages = ((clock.latest - each).view(np.uint64) * clock.scale for each in times)
        age, idle = (_percentiles(each) for each in ages)
        return Ages(unit=clock.unit, age=age, idle=idle)

    def _lengths(self) -> BagLengths:
        up_to = np.cumsum(self._bags)
        num = int(up_to[-1])

        def percentile(percent: int) -> int:
            found = int(np.searchsorted(up_to, -(-num * percent // 100)))
            return found if found < _LONGEST else self._longest

        return BagLengths(
            mean=self._num_ids / num,
            p50=percentile(50),
            p90=percentile(90),
            p99=percentile(99),
            max=self._longest,
        )


def _percentiles(times: Any) -> Percentiles:
    p50, p90, p99 = np.percentile(times, [50, 90, 99], method="inverted_cdf").tolist()
    return Percentiles(p50=p50, p90=p90, p99=p99)
