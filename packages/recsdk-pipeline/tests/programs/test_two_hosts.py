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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pipeline_support.launch import SECONDS_TO_END, TESTS, environment

SCRIPT = TESTS / "scripts" / "seven_steps.py"
NUM_EPOCHS = 2
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


def _torchrun(host: Host, node: int, hosts: list[Host], script: Path) -> subprocess.Popen[str]:
    options = ["--nnodes", str(len(hosts)), "--node-rank", str(node), "--nproc-per-node", "1"]
    options += ["--master-addr", hosts[0].address, "--master-port", str(PORT)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    return subprocess.Popen(
        host.command(*command),
        env={**environment(), "GLOO_SOCKET_IFNAME": INTERFACE},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_recipe_trains_over_two_hosts(hosts: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "two_epochs.py"
    script.write_text(SCRIPT.read_text().replace("range(4)", f"range({NUM_EPOCHS})"))
    # The second first: the order in which machines are started does not matter.
    started = {node: _torchrun(hosts[node], node, hosts, script) for node in (1, 0)}
    try:
        outputs = {n: p.communicate(timeout=SECONDS_TO_END)[0] for n, p in started.items()}
    finally:
        for process in started.values():
            process.kill()
    for node, output in sorted(outputs.items()):
        assert started[node].returncode == 0, output
        losses = re.findall(rf"rank {node} epoch \d: 50 batches, loss ([\d.]+)", output)
        assert len(losses) == NUM_EPOCHS, output
        assert float(losses[-1]) < float(losses[0])
    # Batches of two features: at the least the ids, vectors and gradients of half of them.
    least = NUM_EPOCHS * 50 * 2 * 64 // 2 * (8 + 2 * 8 * 4)
    assert all(host.bytes_received() > least for host in hosts)
