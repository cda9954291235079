"""The command line of `recsdk top`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from urllib.error import URLError

import click
from rich.console import Console
from rich.live import Live

from recsdk_core.cli import checking_arguments
from recsdk_pipeline._internal.screen import screen
from recsdk_pipeline.top_command.sources import Sample, Source, source_of
from recsdk_pipeline.top_command.view import Span, view

__all__ = ["Watch", "top"]


class Watch:
    """Reads sources again and again, and keeps the last two reports of each."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._samples: dict[str, list[Sample]] = {source.name: [] for source in sources}
        self.problems: dict[str, str] = {}
        """By source, why it could not be read last."""

    def read(self) -> list[Span]:
        """What the sources have told so far."""
        self.problems = {}
        for source in self._sources:
            try:
                self._take(source.name, source.read())
            except (OSError, ValueError) as error:
                self.problems[source.name] = _reason_of(error)
            if not self._samples[source.name] and source.name not in self.problems:
                self.problems[source.name] = "no report yet"
        return [
            Span(before=kept[0] if len(kept) > 1 else None, now=kept[-1])
            for kept in self._samples.values()
            if kept
        ]

    def _take(self, name: str, samples: Sequence[Sample]) -> None:
        kept = self._samples[name]
        for sample in samples:
            if kept and sample.is_of_another_run(kept[-1]):
                kept.clear()
            if not kept or sample.time > kept[-1].time:
                kept.append(sample)
            del kept[:-2]


def _reason_of(error: Exception) -> str:
    if isinstance(error, URLError) and isinstance(error.reason, OSError):
        reason = error.reason.strerror or error.reason
        return f"no answer: {reason}; is it where the training shows its telemetry?"
    return (isinstance(error, OSError) and error.strerror) or str(error)


@click.command()
@click.argument("sources", nargs=-1, required=True)
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between looks.",
)
@click.option("--once", is_flag=True, help="Show what there is and end.")
def top(sources: tuple[str, ...], every: float, once: bool) -> None:
    """Show a running training: rates, tables, ranks, times.

    SOURCES are where its telemetry goes: a port of Prometheus' sink (9400, host:9400 or a URL), or
    a file of JSON lines. If each rank reports its own, pass all of them. Ctrl-C
    ends it.
    """
    try:
        with checking_arguments():
            found = [source_of(text) for text in sources]
    except ImportError as error:
        raise click.ClickException(
            'ports need prometheus-client; run pip install "recsdk-pipeline[prometheus]", or pass '
            "a file of JSON lines"
        ) from error
    watch = Watch(found)
    if once:
        _show_once(watch)
    else:
        _follow(watch, lambda: time.sleep(every))


def _show_once(watch: Watch) -> None:
    spans = watch.read()
    screen().print(view(spans, watch.problems))
    if watch.problems:
        raise SystemExit(1)


def _follow(watch: Watch, wait: Callable[[], None]) -> None:
    told: dict[str, str] = {}
    with Live(console=Console(highlight=False), screen=False, auto_refresh=False) as live:
        try:
            while True:
                live.update(view(watch.read(), watch.problems), refresh=True)
                if not live.console.is_terminal:  # which sees nothing until the end
                    for name, problem in watch.problems.items() - told.items():
                        click.echo(f"{name}: {problem}", err=True)
                    told = watch.problems
                wait()
        except KeyboardInterrupt:
            pass
