"""Ports for programs that a test starts, which nobody else takes meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

_HOST = "127.0.0.1"


@contextmanager
def reserved_ports(number: int = 1) -> Iterator[list[int]]:
    """Ports in a row; only who sets SO_REUSEADDR, as servers do, can listen there inside.

    Sockets are bound to them that do not listen. So the system gives these ports to nobody who asks
    for any, and refuses them to who does not set that.
    """
    while True:
        held: list[socket.socket] = []
        try:
            first = _bound(held, 0)
            for port in range(first + 1, first + number):
                _bound(held, port)
        except (OSError, OverflowError):  # the next one is taken
            _close(held)
            continue
        break
    try:
        yield list(range(first, first + number))
    finally:
        _close(held)


def _bound(held: list[socket.socket], port: int) -> int:
    one = socket.socket()
    held.append(one)
    one.bind((_HOST, port))  # without the option: where one has it, others could be bound as well
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found: int = one.getsockname()[1]
    return found


def _close(held: list[socket.socket]) -> None:
    for one in held:
        one.close()
