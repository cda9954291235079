"""Reports for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from recsdk_pipeline._internal.checks import int_within
from recsdk_pipeline.telemetry.metrics import Report, metric_of
from recsdk_pipeline.telemetry.sink import check_report, needing, rank_of

__all__ = ["Prometheus"]

_SECONDS_TO_PUSH = 10


class Prometheus:
    """Shows the last report on a port for Prometheus to scrape, or pushes it to a gateway.

    With ranks="each", rank r listens on `port + r`, and its numbers have the label `rank`. A thread
    of its own pushes; while it pushes one report, later ones replace one another. The next call
    raises what went wrong. Needs prometheus-client, or raises ImportError.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        address: str | None = None,
        push: str | None = None,
        job: str | None = None,
    ) -> None:
        """Pass either `port` (0: any free one) or `push`, the gateway's `host:port`.

        `address`, with `port`: where to listen, by default "127.0.0.1"; "0.0.0.0" is all
        addresses of this machine. `job`, with `push`: the job's name, by default "recsdk".
        """
        _check(port, address, push, job)
        number = None if port is None else int_within("port", port, 0, 1 << 16)
        try:
            import prometheus_client.core
        except ImportError as error:
            raise needing("Prometheus", "prometheus-client", "prometheus") from error
        self._client: Any = prometheus_client
        self.port = number
        """Where it listens; once it is open, never 0."""
        self._address, self._gateway = address or "127.0.0.1", push
        self._job = job or "recsdk"
        self._report: Report | None = None
        self._registry = prometheus_client.CollectorRegistry()
        self._server: Any = None
        self._grouping: dict[str, str] = {}
        self._pushing: Future[None] | None = None
        self._is_pushed = True  # or about to be
        self._thread: ThreadPoolExecutor | None = None

    def open(self, rank: int | None) -> None:
        """Starts listening. Raises OSError if the port is taken."""
        number = rank_of(rank)
        self._registry.register(self)  # calls `collect`
        if self.port is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="recsdk-telemetry-push")
            self._grouping = {} if number is None else {"rank": str(number)}
            return
        port = self.port + (number or 0) if self.port else 0
        try:
            self._server, _ = self._client.start_http_server(port, self._address, self._registry)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on {self._address}:{port} for Prometheus: {error}"
            ) from error
        self.port = self._server.server_port

    def write(self, report: Report) -> None:
        """Shows the report from now on."""
        is_open = self._server is not None or self._thread is not None
        check_report("Prometheus", report, is_open=is_open)
        self._report = report
        if self._thread is None:
            return
        self._is_pushed = self._pushing is None or self._pushing.done()
        if self._is_pushed:
            pushed, self._pushing = self._pushing, self._thread.submit(self._push)
            if pushed is not None:
                pushed.result()

    def collect(self) -> Iterator[Any]:
        """The last report, in the words of prometheus_client, which calls it."""
        report = self._report
        if report is None:
            return
        core = self._client.core
        kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
        is_of_rank = report.rank is not None and self._server is not None
        more = (str(report.rank),) if is_of_rank else ()
        for name, values in report.values.items():
            metric = metric_of(name)
            labels = (*metric.labels, *(("rank",) if is_of_rank else ()))
            family = kinds[metric.kind](name, metric.text, labels=labels)
            for own, number in values.items():
                family.add_metric((*own, *more), number)
            yield family

    def close(self) -> None:
        """Stops listening; waits until the last report is pushed."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            if not self._is_pushed:
                self._pushing = self._thread.submit(self._push)
            self._thread.shutdown()
            if self._pushing is not None:
                self._pushing.result()

    def _push(self) -> None:
        self._client.push_to_gateway(
            self._gateway,
            job=self._job,
            registry=self._registry,
            grouping_key=self._grouping,
            timeout=_SECONDS_TO_PUSH,
        )


def _check(port: Any, address: Any, push: Any, job: Any) -> None:
    if (port is None) == (push is None):
        raise ValueError(f"pass either port or push, got port={port!r} and push={push!r}")
    for name, text, example in (
        ("push", push, "gateway:9091"),
        ("job", job, "clicks"),
        ("address", address, "0.0.0.0"),
    ):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} must be a string such as {example!r}, got {text!r}")
        if text is not None and not text.strip():
            raise ValueError(f"{name} must be one such as {example!r}, or left out, got {text!r}")
    if port is not None and job is not None:
        raise ValueError(
            f"job={job!r} is for push, and whoever scrapes a port names it; leave it out"
        )
    if push is not None and address is not None:
        raise ValueError(f"address={address!r} is for port, and push listens nowhere; leave it out")
