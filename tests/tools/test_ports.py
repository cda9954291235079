"""Ports that are reserved for a program that a test starts."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from ports import reserved_ports

IP_LOCAL_PORT_RANGE = 51  # Source: linux/in.h


def refuse_to_bind(other: socket.socket, port: int) -> None:
    with pytest.raises(OSError, match="Address already in use") as refused:
        other.bind(("127.0.0.1", port))
    assert refused.value.errno == errno.EADDRINUSE


def test_only_who_sets_reuseaddr_can_listen_there() -> None:
    with reserved_ports(2) as [first, second]:
        assert second == first + 1
        for port in (first, second):
            for host in ("127.0.0.1", ""):
                with socket.create_server((host, port)):  # sets SO_REUSEADDR, as servers do
                    socket.create_connection(("127.0.0.1", port)).close()
            with socket.socket() as other:
                refuse_to_bind(other, port)


@pytest.mark.parametrize("reuses", [0, 1])
def test_nobody_who_asks_for_any_port_gets_them(reuses: int) -> None:
    """Not even who takes any of these ports only."""
    with reserved_ports(2) as [first, second], socket.socket() as other:
        own_range = (second << 16 | first).to_bytes(4, sys.byteorder)
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, own_range)
        except OSError:
            pytest.skip("before Linux 6.3 no socket has a range of ports of its own")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        refuse_to_bind(other, 0)
