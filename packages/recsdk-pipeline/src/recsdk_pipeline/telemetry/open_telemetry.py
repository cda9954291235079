"""Reports as metrics of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from recsdk_pipeline.telemetry.metrics import METRICS, Metric, Report, metric_of
from recsdk_pipeline.telemetry.sink import check_report, needing, rank_of

__all__ = ["OpenTelemetry"]


class OpenTelemetry:
    """Gives the last report to OpenTelemetry, whenever its reader asks.

    The names are Prometheus', with a dot after `recsdk` and without `_total`: `recsdk.table_rows`.
    Labels are attributes; with ranks="each" there is `rank` too. Set up OpenTelemetry's SDK and an
    exporter as for any program. Needs opentelemetry-api, or raises ImportError.
    """

    def __init__(self, meter: Any | None = None) -> None:
        """`meter`: of OpenTelemetry; None: that of the global provider, named `recsdk`."""
        try:
            from opentelemetry import metrics
        except ImportError as error:
            raise needing("OpenTelemetry", "opentelemetry-api", "opentelemetry") from error
        self._observation: Any = metrics.Observation
        self._meter: Any = metrics.get_meter("recsdk") if meter is None else meter
        self._report: Report | None = None
        self._known: set[str] = set()

    def open(self, rank: int | None) -> None:
        """Makes the instruments."""
        rank_of(rank)
        for metric in METRICS.values():
            self._know(metric)

    def write(self, report: Report) -> None:
        """Tells the report from now on."""
        check_report("OpenTelemetry", report, is_open=bool(self._known))
        for name in report.values:
            self._know(metric_of(name))
        self._report = report

    def close(self) -> None:
        """Tells nothing from now on."""
        self._report = None

    def _know(self, metric: Metric) -> None:
        if metric.name in self._known:
            return
        self._known.add(metric.name)
        name = metric.name.replace("recsdk_", "recsdk.", 1).removesuffix("_total")
        make = {
            "counter": self._meter.create_observable_counter,
            "gauge": self._meter.create_observable_gauge,
        }[metric.kind]
        make(name, callbacks=[self._teller(metric)], unit=metric.unit, description=metric.text)

    def _teller(self, metric: Metric) -> Callable[[Any], Iterable[Any]]:
        def tell(_: Any) -> Iterable[Any]:
            report = self._report
            if report is None:
                return
            more = {} if report.rank is None else {"rank": report.rank}
            for labels, number in report.values.get(metric.name, {}).items():
                attributes = dict(zip(metric.labels, labels, strict=True))
                yield self._observation(number, {**attributes, **more})

        return tell
