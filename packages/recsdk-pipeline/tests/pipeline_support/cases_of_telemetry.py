"""Telemetry over several ranks; test_pipeline_on_ranks.py shows how the cases ended."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torchmetrics.functional.classification import binary_auroc
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from pipeline_support.cases_of_resuming import shared_folder
from pipeline_support.model import (
    DEVICE,
    SmallModel,
    World,
    assert_equal,
    batches,
    content,
    hash_tables,
    rest_of,
    spread,
)
from recsdk_pipeline import HybridTrainPipelineSparseDist
from recsdk_pipeline.telemetry import JsonLines, Report, Telemetry, collecting
from recsdk_sharding import PeerError, Saver, ShardedHashEmbeddingBagCollection

NUM_STEPS, EVERY = 12, 2


class Kept:
    """A sink that keeps its reports."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.opened: list[int | None] = []
        self.is_closed = False

    def open(self, rank: int | None) -> None:
        self.opened.append(rank)

    def write(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.is_closed = True


class Full(Kept):
    """One that a rank cannot open, or none can write to."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def open(self, rank: int | None) -> None:
        if self._world.rank == 1:
            raise OSError("no space left")

    def write(self, report: Report) -> None:
        raise OSError("no space left")


class Labelled(SmallModel):
    """Returns logits and labels."""

    def forward(self, batch: Any) -> Any:
        loss, logits = super().forward(batch)
        return loss, (logits, batch.labels)


def predictions(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = output
    return torch.sigmoid(logits), labels


def labelled_training(world: World) -> tuple[Any, HybridTrainPipelineSparseDist[Any, Any]]:
    wrapper = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    model, optimizer = spread(Labelled(tables=hash_tables()), world, wrapper)
    return model, HybridTrainPipelineSparseDist(
        model, optimizer, DEVICE, pipe_n_batch=3, return_loss=True
    )


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def tables_of(model: Any) -> dict[str, Any]:
    collections = (m for m in model.modules() if isinstance(m, ShardedHashEmbeddingBagCollection))
    return {name: table for each in collections for name, table in each.tables().items()}


def case_of_what_all_ranks_know(world: World) -> None:
    model, pipeline = labelled_training(world)
    sink, path = Kept(), Path(shared_folder(world), "run.jsonl")
    given = batches(world, NUM_STEPS)
    with Telemetry(
        model, pipeline, every=EVERY, to=[sink, JsonLines(path)], predictions=predictions
    ):
        outputs = rest_of(pipeline, iter(given))
    assert sink.opened == ([None] if world.rank == 0 else [])
    assert sink.is_closed == (world.rank == 0)
    tables = {name: (len(t), t.stats()) for name, t in tables_of(model).items()}
    sent = [m.stats() for m in model.modules() if isinstance(m, ShardedHashEmbeddingBagCollection)]
    window = [(output, losses) for output, losses in outputs[-EVERY:]]
    every = of_all((tables, sent, window))
    if world.rank != 0:
        return
    report = sink.reports[-1]
    assert [each.step for each in sink.reports] == list(range(EVERY, NUM_STEPS + 1, EVERY))
    assert (report.rank, report.num_ranks) == (None, world.size)
    values = report.values
    assert values["recsdk_steps_total"] == {(): NUM_STEPS}
    assert values["recsdk_examples_total"] == {(): world.size * sum(map(len, given))}
    for name in tables:
        counts = [of_rank[name][1] for of_rank, _, _ in every]
        assert values["recsdk_table_rows"][name,] == sum(
            of_rank[name][0] for of_rank, _, _ in every
        )
        for outcome in counts[0].outcomes:
            expected = sum(each.outcomes[outcome] for each in counts)
            assert values["recsdk_table_keys_total"][name, outcome.name.lower()] == expected
        parts = {p: sum(getattr(c, f"{p}_bytes") for c in counts) for p in ("row", "index")}
        assert {p: values["recsdk_table_bytes"][name, p] for p in parts} == parts
        assert values["recsdk_table_updates_total"][name,] == NUM_STEPS
    rows = [sum(n for n, _ in of_rank.values()) for of_rank, _, _ in every]
    assert values["recsdk_rank_skew"]["rows",] == max(rows) * world.size / sum(rows)
    told = values["recsdk_sent_bytes_total"]
    in_all = [stats for _, of_rank, _ in every for by_type in of_rank for stats in by_type.values()]
    assert sum(told.values()) == sum(sum(vars(each).values()) for each in in_all) > 0
    pairs = [pair for _, _, window in every for pair in window]
    probabilities, labels = (
        torch.cat(each) for each in zip(*(predictions(out) for out, _ in pairs), strict=True)
    )
    losses = [float(loss) for _, loss in pairs]
    assert values["recsdk_loss"][()] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    expected = float(binary_auroc(probabilities, labels.int()))
    assert values["recsdk_auc"][()] == pytest.approx(expected, abs=2e-3)
    expected = float(probabilities.sum() / labels.sum())
    assert values["recsdk_calibration"][()] == pytest.approx(expected, rel=1e-6)
    assert {part for (part,) in values["recsdk_step_seconds_total"]} == {
        *("reading", "start", "waiting", "forward", "backward", "update"),
        *("telemetry", "elsewhere"),
    }
    assert {part for (part,) in values["recsdk_host_seconds_total"]} == {
        *("prepare", "exchange", "mapping"),
    }
    for metric in ("recsdk_step_seconds_total", "recsdk_host_seconds_total"):
        assert min(values[metric].values()) > 0
        for before, after in pairwise(each.values[metric] for each in sink.reports):
            assert all(before[part] <= after[part] for part in before)
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["recsdk_table_rows"] == {n: v for (n,), v in values["recsdk_table_rows"].items()}
    assert (line["step"], line["rank"], line["num_ranks"]) == (NUM_STEPS, None, world.size)


def case_of_bad_predictions(world: World) -> None:
    """Each rank tells those of all."""
    model, pipeline = labelled_training(world)
    given, sink = batches(world, NUM_STEPS), Kept()

    def some_bad(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities, labels = predictions(output)
        bad = torch.full_like(probabilities[: world.rank], 2.0)
        return torch.cat([bad, probabilities[world.rank :]]), labels

    with Telemetry(model, pipeline, every=EVERY, to=[sink], ranks="each", predictions=some_bad):
        rest_of(pipeline, iter(given))
    num_bad = of_all(sum(min(world.rank, len(batch)) for batch in given))
    assert sink.reports[-1].values["recsdk_bad_predictions_total"] == {(): sum(num_bad)}


def case_of_each_rank(world: World) -> None:
    model, pipeline = labelled_training(world)
    sink, path = Kept(), Path(shared_folder(world), "run.jsonl")
    with Telemetry(model, pipeline, every=EVERY, to=[sink, JsonLines(path)], ranks="each"):
        rest_of(pipeline, iter(batches(world, NUM_STEPS)))
    assert sink.opened == [world.rank]
    report = sink.reports[-1]
    assert (report.rank, report.num_ranks) == (world.rank, world.size)
    own = {(name,): len(table) for name, table in tables_of(model).items()}
    assert report.values["recsdk_table_rows"] == own
    assert "recsdk_auc" not in report.values
    shared = [report.values[name] for name in ("recsdk_loss", "recsdk_rank_skew")]
    assert of_all(shared) == [shared] * world.size
    line = json.loads(path.with_name(f"run.rank_{world.rank}.jsonl").read_text().splitlines()[-1])
    assert line["rank"] == world.rank
    assert not path.exists()


def case_of_training_as_without_telemetry(world: World) -> None:
    found = []
    for is_told in (False, True):
        model, pipeline = labelled_training(world)
        if is_told:
            Telemetry(model, pipeline, every=1, to=[Kept()], predictions=predictions)
        rest_of(pipeline, iter(batches(world, NUM_STEPS)))
        found.append(content(model))
    assert_equal(found[1], found[0])


def case_of_saves(world: World) -> None:
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "perf_counter", lambda: now[0])
        model, pipeline = labelled_training(world)
        sink = Kept()
        telemetry = Telemetry(model, pipeline, every=10**6, to=[sink], ranks="each")
        rest_of(pipeline, iter(batches(world, 3)))
        now[0] = 107.0
        telemetry.report()
        Saver().save(model, Path(shared_folder(world), "saved"))
        now[0] = 120.0
        telemetry.report()
        now[0] = 125.0
        telemetry.report()
        telemetry.close()
    ages = [report.values["recsdk_save_age_seconds"][()] for report in sink.reports]
    assert ages == [7.0, 0.0, 5.0]
    growth = [sum(r.values["recsdk_table_growth_rows_per_second"].values()) for r in sink.reports]
    assert growth == [pytest.approx(sum(map(len, tables_of(model).values())) / 7), 0, 0]
    with pytest.raises(RuntimeError, match="closed"):
        telemetry.report()


def case_of_a_sink_that_fails(world: World) -> None:
    model, pipeline = labelled_training(world)
    other = Kept()
    expected = OSError if world.rank == 1 else PeerError
    with pytest.raises(expected, match="no space left"):
        Telemetry(model, pipeline, every=2, to=[other, Full(world)], ranks="each")
    assert other.is_closed
    with Telemetry(model, pipeline, every=2, to=[Full(world), other]):
        if world.rank == 0:
            with pytest.warns(RuntimeWarning, match="Full gets no more telemetry"):
                rest_of(pipeline, iter(batches(world, 6)))
        else:
            rest_of(pipeline, iter(batches(world, 6)))
    assert [report.step for report in other.reports] == ([2, 4, 6] if world.rank == 0 else [])


def case_of_a_profile(world: World) -> None:
    _, pipeline = labelled_training(world)
    given = iter(batches(world, NUM_STEPS))
    pipeline.progress(given)
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
        for _ in range(4):
            pipeline.progress(given)
    pipeline.drop()
    spans = [event for event in found.events() if event.name.startswith("recsdk::")]
    threads = {event.name: {e.thread for e in spans if e.name == event.name} for event in spans}
    here = {f"recsdk::{n}" for n in ("step", "reading", "start", "forward", "backward", "update")}
    beside = {f"recsdk::{n}" for n in ("host_job", "prepare", "exchange", "mapping")}
    assert here | beside | {"recsdk::waiting"} == set(threads)
    [training_thread] = threads["recsdk::step"]
    [host_thread] = threads["recsdk::host_job"]
    assert host_thread != training_thread
    assert {name for name, of_name in threads.items() if of_name == {host_thread}} == beside
    jobs = [e.time_range for e in spans if e.name == "recsdk::host_job"]
    mappings = [e.time_range for e in spans if e.name == "recsdk::mapping"]
    assert len(mappings) >= 3
    for each in mappings:
        assert any(job.start <= each.start and each.end <= job.end for job in jobs)
