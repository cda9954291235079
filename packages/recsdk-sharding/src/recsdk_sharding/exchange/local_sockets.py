"""Sockets between the ranks of one host, for what is small and has to be there soon.

A message costs two calls of the system on each side, and no thread but those that send and wait:
some forty microseconds, where gloo takes ten times as long. A rank that has gone shows at once, as
its sockets close with it. A socket is found by a random name, which has no file; who may connect is
checked.

Shape letter: W ranks.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from recsdk_core.agreement import attempt
from recsdk_sharding.exchange.hosts import Gather, are_on_one_host

__all__ = ["LocalSockets", "close_local_sockets"]

_LENGTH = struct.Struct("=q")
"""Before each message: its bytes."""
_HELLO = struct.Struct("=16sq")
"""What a rank says when it connects: the name of the socket, and its rank."""
_NAME = struct.Struct("=2q")
_BUFFER_BYTES = 1 << 16
_SECONDS_TO_CONNECT = 30.0
_MOST_MILLISECONDS = 2**31 - 1
"""That `poll` takes: 24 days."""


class _Peer:
    """The socket to one rank, and what came from there."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank = rank
        self.socket = connected
        self.num_arrived = 0
        """Messages that came whole."""
        self.arrived: dict[int, memoryview] = {}
        """Those that nobody took, by number."""
        self.wanted: tuple[int, memoryview] | None = None
        """Where the message of a number is to be put."""
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._end = 0
        """Of what the buffer has, which begins with a message's length."""
        self._rest: memoryview | None = None
        """What is still to come of a message that has memory of its own."""
        self._whole = memoryview(b"")
        """That message."""

    def read(self, flags: int = 0) -> bool:
        """Takes what the system has, waiting for some unless `flags` say otherwise.

        Returns False if there is nothing, at the socket's timeout too. Raises ConnectionError if
        the rank has closed its end.
        """
        into = self._buffer[self._end :] if self._rest is None else self._rest
        try:
            count = self.socket.recv_into(into, 0, flags)
        except BlockingIOError:
            return False
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        if self._rest is None:
            self._end += count
            self._take_from_buffer()
        else:
            self._rest = self._rest[count:]
            if not self._rest:
                self._rest = None
                self._keep(self._whole)
        return True

    def _take_from_buffer(self) -> None:
        begin, end = 0, self._end
        while end - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            begin += _LENGTH.size
            have = min(length, end - begin)
            if have == length:
                self._keep(memoryview(bytes(self._buffer[begin : begin + have])))
            elif length <= _BUFFER_BYTES - _LENGTH.size:
                begin -= _LENGTH.size
                break
            else:
                self._whole = self._memory_for(length)
                self._whole[:have] = self._buffer[begin:end]
                self._rest = self._whole[have:]
            begin += have
        self._end = end - begin
        if begin and self._end:
            self._buffer[: self._end] = bytes(self._buffer[begin:end])

    def _memory_for(self, length: int) -> memoryview:
        wanted = self.wanted
        if wanted is not None and wanted[0] == self.num_arrived and len(wanted[1]) == length:
            return wanted[1]
        return memoryview(bytearray(length))

    def _keep(self, message: memoryview) -> None:
        self.arrived[self.num_arrived] = message
        self.num_arrived += 1

    def take_into(self, number: int, into: memoryview) -> None:
        """Moves a message that has arrived to where it is wanted."""
        message = self.arrived.pop(number)
        if message.obj is not into.obj:
            _check_length(self.rank, len(message), len(into))
            into[:] = message


class LocalSockets:
    """The sockets of a process group whose ranks are on one host. Thread-safe.

    All ranks must send the same messages in the same order. What is raised for a rank that has
    gone, a timeout or an interrupt closes the sockets, so the others raise too.
    """

    def __init__(self, rank: int, connected: dict[int, socket.socket], timeout: timedelta) -> None:
        """Use `connect`. `connected`: by rank, without this one."""
        self.rank = rank
        self.world_size = len(connected) + 1
        self._peers = [_Peer(other, connected[other]) for other in sorted(connected)]
        self._seconds = timeout.total_seconds()
        self._num_sent = 0
        self._own: dict[int, Sequence[int]] = {}
        """This rank's numbers of each gathering that nobody took."""
        self._lock = threading.Lock()
        self._is_closed = False
        for peer in self._peers:
            peer.socket.setblocking(True)
            limit = struct.pack("@ll", int(self._seconds), int(self._seconds % 1 * 1e6))
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        with _all_lock:
            _all.add(self)

    @classmethod
    def connect(cls, rank: int, gather: Gather, timeout: timedelta) -> LocalSockets | None:
        """Those of a group of several ranks; None unless all are on one host and could connect.

        All ranks must call it in the same order; it runs at most four gatherings. `timeout`: of a
        wait for other ranks.
        """
        is_possible, _ = are_on_one_host(gather)
        if not is_possible:
            return None
        listening, _ = attempt(_listen)
        connected: dict[int, socket.socket] = {}
        try:
            name = b"" if listening is None else listening.getsockname()[-16:]
            told = gather([int(bool(name)), *_NAME.unpack(name or bytes(16))])
            names = [_NAME.pack(*words) if is_listening else b"" for is_listening, *words in told]
            for step in (_connect, _accept):
                error: BaseException | None = None
                if all(names):
                    assert listening is not None
                    _, error = attempt(partial(step, listening, rank, names, connected))
                if not all(own for (own,) in gather([int(all(names) and error is None)])):
                    _close(connected)
                    return None
        except BaseException:
            _close(connected)
            raise
        finally:
            if listening is not None:
                listening.close()
        return cls(rank, connected, timeout)

    def start(self, own: Sequence[int]) -> int:
        """Sends numbers, int64, to all ranks; the result is for `wait`."""
        message = struct.pack(f"={len(own)}q", *own)
        parts = [memoryview(message)] * len(self._peers)
        with self._lock, _Closing(self):
            number = self._send(parts)
            self._own[number] = own
        return number

    def wait(self, number: int) -> list[list[int]]:
        """What all ranks sent, rank by rank, equally many numbers each. Once."""
        with self._lock, _Closing(self):
            own = list(self._own.pop(number))
            form = f"={len(own)}q"
            found: list[list[int]] = []
            self._read_until(number)
            for peer in self._peers:
                message = peer.arrived.pop(number)
                _check_length(peer.rank, len(message), 8 * len(own))
                found.append(list(struct.unpack(form, message)))
        found.insert(self.rank, own)
        return found

    def has_arrived(self, number: int) -> bool:
        """Whether `wait` would return or raise at once; it may say no where it would."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            with _Closing(self):
                for peer in self._peers:
                    while peer.num_arrived <= number:
                        if not peer.read(socket.MSG_DONTWAIT):
                            return False
            return True
        except Exception:  # `wait` raises it, too
            return True
        finally:
            self._lock.release()

    def exchange(self, sent: Sequence[memoryview], received: Sequence[memoryview]) -> None:
        """Sends bytes to each rank, and fills `received` with what they sent; W of each.

        What this rank sends itself is not copied.
        """
        with self._lock, _Closing(self):
            number = self._num_sent
            for peer in self._peers:
                peer.wanted = number, received[peer.rank]
            try:
                self._send([sent[peer.rank] for peer in self._peers])
                self._read_until(number)
                for peer in self._peers:
                    peer.take_into(number, received[peer.rank])
            finally:
                for peer in self._peers:
                    peer.wanted = None

    def close(self) -> None:
        """Ends all calls here and on the other ranks, now and later, with an error. Any thread."""
        self._is_closed = True
        for peer in self._peers:
            with suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Closes this process's ends only, in a fork that has a copy of them."""
        self._is_closed = True
        _close({peer.rank: peer.socket for peer in self._peers})

    def __del__(self) -> None:
        _close({peer.rank: peer.socket for peer in self._peers})

    def _send(self, parts: Sequence[memoryview]) -> int:
        """Sends a message to each of the others; its number."""
        left: dict[int, list[memoryview]] = {}
        for peer, part in zip(self._peers, parts, strict=True):
            rest = _sent_at_once(peer.socket, [memoryview(_LENGTH.pack(len(part))), part])
            if rest:
                left[peer.socket.fileno()] = rest
        if left:
            self._send_rest(left)
        self._num_sent += 1
        return self._num_sent - 1

    def _send_rest(self, left: dict[int, list[memoryview]]) -> None:
        """Sends what the system had no room for; reads meanwhile, as the others may do the same."""
        peers = {peer.socket.fileno(): peer for peer in self._peers}
        polled = select.poll()
        for file in peers:
            polled.register(file, select.POLLIN | (select.POLLOUT if file in left else 0))
        end = time.monotonic() + self._seconds
        while left:
            milliseconds = max(0.0, end - time.monotonic()) * 1e3
            ready = polled.poll(min(milliseconds, _MOST_MILLISECONDS))
            if not ready:
                raise TimeoutError
            for file, events in ready:
                if events & ~select.POLLOUT:
                    try:
                        peers[file].read(socket.MSG_DONTWAIT)
                    except ConnectionError:
                        if file in left:
                            raise
                        polled.unregister(file)  # it has this message; who waits for more raises
                if file in left and events & select.POLLOUT:
                    left[file] = _sent_at_once(peers[file].socket, left[file])
                    end = time.monotonic() + self._seconds
                    if not left[file]:
                        del left[file]
                        polled.modify(file, select.POLLIN)

    def _read_until(self, number: int) -> None:
        """Waits for a message of all ranks.

        Takes earlier ones of every rank first: else two ranks that wait for a late one may keep two
        others, which they wait for, from sending an early one.
        """
        for each in range(min(peer.num_arrived for peer in self._peers), number + 1):
            for peer in self._peers:
                while peer.num_arrived <= each:
                    if not peer.read():
                        raise TimeoutError


class _Closing:
    """Closes the sockets if anything is raised inside; says in words what it was."""

    def __init__(self, owner: LocalSockets) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        if self._owner._is_closed:
            raise dist.DistNetworkError("the connections between the ranks of this host are closed")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        self._owner.close()
        if isinstance(error, TimeoutError):
            seconds = self._owner._seconds
            raise dist.DistNetworkError(
                f"a rank of this host said nothing for {seconds:g} s, the process group's timeout"
            ) from error
        if isinstance(error, OSError):
            raise dist.DistNetworkError(
                f"a rank of this host has gone, or closed its connection: {error}"
            ) from error


def _sent_at_once(to: socket.socket, parts: list[memoryview]) -> list[memoryview]:
    """What the system takes no more of."""
    while parts:
        try:
            count = to.sendmsg(parts, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return parts
        while parts and count >= len(parts[0]):
            count -= len(parts[0])
            parts = parts[1:]
        if parts:
            parts = [parts[0][count:], *parts[1:]]
    return parts


def _check_length(rank: int, found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(
            f"rank {rank} sent {found} bytes where this one expects {expected}: all ranks must "
            "exchange the same things in the same order"
        )


# ---- connecting ---------------------------------------------------------------------------------


def _listen() -> socket.socket:
    """A socket with a random name, which has no file."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(b"\0recsdk-" + secrets.token_bytes(16))
        made.listen(1024)
    except BaseException:
        made.close()
        raise
    return made


def _connect(
    _: socket.socket, rank: int, names: Sequence[bytes], connected: dict[int, socket.socket]
) -> None:
    """Connects to the ranks below this one, which need not have accepted for it."""
    for other in range(rank):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected[other] = made
        made.settimeout(_SECONDS_TO_CONNECT)
        made.connect(b"\0recsdk-" + names[other])
        made.sendall(_HELLO.pack(names[other], rank))


def _accept(
    listening: socket.socket, rank: int, names: Sequence[bytes], connected: dict[int, socket.socket]
) -> None:
    """Accepts the ranks above this one, which have connected, and nobody else."""
    listening.settimeout(_SECONDS_TO_CONNECT)
    while len(connected) < len(names) - 1:
        made, _ = listening.accept()
        other = _rank_of(made, names[rank])
        if other is None or not rank < other < len(names) or other in connected:
            made.close()
            continue
        connected[other] = made


def _rank_of(connected: socket.socket, name: bytes) -> int | None:
    """Which rank has connected to the socket of a name, by its own words; None: none has."""
    connected.settimeout(_SECONDS_TO_CONNECT)
    with suppress(OSError, struct.error):
        if _user_of(connected) == os.geteuid():
            said, other = _HELLO.unpack(connected.recv(_HELLO.size))
            return int(other) if said == name else None
    return None


def _user_of(connected: socket.socket) -> int:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("=3i", credentials)
    return int(user)


def _close(connected: dict[int, socket.socket]) -> None:
    for each in connected.values():
        each.close()


_all: weakref.WeakSet[LocalSockets] = weakref.WeakSet()
_all_lock = threading.Lock()


def close_local_sockets() -> None:
    """Closes those of all groups, as `LocalSockets.close`."""
    with _all_lock:
        every = list(_all)
    for each in every:
        each.close()


def _forget_in_fork() -> None:
    for each in list(_all):
        each.forget()


os.register_at_fork(after_in_child=_forget_in_fork)
