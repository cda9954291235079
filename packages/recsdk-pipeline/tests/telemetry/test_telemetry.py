"""Telemetry without ranks: the figures of a window, and what each sink makes of a report."""

from __future__ import annotations

import dataclasses
import http.server
import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from recsdk_core import Evict, Table, TableStats
from recsdk_core.nn import HashEmbeddingBag
from recsdk_core.optim import Adagrad
from recsdk_pipeline.telemetry import (
    METRICS,
    JsonLines,
    OpenTelemetry,
    Prometheus,
    Report,
    Telemetry,
    TensorBoard,
)
from recsdk_pipeline.telemetry.collecting import Collector, _add_stats
from recsdk_pipeline.telemetry.merging import merged, skew
from recsdk_pipeline.telemetry.metrics import Values, metric_of
from recsdk_pipeline.telemetry.window import Figures, Window
from recsdk_sharding.exchange.parts import Parts

# Logits this far apart fall into different ranges.
LOGITS = st.integers(-1900, 1900).map(lambda n: n / 100)
PAIRS = st.lists(st.tuples(LOGITS, st.booleans()), max_size=30)


def auc_of(pairs: list[tuple[float, bool]]) -> float | None:
    """By its definition: over all pairs of a positive and a negative."""
    positives = [logit for logit, is_click in pairs if is_click]
    negatives = [logit for logit, is_click in pairs if not is_click]
    wins = [(p > n) + (p == n) / 2 for p in positives for n in negatives]
    return sum(wins) / len(wins) if wins else None


@given(st.lists(PAIRS, max_size=4))
@example([[(16.24, True), (16.25, False)]])  # equal as floats, not as doubles
def test_figures_of_a_window(steps: list[list[tuple[float, bool]]]) -> None:
    window = Window(lambda output: output)
    for number, pairs in enumerate(steps):
        logits = torch.tensor([logit for logit, _ in pairs], dtype=torch.float64)
        labels = torch.tensor([float(is_click) for _, is_click in pairs])
        window.add(torch.tensor([number, 1.0]), (torch.sigmoid(logits), labels))
    figures = Figures(window.sums())
    every = [pair for pairs in steps for pair in pairs]
    expected = auc_of([(round(logit, 2), is_click) for logit, is_click in every])
    assert figures.auc == (None if expected is None else pytest.approx(expected))
    clicks = sum(is_click for _, is_click in every)
    total = sum(1 / (1 + np.exp(-logit)) for logit, _ in every)
    assert figures.calibration == (pytest.approx(total / clicks) if clicks else None)
    assert figures.num_examples == len(every)
    assert figures.num_bad == 0
    mean = sum(range(1, len(steps) + 1)) / len(steps) if steps else None
    assert figures.loss == (None if mean is None else pytest.approx(mean))
    window.start_anew()
    again = Figures(window.sums())
    assert (again.auc, again.calibration, again.loss, again.num_examples) == (None, None, None, 0)


def test_many_predictions_are_counted_as_they_come() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(100_000, generator=generator) / 50
    labels = (torch.rand(100_000, generator=generator) < probabilities).float()
    window = Window(lambda output: output)
    for place in range(0, 100_000, 1000):
        part = slice(place, place + 1000)
        window.add(torch.tensor(0.0), (probabilities[part], labels[part]))
    figures = Figures(window.sums())
    assert figures.num_examples == 100_000
    expected = float(binary_auroc(probabilities, labels.int()))
    assert figures.auc == pytest.approx(expected, abs=1e-4)
    assert figures.calibration == pytest.approx(float(probabilities.sum() / labels.sum()), rel=1e-5)


def test_bad_predictions_are_counted_and_left_out() -> None:
    window = Window(lambda output: output)
    probabilities = torch.tensor([0.0, 1.0, float("nan"), 1.5, -0.1, float("inf"), -0.0])
    labels = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    window.add(torch.tensor(0.5), (probabilities, labels))
    figures = Figures(window.sums())
    assert (figures.auc, figures.calibration) == (1.0, 1.0)
    assert (figures.num_bad, figures.num_examples) == (4, 7)
    with pytest.raises(ValueError, match=r"shape \(2,\) and labels of shape \(3,\)"):
        window.add(torch.tensor(0.5), (torch.zeros(2), torch.zeros(3)))


def test_ranks_are_merged_as_each_metric_says() -> None:
    ranks: list[Values] = [
        {
            "recsdk_steps_total": {(): 7},
            "recsdk_table_rows": {("user",): 3 + r, ("item",): 5},
            "recsdk_table_bytes": {("item", "row"): 100},
            "recsdk_table_updates_total": {("user",): 7},
            "recsdk_step_seconds_total": {("forward",): 1.0 + r},
            "recsdk_table_expired_total": {("user", "stale"): 2},
            **({"recsdk_table_rows_in_flight": {("ad",): 4}} if r else {}),
        }
        for r in range(2)
    ]
    assert merged(ranks, {"item"}) == {
        "recsdk_steps_total": {(): 7},
        "recsdk_table_rows": {("user",): 7, ("item",): 5},
        "recsdk_table_bytes": {("item", "row"): 200},
        "recsdk_table_updates_total": {("user",): 7},
        "recsdk_step_seconds_total": {("forward",): 1.5},
        "recsdk_table_expired_total": {("user", "stale"): 4},
        "recsdk_table_rows_in_flight": {("ad",): 4},
    }
    assert (skew([3, 1]), skew([0, 0])) == (1.5, 1.0)


def test_counts_by_cause_are_told_without_knowing_them() -> None:
    stats = Table(dim=4).stats()
    made = dataclasses.make_dataclass(
        "Stats",
        [("gone", dict[str, int]), ("disk_bytes", int)],
        bases=(TableStats,),
        frozen=True,
    )
    found: Values = {}
    _add_stats(found, "user", made(**vars(stats), gone={"stale": 3, "full": 1}, disk_bytes=9))
    counts = {("user", "stale"): 3, ("user", "full"): 1}
    assert found["recsdk_table_gone_total"] == counts
    evicted = {("user", "full"): 0, ("user", "asked"): 0, ("user", "expired"): 0}
    assert found["recsdk_table_evicted_total"] == evicted
    assert found["recsdk_table_bytes"]["user", "disk"] == 9
    assert metric_of("recsdk_table_gone_total").labels == ("table", "cause")


def test_who_leaves_a_table_is_told_by_cause_and_who_returns() -> None:
    bag = HashEmbeddingBag(
        4, name="user", max_rows=8, eviction=Evict.lru().with_churn(9), eviction_groups=1
    )
    collector = Collector(bag, Parts())
    table = bag.table
    for keys in (np.arange(8), np.array([10, 11, 12])):
        table.find_or_insert(keys)
    table.erase(np.array([10]))
    assert table.evict(max_rows=5) == 2
    for of_now in (1.0, 0.0):
        found = collector.values()
        assert found["recsdk_table_evicted_total"] == {
            ("user", "full"): 3,
            ("user", "asked"): 2,
            ("user", "expired"): 0,
        }
        growth, leaving = (
            found[f"recsdk_table_{what}_rows_per_second"]["user",] for what in ("growth", "leaving")
        )
        assert leaving == pytest.approx(growth * 6 / 5)  # 11 came, 6 left
        assert (leaving > 0) == (of_now > 0)
    table.find_or_insert(np.arange(8))
    assert collector.values()["recsdk_table_returned_total"]["user",] == 5
    table.set_optimizer(Adagrad(lr=0.1))  # counts anew
    assert collector.values()["recsdk_table_leaving_rows_per_second"]["user",] == 0


def test_rows_that_an_output_holds_back_are_told() -> None:
    bag = HashEmbeddingBag(4, name="user")
    collector = Collector(bag, Parts())
    lease = bag.table.lease(step=1)
    bag.table.map(np.arange(2), insert=True, lease=lease)
    with bag.table.lease(step=2) as later:
        bag.table.map(np.arange(5), insert=True, lease=later)

    def told() -> list[float]:
        found = collector.values()
        names = ("rows", "rows_in_flight", "rows_held_back")
        return [found[f"recsdk_table_{name}"]["user",] for name in names]

    assert told() == [0, 5, 3]
    lease.release()
    assert told() == [5, 0, 0]


def test_no_part_of_a_step_shrinks_however_late_in_its_own_part_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    for module in ("recsdk_pipeline.telemetry.collecting", "recsdk_sharding.exchange.parts"):
        monkeypatch.setattr(f"{module}.perf_counter", lambda: now[0])
    parts = Parts()
    collector = Collector(HashEmbeddingBag(4, name="user"), parts)

    def told() -> dict[tuple[str, ...], float]:
        found = collector.values()["recsdk_step_seconds_total"]
        assert isinstance(found, dict)
        return found

    now[0] = 2.0
    with parts.part("telemetry"):
        now[0] = 7.0  # others are told first
        assert told() == {("elsewhere",): 2.0}
    with parts.part("telemetry"):
        now[0] = 8.0
        assert told() == {("telemetry",): 5.0, ("elsewhere",): 2.0}
    now[0] = 9.0
    assert told() == {("telemetry",): 6.0, ("elsewhere",): 3.0}


def test_every_name_has_its_row_in_the_reference() -> None:
    page = Path(__file__).parents[4] / "docs" / "reference" / "telemetry.md"
    if not page.exists():
        pytest.skip("the page is not part of the package")
    rows = re.findall(r"^\| `(recsdk_\w+)` \| (.*) \|$", page.read_text(), re.M)
    expected = [
        (m.name, " | ".join([m.kind, f"`{m.unit}`", ", ".join(m.labels), m.over_ranks, m.text]))
        for m in METRICS.values()
    ]
    assert rows == expected


def report_of(step: int, rank: int | None = None) -> Report:
    return Report(
        time=1.7e9 + step,
        step=step,
        rank=rank,
        num_ranks=2,
        values={
            "recsdk_steps_total": {(): step},
            "recsdk_loss": {(): 0.5},
            "recsdk_table_rows": {("user",): 10 * step, ("a b/\"'\\c",): 1},
            "recsdk_step_seconds_total": {("forward",): 0.25 * step},
            "recsdk_table_expired_total": {("user", "stale"): 3 * step},
        },
    )


def test_json_lines_hold_counters_as_they_stand(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "new" / "run.jsonl")
    sink.open(None)
    sink.write(report_of(1))
    sink.write(report_of(2))
    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert lines[1] == {
        "time": 1.7e9 + 2,
        "step": 2,
        "rank": None,
        "num_ranks": 2,
        "recsdk_steps_total": 2,
        "recsdk_loss": 0.5,
        "recsdk_table_rows": {"user": 20, "a b/\"'\\c": 1},
        "recsdk_step_seconds_total": {"forward": 0.5},
        "recsdk_table_expired_total": {"user": {"stale": 6}},
    }
    with pytest.raises(OSError, match=r"run.jsonl: is open; give each Telemetry a JsonLines of"):
        sink.open(None)
    second = JsonLines(sink.path)
    with pytest.raises(OSError, match=r"run.jsonl: another JsonLines writes to it; give each"):
        second.open(None)
    second.open(3)
    assert second.path.name == "run.rank_3.jsonl"
    second.close()
    sink.close()
    again = JsonLines(tmp_path / "new" / "run.jsonl")
    again.open(None)
    again.write(report_of(3))
    again.close()
    assert len(sink.path.read_text().splitlines()) == 3


def scraped(port: int | None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    families = parser.text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


@pytest.mark.parametrize("rank", [None, 1])
def test_prometheus_scrapes_the_last_report(rank: int | None) -> None:
    pytest.importorskip("prometheus_client")
    sink = Prometheus(port=0)
    sink.open(rank)
    assert scraped(sink.port) == {}
    sink.write(report_of(1, rank))
    sink.write(report_of(2, rank))
    own = () if rank is None else (("rank", "1"),)
    assert scraped(sink.port) == {
        ("recsdk_steps_total", own): 2,
        ("recsdk_loss", own): 0.5,
        ("recsdk_table_rows", (*own, ("table", "user"))): 20,
        ("recsdk_table_rows", (*own, ("table", "a b/\"'\\c"))): 1,
        ("recsdk_step_seconds_total", (("part", "forward"), *own)): 0.5,
        ("recsdk_table_expired_total", (("cause", "stale"), *own, ("table", "user"))): 6,
    }
    taken = Prometheus(port=sink.port)
    if rank is None:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{sink.port}"):
            taken.open(None)
    sink.close()
    with pytest.raises(OSError, match="refused"):
        scraped(sink.port)


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A gateway that keeps what is pushed: its address, and paths with bodies."""
    pushed: list[tuple[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            pushed.append(
                (self.path, self.rfile.read(int(self.headers["Content-Length"])).decode())
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}", pushed
        server.shutdown()
        thread.join()


def test_prometheus_pushes_to_a_gateway(gateway: tuple[str, list[tuple[str, str]]]) -> None:
    pytest.importorskip("prometheus_client")
    address, pushed = gateway
    sink = Prometheus(push=address, job="clicks")
    sink.open(1)
    sink.write(report_of(4, rank=1))
    sink.close()
    [(path, body)] = pushed
    assert path == "/metrics/job/clicks/rank/1"
    assert 'recsdk_table_rows{table="user"} 40.0' in body
    refused = Prometheus(push="127.0.0.1:1")
    refused.open(None)
    refused.write(report_of(1))
    with pytest.raises(OSError, match="refused"):
        refused.close()


def test_opentelemetry_reads_the_last_report() -> None:
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    sink = OpenTelemetry(MeterProvider([reader]).get_meter("test"))
    sink.open(1)
    sink.write(report_of(1, rank=1))
    sink.write(report_of(2, rank=1))
    [resource] = reader.get_metrics_data().resource_metrics
    [scope] = resource.scope_metrics
    found = {
        (each.name, each.unit, *sorted(map(str, point.attributes.values()))): point.value
        for each in scope.metrics
        for point in each.data.data_points
    }
    assert found == {
        ("recsdk.steps", "{step}", "1"): 2,
        ("recsdk.loss", "1", "1"): 0.5,
        ("recsdk.table_rows", "{row}", "1", "user"): 20,
        ("recsdk.table_rows", "{row}", "1", "a b/\"'\\c"): 1,
        ("recsdk.step_seconds", "s", "1", "forward"): 0.5,
        ("recsdk.table_expired", "1", "1", "stale", "user"): 6,
    }


def test_tensorboard_gets_counters_a_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoard(tmp_path)
    sink.open(0)
    sink.write(report_of(4, rank=0))
    sink.write(report_of(10, rank=0))
    sink.write(report_of(18, rank=0))
    sink.close()
    events = EventAccumulator(str(tmp_path / "rank_0")).Reload()
    assert "recsdk_table_rows/user" in events.Tags()["scalars"]
    [first, second] = events.Scalars("recsdk_step_seconds/forward")
    assert (first.step, first.value, second.step, second.value) == (10, 0.25, 18, 0.25)
    assert [each.value for each in events.Scalars("recsdk_table_rows/user")] == [40, 100, 180]
    assert [each.value for each in events.Scalars("recsdk_table_expired/user/stale")] == [3, 3]
    (path,) = (tmp_path / "rank_0").iterdir()
    assert [len(each.summary.value) > 1 for each in EventFileLoader(str(path)).Load()] == [
        False,  # the version of the format
        *[True] * 3,
    ]


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("prometheus_client", lambda: Prometheus(port=0), "prometheus"),
        ("opentelemetry", OpenTelemetry, "opentelemetry"),
        ("torch.utils.tensorboard", lambda: TensorBoard("unused"), "tensorboard"),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str, make: Any, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'needs .*run pip install "recsdk-pipeline\[{extra}\]"'):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "pass either port or push, got port=None and push=None"),
        ({"port": 1, "push": "gateway:9091"}, ValueError, "either port or push"),
        ({"port": 65536}, ValueError, "port must be at most 65535, got 65536"),
        ({"port": True}, TypeError, "port must be an int, got True"),
        ({"port": "9400"}, TypeError, "port must be an int, got '9400'"),
        ({"push": ""}, ValueError, "push must be one such as 'gateway:9091', or left out, got ''"),
        ({"push": 9091}, TypeError, "push must be a string such as .*, got 9091"),
        ({"push": "gateway:9091", "job": ""}, ValueError, "job must be one such as .*, got ''"),
        ({"port": 0, "address": ""}, ValueError, "address must be one such as .*, got ''"),
        ({"port": 0, "job": "clicks"}, ValueError, "job='clicks' is for push"),
        ({"push": "g:1", "address": "0.0.0.0"}, ValueError, "address='0.0.0.0' is for port"),
    ],
)
def test_prometheus_refuses_other_arguments(
    arguments: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Prometheus(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"pipeline": 3}, TypeError, "pipeline must be a HybridTrainPipelineSparseDist, got int"),
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 1.5}, TypeError, "every must be an int, got 1.5"),
        ({"ranks": "all"}, ValueError, "ranks must be 'together' or 'each', got 'all'"),
        ({"to": []}, ValueError, "to must be a list of sinks"),
        (
            {"to": ["run.jsonl"]},
            TypeError,
            "to must be sinks, with open, write and close, got 'run.jsonl'",
        ),
    ],
)
def test_other_arguments_are_refused(changed: Any, error: type[Exception], message: str) -> None:
    from recsdk_pipeline import HybridTrainPipelineSparseDist

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    pipeline = HybridTrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    given = {"model": model, "pipeline": pipeline, "every": 1, "to": [JsonLines("unused")]}
    with pytest.raises(error, match=message):
        Telemetry(**{**given, **changed})
