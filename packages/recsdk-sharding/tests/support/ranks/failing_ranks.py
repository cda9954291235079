"""What ranks do in the tests of how they fail; templates import it by this name."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection


def fail_at_once(rank: int, pipe: Connection) -> None:
    os.dup2(pipe.fileno(), 2)
    raise ValueError(f"rank {rank} cannot serve")


def tell_template(rank: int, pipe: Connection) -> None:
    pipe.send(os.getppid())
    pipe.recv()
