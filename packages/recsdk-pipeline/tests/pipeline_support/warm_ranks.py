"""Ranks that run a script as torchrun does, forked from templates that have imported torchrec."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from rank_templates import Rank
from warm_scripts import start_scripts, statuses_of

__all__ = ["start_ranks", "statuses_of"]


def start_ranks(
    num_ranks: int, command: Sequence[str], output: Path, variables: Mapping[str, str]
) -> list[Rank]:
    """Starts `command` (a script or -m module, with arguments) on ranks that print to `output`."""
    shared = {**variables, **_variables_of_world(num_ranks)}
    numbers = map(str, range(num_ranks))
    own = [{**shared, "RANK": number, "LOCAL_RANK": number} for number in numbers]
    return start_scripts(command, output, own)


def _variables_of_world(num_ranks: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
    }
