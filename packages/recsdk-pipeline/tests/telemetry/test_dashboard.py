"""The Grafana dashboard, asked of a real Prometheus that scrapes a training on two ranks."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_support.launch import TESTS

from ports import reserved_ports
from recsdk_pipeline.telemetry import METRICS, dashboard
from warm_scripts import start_ranks, statuses_of

SECONDS_TO_COME = 120
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - {{job_name: run, static_configs: [{{targets: {targets}}}]}}
"""


def expressions() -> list[str]:
    panels = json.loads(dashboard())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_told() -> None:
    asked = {name for each in expressions() for name in re.findall(r"recsdk_\w+", each)}
    assert len(asked) > 10
    assert asked <= set(METRICS)
    for each in expressions():
        for name, labels in re.findall(r"by \((\w+)\) \((?:rate\()?(recsdk_\w+)", each):
            assert name in METRICS[labels].labels


class Server:
    """A Prometheus of the test's own."""

    def __init__(self, binary: str, folder: Path, port: int, targets: list[str]) -> None:
        self.folder = folder
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(targets=json.dumps(targets)))
        self._address = f"127.0.0.1:{port}"
        self._output = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [
                binary,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now; raises URLError until the server listens."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{self._address}/api/v1/query?{query}") as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The same, once there are some."""
        deadline = time.monotonic() + SECONDS_TO_COME
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "Prometheus has ended"
            try:
                if found := self.ask(expression):
                    return found
            except urllib.error.URLError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"nothing came for {expression}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._output.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    pytest.importorskip("prometheus_client")
    folder = tmp_path_factory.mktemp("run")
    with reserved_ports(3) as [first, second, own]:
        command = (str(TESTS / "scripts" / "train_and_tell.py"), str(first), str(folder))
        ranks = start_ranks(2, command, folder / "output", {})
        server = Server(binary, folder, own, [f"127.0.0.1:{port}" for port in (first, second)])
        try:
            yield server
        finally:
            (folder / "stop").touch()
            statuses = statuses_of(ranks, SECONDS_TO_COME)
            server.stop()
    assert statuses == [0, 0], (folder / "output").read_text()


def test_every_query_has_an_answer(server: Server) -> None:
    server.wait_for("count(rate(recsdk_steps_total[10s]) > 0) == 2")  # both ranks, twice each
    for expression in expressions():
        expression = expression.replace("$__rate_interval", "10s")
        found = server.wait_for(expression)
        assert all(math.isfinite(float(each["value"][1])) for each in found), expression


def test_the_numbers_are_those_of_both_ranks(server: Server) -> None:
    # The batches repeat after 20, so the tables have all their rows by then.
    server.wait_for("count(recsdk_steps_total >= 20) == 2")
    expected: dict[str, float] = {}
    for rank in range(2):
        lines = (server.folder / f"run.rank_{rank}.jsonl").read_text().splitlines()
        told = next(line for line in map(json.loads, lines) if line["step"] >= 20)
        for table, rows in told["recsdk_table_rows"].items():
            expected[table] = expected.get(table, 0) + rows
    summed = server.ask("sum by (table) (recsdk_table_rows)")
    assert {s["metric"]["table"]: float(s["value"][1]) for s in summed} == expected
    assert set(expected) == {"people", "things"}
    assert min(expected.values()) > 0
