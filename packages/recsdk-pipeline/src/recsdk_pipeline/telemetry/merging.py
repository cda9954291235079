"""One report of what all ranks know."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from recsdk_pipeline.telemetry.metrics import Labels, Metric, Values, metric_of

__all__ = ["merged", "skew"]

_OVER_RANKS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": lambda numbers: sum(numbers) / len(numbers),
    "largest": max,
    "same": lambda numbers: numbers[0],
}


def merged(ranks: Sequence[Values], replicated: Collection[str]) -> Values:
    """The numbers of all ranks as one, each as its metric says.

    Of `replicated` tables every rank has a copy: their memory adds up, all else counts once.
    """
    found: Values = {}
    names = dict.fromkeys(name for values in ranks for name in values)
    for name in names:
        metric = metric_of(name)
        of_ranks = [values.get(name, {}) for values in ranks]
        for labels in dict.fromkeys(each for values in of_ranks for each in values):
            numbers = [values[labels] for values in of_ranks if labels in values]
            way = "largest" if _is_copy(metric, labels, replicated) else metric.over_ranks
            found.setdefault(name, {})[labels] = _OVER_RANKS[way](numbers)
    return found


def _is_copy(metric: Metric, labels: Labels, replicated: Collection[str]) -> bool:
    is_of_table = metric.labels[:1] == ("table",) and labels[0] in replicated
    return is_of_table and metric.unit != "By"


def skew(numbers: Sequence[float]) -> float:
    """The largest over the mean; 1 if all are 0."""
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0
