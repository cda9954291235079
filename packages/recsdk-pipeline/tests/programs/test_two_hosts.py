"""The recipe for several machines, between two network namespaces of this one.

Each has a network stack of its own: a loopback that the other does not see, and one end of a
virtual cable. Needs `ip` (Debian's iproute2) and the right to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pipeline_support.launch import SECONDS_TO_END, TESTS, environment

import warm_scripts
from sampling import IS_FULL

SCRIPT = TESTS / "scripts" / "seven_steps.py"
IN_NAMESPACE = TESTS / "scripts" / "in_namespace.py"
NUM_EPOCHS, NUM_BATCHES = 2, 20
PORT = 29500  # nothing else listens in a new namespace
INTERFACE = "cable"


@dataclass(frozen=True)
class Host:
    """A namespace that stands for a machine."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.name, *command]

    def bytes_received(self) -> int:
        """Bytes that came over the cable."""
        path = f"/sys/class/net/{INTERFACE}/statistics/rx_bytes"
        return int(_run(self.command("cat", path)))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=True, text=True, capture_output=True)
    return done.stdout


def _connect(hosts: list[Host]) -> None:
    """Makes the namespaces and the cable between them."""
    for host in hosts:
        _run(["ip", "netns", "add", host.name])
    ends = [["name", INTERFACE, "netns", host.name] for host in hosts]
    _run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
    for host in hosts:
        inside = ["ip", "-n", host.name]
        _run([*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE])
        for link in (INTERFACE, "lo"):
            _run([*inside, "link", "set", link, "up"])
        _run(host.command("true"))


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two of them; skips where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (Debian's iproute2)")
    made = [Host(f"recsdk-{os.getpid()}-{i}", f"10.231.7.{i + 1}") for i in range(2)]
    try:
        try:
            _connect(made)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield made
    finally:
        for host in made:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run(["ip", "netns", "del", host.name])


def _run_with_torchrun(hosts: list[Host], script: Path) -> str:
    """What the script prints, on a rank of each host."""
    options = ["--nnodes", str(len(hosts)), "--nproc-per-node", "1"]
    options += ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    # The second first: the order in which machines are started does not matter.
    started = [
        subprocess.Popen(
            hosts[node].command(*command, "--node-rank", str(node), str(script)),
            env={**environment(), "GLOO_SOCKET_IFNAME": INTERFACE},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for node in (1, 0)
    ]
    try:
        output = "".join(p.communicate(timeout=SECONDS_TO_END)[0] for p in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], output
    return output


def _run_warm(hosts: list[Host], script: Path) -> str:
    """The same on ranks that have imported torchrec, with the variables that torchrun sets."""
    world = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    variables = [
        {**world, "RANK": str(rank), "NETWORK_NAMESPACE": host.name}
        for rank, host in enumerate(hosts)
    ]
    output = script.with_suffix(".output")
    started = warm_scripts.start_scripts((str(IN_NAMESPACE), str(script)), output, variables)
    statuses = warm_scripts.statuses_of(started, SECONDS_TO_END)
    text = output.read_text(errors="replace")
    assert statuses == [0, 0], text
    return text


@pytest.mark.parametrize("run", [_run_warm, *([_run_with_torchrun] if IS_FULL else [])])
def test_the_recipe_trains_over_two_hosts(
    hosts: list[Host], tmp_path: Path, run: Callable[[list[Host], Path], str]
) -> None:
    script = tmp_path / "two_epochs.py"
    text = SCRIPT.read_text().replace("range(3)", f"range({NUM_EPOCHS})")
    script.write_text(text.replace("NUM_BATCHES = 50", f"NUM_BATCHES = {NUM_BATCHES}"))
    output = run(hosts, script)
    for node in range(len(hosts)):
        losses = re.findall(rf"rank {node} epoch \d: {NUM_BATCHES} batches, loss ([\d.]+)", output)
        assert len(losses) == NUM_EPOCHS, output
        assert float(losses[-1]) < float(losses[0])
    # Batches of two features: at the least the ids, vectors and gradients of half of them.
    least = NUM_EPOCHS * NUM_BATCHES * 2 * 64 // 2 * (8 + 2 * 8 * 4)
    assert all(host.bytes_received() > least for host in hosts)
