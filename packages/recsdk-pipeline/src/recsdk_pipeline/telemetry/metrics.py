"""What is told: the names are stable, as docs/reference/telemetry.md has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["METRICS", "Labels", "Metric", "Report", "Values", "metric_of"]

Labels: TypeAlias = tuple[str, ...]
"""The values of a metric's labels, in their order."""
Values: TypeAlias = dict[str, dict[Labels, float]]
"""Numbers by the metric's name and labels."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What one number of a report is."""

    name: str
    """As Prometheus has it; a counter's ends in `_total`."""
    kind: Literal["gauge", "counter"]
    """A counter grows from 0 while the process lives."""
    unit: str
    """In UCUM's writing: `s`, `By`, `{row}`, or `1` for a ratio."""
    labels: tuple[str, ...] = ()
    """The names of its labels."""
    over_ranks: Literal["sum", "mean", "largest", "same"] = "sum"
    """How one number is made of those of all ranks; `same`: all have it already."""
    text: str
    """What it is."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The numbers of one moment, as a sink gets them."""

    time: float
    """Seconds since 1970."""
    step: int
    """Batches trained."""
    rank: int | None
    """Whose numbers these are; None: those of all ranks, as one."""
    num_ranks: int
    """Ranks that train."""
    values: Mapping[str, Mapping[Labels, float]]
    """Numbers by the metric's name and labels; `metric_of` tells the metric."""


def _gauge(name: str, unit: str, text: str, *labels: str, over: str = "sum") -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, labels=labels, over_ranks=over, text=text)  # type: ignore[arg-type]


def _counter(name: str, unit: str, text: str, *labels: str, over: str = "sum") -> Metric:
    name = f"{name}_total"
    return Metric(name=name, kind="counter", unit=unit, labels=labels, over_ranks=over, text=text)  # type: ignore[arg-type]


_ALL = (
    _gauge(
        "recsdk_report_timestamp_seconds",
        "s",
        "When the report was made, since 1970.",
        over="largest",
    ),
    _counter("recsdk_steps", "{step}", "Batches trained.", over="same"),
    _counter("recsdk_examples", "{example}", "Examples trained; with `predictions` only."),
    _counter(
        "recsdk_step_seconds",
        "s",
        "Time of the training thread by part: reading, start, waiting, forward, backward, update, "
        "telemetry, and elsewhere, which is what lies between.",
        "part",
        over="mean",
    ),
    _counter(
        "recsdk_host_seconds",
        "s",
        "Time of the host jobs beside the training, by part: prepare, exchange, mapping.",
        "part",
        over="mean",
    ),
    _counter(
        "recsdk_sent_bytes",
        "By",
        "Bytes sent to other ranks, by the table's sharding and by kind: ids, vectors, gradients.",
        "sharding",
        "kind",
    ),
    _gauge("recsdk_table_rows", "{row}", "Keys that have a row.", "table"),
    _gauge("recsdk_table_rows_in_flight", "{row}", "Keys made by batches under way.", "table"),
    _gauge(
        "recsdk_table_rows_held_back",
        "{row}",
        "Of these, keys of batches that have ended, but wait for one of an earlier step: saves "
        "lack them.",
        "table",
    ),
    _gauge(
        "recsdk_table_growth_rows_per_second",
        "{row}/s",
        "Growth of the rows since the report before.",
        "table",
    ),
    _gauge(
        "recsdk_table_leaving_rows_per_second",
        "{row}/s",
        "Rows that left since the report before, by any cause; as many as came, less growth.",
        "table",
    ),
    _gauge(
        "recsdk_table_bytes",
        "By",
        "Memory by part: row, index, metadata, tracking.",
        "table",
        "part",
    ),
    _counter(
        "recsdk_table_keys",
        "{key}",
        "Keys mapped, by outcome: found, inserted, refused, missing, overflowed, not_admitted.",
        "table",
        "outcome",
    ),
    _counter("recsdk_table_erased", "{row}", "Rows taken out by erase and clear.", "table"),
    _counter(
        "recsdk_table_evicted",
        "{row}",
        "Rows whose key left by the table's rule, by cause: full, for other keys; asked, by evict; "
        "expired.",
        "table",
        "cause",
    ),
    _counter(
        "recsdk_table_returned",
        "{row}",
        "Rows given to keys that had left shortly before: churn, where the table's rule counts it.",
        "table",
    ),
    _counter("recsdk_table_updates", "{update}", "Optimizer updates.", "table", over="largest"),
    _counter("recsdk_table_nonfinite", "{row}", "Rows whose gradient was not finite.", "table"),
    _gauge(
        "recsdk_rank_skew",
        "1",
        "The largest over the mean of all ranks, of: rows, and ids mapped since the report before.",
        "of",
        over="same",
    ),
    _gauge("recsdk_loss", "1", "Mean loss since the report before.", over="same"),
    _gauge("recsdk_auc", "1", "AUC since the report before; with `predictions` only.", over="same"),
    _gauge(
        "recsdk_calibration",
        "1",
        "Sum of predictions over sum of labels since the report before; with `predictions` only.",
        over="same",
    ),
    _counter(
        "recsdk_bad_predictions",
        "{example}",
        "Predictions outside of 0 to 1 or not finite; they are left out of AUC and calibration.",
        over="same",
    ),
    _gauge(
        "recsdk_save_age_seconds",
        "s",
        "Time since a checkpoint was saved or loaded, as reports noticed it; else since the start.",
        over="largest",
    ),
    _counter("recsdk_save_copied_bytes", "By", "Rows copied as they changed in a save.", "table"),
    _counter("recsdk_save_waits", "{wait}", "Updates that waited for a save.", "table"),
    _counter("recsdk_save_wait_seconds", "s", "Time of these waits.", "table", over="mean"),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
"""All metrics by name, but for counts that tables keep by further causes: see `metric_of`."""


def metric_of(name: str) -> Metric:
    """The metric of a name. One that `METRICS` lacks is `recsdk_table_<count>_total` by cause."""
    if name in METRICS:
        return METRICS[name]
    count = name.removeprefix("recsdk_table_").removesuffix("_total").replace("_", " ")
    return _counter(name.removesuffix("_total"), "1", f"Of tables: {count}.", "table", "cause")
