"""The benchmark of CUDA devices leaves what it has measured, whatever fails or takes too long."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import bench
from benchmarks import cuda, launch
from benchmarks.devices import cuda_steps
from benchmarks.devices.cuda_steps import CudaCase


def test_results_are_written_as_they_come_and_failures_do_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "build" / "bench" / "cuda.json"
    written: list[int] = []

    def measured(module: str, ranks: int, case: dict[str, Any], *_: Any) -> Any:
        written.append(len(json.loads(path.read_text())) if path.exists() else 0)
        if len(written) == 1:
            raise SystemExit("out of order")
        of_others = {name: [2.0] for name in cuda.RACES["device work"]}
        of_pipelines = (
            {} if len(written) == 2 else {name: [1.0] for name in (cuda.OURS, cuda.STOCK)}
        )
        return {"milliseconds": {**of_others, **of_pipelines}, "errors": {cuda.OURS: "it failed"}}

    monkeypatch.setattr(cuda, "launch", measured)
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", "cuda"])
    monkeypatch.delenv("QUICK", raising=False)
    with pytest.raises(SystemExit, match="8192x1_rowwise_adagrad, 65536x1_rowwise_adagrad$"):
        bench.main()
    assert written == [0, 0, 1, 3, 5, 7, 9, 11]
    assert len(json.loads(path.read_text())) == 13
    told = capsys.readouterr().out
    assert "out of order" in told
    assert "65536x1_rowwise_adagrad, pipelined step: recsdk failed: it failed\n" in told


def test_a_failure_is_told_beside_what_the_others_did() -> None:
    errors = {"recsdk": "no memory", "torchrec": "no kernel"}
    said = cuda._why_lacking("step", "recsdk", {"TBE": [3.0, 1.0, 2.0]}, errors)
    assert said == (
        "step: recsdk failed: no memory; torchrec failed: no kernel; TBE took 2 ms a step"
    )


class _Contestant:
    def start_turn(self) -> None:
        """Nothing runs ahead."""

    def step(self) -> None:
        """Takes no time."""

    def end_turn(self) -> None:
        """Nothing runs ahead."""


def _fails() -> Any:
    raise ValueError("no memory")


def test_whoever_cannot_be_made_leaves_the_others_in_the_race() -> None:
    case = CudaCase(home="cpu", turns=2)
    found = cuda_steps.race(case, {"none": _fails, "one": _Contestant})
    line = _fails.__code__.co_firstlineno + 1
    assert found["errors"] == {"none": f"ValueError: no memory (test_cuda_benchmark.py:{line})"}
    assert {name: len(turns) for name, turns in found["milliseconds"].items()} == {"one": 2}
    assert cuda_steps.race(case, {"none": _fails})["milliseconds"] == {}


def test_turns_end_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_steps, "SECONDS_OF_TURNS", 0)
    found = cuda_steps.race(CudaCase(home="cpu", turns=5), {"one": _Contestant})
    assert len(found["milliseconds"]["one"]) == 1


class _Ahead:
    """A pipeline whose batches are mapped beside its steps, and their exchange; a clock that both
    move."""

    def __init__(self, now: list[float]) -> None:
        self._now = now
        self.num_waiting = 6

    def progress(self, _: Any) -> None:
        self._now[0] += 1
        self.num_waiting += 1

    def wait_for_jobs(self) -> None:
        self._now[0] += 5 * self.num_waiting
        self.num_waiting = 0


def test_a_turn_maps_as_many_batches_as_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    ahead = _Ahead(now)
    given: dict[str, Any] = {
        "HybridTrainPipelineSparseDist": lambda *_, **__: ahead,
        "CombinedOptimizer": lambda _: None,
        "exchanges_of": lambda _: [ahead],
        "host_batch": lambda *_: None,
    }
    for name, value in given.items():
        monkeypatch.setattr(cuda_steps, name, value)
    monkeypatch.setattr(cuda_steps.time, "perf_counter", lambda: now[0])
    case, model = CudaCase(home="cpu", steps_a_turn=4), SimpleNamespace(fused_optimizer=None)
    ours = cuda_steps.Pipelined(case, cuda_steps.OURS, cast(Any, model), {})
    for _ in range(2):
        assert cuda_steps.turn_of(case, ours) == 6000
        ahead.num_waiting = 0


def test_cases_share_the_minutes_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, given = [50.0], []

    def measured(*args: Any) -> Any:
        given.append(args[-1])
        now[0] += 200
        return {"milliseconds": {names[0]: [1.0] for names in cuda.RACES.values()}, "errors": {}}

    monkeypatch.setattr(cuda, "launch", measured)
    monkeypatch.setattr(cuda.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("MINUTES", "8")
    assert len(list(cuda.run(quick=False))) == 2 * 3
    assert given == [cuda.SECONDS_A_CASE, 280, 80]
    left_out = capsys.readouterr().out.splitlines()[-1]
    assert left_out.startswith("left out, as MINUTES were over: 65536x20_rowwise_adagrad, 8192x1_")


def test_a_case_that_takes_too_long_is_ended() -> None:
    with pytest.raises(SystemExit, match=r"devices.cuda_steps took more than 0.1 s"):
        launch.launch("devices.cuda_steps", 1, {"home": "cpu"}, None, 0.1)
