"""Tells what a training does, every so many steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from recsdk_core.agreement import attempt, raise_together, text_of
from recsdk_pipeline._internal.checks import int_within
from recsdk_pipeline.hybrid_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.telemetry.collecting import Collector, replicated_tables
from recsdk_pipeline.telemetry.merging import merged, skew
from recsdk_pipeline.telemetry.metrics import Report, Values
from recsdk_pipeline.telemetry.sink import Sink
from recsdk_pipeline.telemetry.window import NUM_SUMS, Figures, Predictions, Window
from recsdk_sharding import PeerError, failing_together
from recsdk_sharding.exchange import HostExchange, exchanges_of
from recsdk_sharding.exchange.calls import Call, calling
from recsdk_sharding.exchange.groups import group_beside, ranks_of

__all__ = ["Telemetry"]


class Telemetry:
    """Tells sinks what a training does, every `every` steps of its pipeline, until `close`.

    Tables (rows, memory, keys by outcome), where the time of a step goes, bytes sent, how evenly
    ranks are used, loss, saves: docs/reference/telemetry.md lists all names. `predictions` takes
    the model's output and returns its probabilities (B,), 0 to 1, and labels (B,), 0 or 1; with it
    there are AUC and calibration too.

    With ranks="together" (the default) the first rank reports all ranks as one. With "each" every
    rank reports its own numbers; those of the window and the skew are of all ranks either way. All
    ranks must make it, with the same arguments, between the same steps. A report is one exchange
    between the ranks of the hash tables, over a group of its own; a model without sharded hash
    tables has none, and each rank is the first. If making it, a sink of it or a report fails on one
    rank, all raise: the others PeerError.

    Not thread-safe. Raises TypeError or ValueError for other arguments. Also a context manager::

        with Telemetry(model, pipeline, every=100, to=[Prometheus(port=9400)]):
            train(pipeline)
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: HybridTrainPipelineSparseDist[Any, Any],
        every: int = 100,
        to: Sequence[Sink] = (),
        *,
        ranks: Literal["together", "each"] = "together",
        predictions: Predictions | None = None,
    ) -> None:
        self._opened: list[Sink] = []
        exchange = _exchange_of(model, pipeline)

        def check() -> dict[str, Any]:
            _check(model, pipeline, to, ranks, predictions)
            steps = int_within("every", every, 1)
            return {"every": steps, "ranks": ranks, "predictions": predictions is not None}

        try:
            if exchange is None:
                check()
                self._start(model, pipeline, to, _Peers(None), every, ranks, predictions)
            else:
                with calling("Telemetry", exchange) as call:
                    call.begin(check)
                    peers = _Peers(exchange, call)
                    self._start(model, pipeline, to, peers, every, ranks, predictions)
        except BaseException:
            for sink in self._opened:
                _does(sink, sink.close)
            raise
        pipeline._watchers.append(self._watch)

    def _start(
        self,
        model: nn.Module,
        pipeline: HybridTrainPipelineSparseDist[Any, Any],
        to: Sequence[Sink],
        peers: _Peers,
        every: int,
        ranks: str,
        predictions: Predictions | None,
    ) -> None:
        """Does what may fail on one rank."""
        self._pipeline = pipeline
        self._every = int_within("every", every, 1)
        self._is_each = ranks == "each"
        self._peers = peers
        self._replicated = replicated_tables(model)
        self._window = Window(predictions)
        self._collector = Collector(model, pipeline._parts[True])
        self._has_predictions = predictions is not None
        self._num_examples = self._num_bad = self._num_ids = 0.0
        self._is_closed = False
        self._sinks = list(to) if self._is_each or peers.rank == 0 else []
        for sink in self._sinks:
            sink.open(peers.rank if self._is_each else None)
            self._opened.append(sink)

    def report(self) -> None:
        """Reports now; all ranks must call it between the same steps.

        Raises RuntimeError after `close`; if only some ranks are closed, PeerError on the others.
        """
        with self._peers.guard():
            self._report()

    def _own(self) -> tuple[torch.Tensor, Values]:
        """What this rank has to report."""
        if self._is_closed:
            raise RuntimeError("this telemetry is closed; make another one")
        values = self._collector.values()
        return self._window.sums(), values

    def _report(self) -> None:
        made, error = attempt(self._own)
        sums, values = made or (torch.zeros(NUM_SUMS, dtype=torch.float64), {})
        figures = Figures(self._peers.added(sums, error))
        own = Figures(sums)
        self._window.start_anew()
        self._num_examples += own.num_examples
        self._num_bad += figures.num_bad
        values["recsdk_steps_total"] = {(): self._pipeline.num_batches_trained}
        if self._has_predictions:
            values["recsdk_examples_total"] = {(): self._num_examples}
            values["recsdk_bad_predictions_total"] = {(): self._num_bad}
        of_ranks = self._peers.gathered((values, self._ids_since(values)))
        for name in ("loss", "auc", "calibration"):
            figure = getattr(figures, name)
            if figure is not None:
                values[f"recsdk_{name}"] = {(): figure}
        told = values if self._is_each else merged([each for each, _ in of_ranks], self._replicated)
        for name in ("recsdk_loss", "recsdk_auc", "recsdk_calibration"):
            told.update({name: values[name]} if name in values else {})
        told["recsdk_rank_skew"] = {
            ("ids",): skew([ids for _, ids in of_ranks]),
            ("rows",): skew([_num_rows(each) for each, _ in of_ranks]),
        }
        self._write(told)

    def close(self) -> None:
        """Reports no more, and closes the sinks; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pipeline._watchers.remove(self._watch)
        for sink in self._opened:
            _does(sink, sink.close)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self, losses: torch.Tensor, output: Any) -> None:
        self._window.add(losses, output)
        if self._pipeline.num_batches_trained % self._every == 0:
            self._report()

    def _write(self, values: Values) -> None:
        now = time.time()
        values["recsdk_report_timestamp_seconds"] = {(): now}
        report = Report(
            time=now,
            step=self._pipeline.num_batches_trained,
            rank=self._peers.rank if self._is_each else None,
            num_ranks=self._peers.size,
            values=values,
        )
        self._sinks = [sink for sink in self._sinks if _does(sink, partial(sink.write, report))]

    def _ids_since(self, values: Values) -> float:
        """Keys that this rank has mapped since it was asked before."""
        keys = sum(values.get("recsdk_table_keys_total", {}).values())
        since, self._num_ids = keys - self._num_ids, keys
        return since


class _Peers:
    """The ranks of a model's hash tables, over a group of their own."""

    def __init__(self, exchange: HostExchange | None, call: Call | None = None) -> None:
        """`exchange`: of their tables; None: this rank is alone. `call`: in which they all are."""
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if exchange is not None and call is not None:
            call.meet()  # who makes a group waits for all its ranks, whatever these have met with
            self._group = group_beside(exchange.group)
            self.rank, self.size = exchange.rank, exchange.world_size

    def guard(self) -> Any:
        """Inside, ranks fail together."""
        return nullcontext() if self._group is None else failing_together(self._group)

    def added(self, numbers: torch.Tensor, error: BaseException | None) -> torch.Tensor:
        """The sums over all ranks; raises on every rank if one comes with an error."""
        total = torch.cat([numbers, torch.tensor([float(error is not None)]).double()])
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        if total[-1]:
            texts = self.gathered(None if error is None else text_of(error))
            raise_together(error, texts, PeerError, ranks_of(self._group))
        return total[:-1]

    def gathered(self, value: Any) -> list[Any]:
        """Those of all ranks."""
        found = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found


def _does(sink: Sink, call: Callable[[], None]) -> bool:
    """Makes a call of a sink; whether that went well, or else a warning tells."""
    try:
        call()
    except Exception as error:
        text = f"{type(sink).__name__} gets no more telemetry: {error!r}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return False
    return True


def _num_rows(values: Values) -> float:
    return sum(values.get("recsdk_table_rows", {}).values())


def _exchange_of(model: object, pipeline: object) -> HostExchange | None:
    """The first that the model uses, or the pipeline if that is no model; None: of one rank."""
    found = exchanges_of(model) if isinstance(model, nn.Module) else []
    if not found and isinstance(pipeline, HybridTrainPipelineSparseDist):
        found = pipeline._exchanges
    return found[0] if found and found[0].world_size > 1 else None


def _check(model: Any, pipeline: Any, to: Any, ranks: Any, predictions: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(pipeline, HybridTrainPipelineSparseDist):
        raise TypeError(
            f"pipeline must be a HybridTrainPipelineSparseDist, got {type(pipeline).__name__}"
        )
    if not isinstance(ranks, str) or ranks not in ("together", "each"):
        raise ValueError(f"ranks must be 'together' or 'each', got {ranks!r}")
    if not isinstance(to, Sequence) or not to:
        raise ValueError(f"to must be a list of sinks, as [JsonLines('run.jsonl')], got {to!r}")
    for sink in to:
        if not isinstance(sink, Sink):
            raise TypeError(f"to must be sinks, with open, write and close, got {sink!r:.100}")
    if predictions is not None and not callable(predictions):
        raise TypeError(f"predictions must be callable, got {predictions!r:.100}")
