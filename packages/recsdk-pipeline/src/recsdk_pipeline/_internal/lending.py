"""Memory that a process lends to others, and lends again when it is back.

New shared memory for each message costs more than what is sent: the system clears it page by page,
here and there, and hands its descriptor over by a socket and a thread. Lent memory is mapped once,
and a message says where in it to look. Shapes: K bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Lender", "Loan", "borrow"]

_PAGE = 4096
_MOST_LOANS = _PAGE // 16
"""Two numbers of 64 bits each lie in the first page: the turn last borrowed and last returned."""


class Loan(NamedTuple):
    """Where bytes lie that were lent; it goes to the borrower by pickle."""

    process: int
    descriptor: int
    file: int
    """The number by which the system tells files apart."""
    number: int
    turn: int
    """How often this memory was lent."""
    start: int
    size: int


@dataclass
class _Lot:
    number: int
    start: int
    room: int
    turn: int = 0


class Lender:
    """Lends memory of this process, at most `most_bytes`, to who has `Loan`s. Thread-safe.

    Only memory that was lent is taken from the system. It is there until this process and all
    borrowers let it go: who has not begun to borrow when the lender is gone is too late. Raises
    OSError where the system has no such memory.
    """

    def __init__(self, most_bytes: int) -> None:
        self._descriptor = os.memfd_create("recsdk-lent")
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, _PAGE + most_bytes)
        self._file = os.fstat(self._descriptor).st_ino
        self._memory, self._turns = _mapped(os.getpid(), self._descriptor, self._file)
        self._lots: list[_Lot] = []
        self._end = _PAGE
        self._lock = threading.Lock()

    def lend(self, size: int) -> tuple[Loan, Any] | None:
        """What to send, and the memory (K,) uint8, to be written before; None: too much is out."""
        with self._lock:
            lot = self._returned(size) or self._new(size)
            if lot is None:
                return None
            lot.turn += 1
        loan = Loan(
            os.getpid(), self._descriptor, self._file, lot.number, lot.turn, lot.start, size
        )
        return loan, self._memory[lot.start : lot.start + size]

    def _returned(self, size: int) -> _Lot | None:
        """The smallest that is back and fits."""
        fitting = [
            lot
            for lot in self._lots
            if lot.room >= size and int(self._turns[lot.number, 1]) == lot.turn
        ]
        return min(fitting, key=lambda lot: lot.room, default=None)

    def _new(self, size: int) -> _Lot | None:
        room = -(-(size + size // 8) // _PAGE) * _PAGE  # for others nearly as large
        if len(self._lots) == _MOST_LOANS or self._end + room > len(self._memory):
            return None
        lot = _Lot(len(self._lots), self._end, room)
        self._lots.append(lot)
        self._end += room
        return lot


def borrow(loan: Loan) -> Any:
    """The bytes of a loan (K,), returned with the last array or tensor of them. Once a loan.

    Raises OSError if the lender ended before this process had anything of it, ValueError if the
    loan was borrowed before.
    """
    memory, turns = _MAPPED.of(loan)
    if int(turns[loan.number, 0]) >= loan.turn:
        raise ValueError(f"{loan} was borrowed before; receive a message once")
    turns[loan.number, 0] = loan.turn
    return np.asarray(_Borrowed(memory, turns, loan))


class _Borrowed:
    """What numpy takes for the owner of an array, and lets go with the last view of it."""

    def __init__(self, memory: Any, turns: Any, loan: Loan) -> None:
        self._memory, self._turns = memory, turns
        self._number, self._turn = loan.number, loan.turn
        self._process, self._process_now = os.getpid(), os.getpid  # modules are emptied at the end
        place = (memory.__array_interface__["data"][0] + loan.start, False)
        self.__array_interface__ = {
            "data": place,
            "shape": (loan.size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if self._process_now() == self._process:  # a forked process has not borrowed it
            self._turns[self._number, 1] = self._turn


def _mapped(process: int, descriptor: int, file: int) -> tuple[Any, Any]:
    """The memory (K,) uint8 of a lender, and its turns."""
    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    try:
        if os.fstat(opened).st_ino != file:
            raise FileNotFoundError(f"process {process} that lent memory has ended")
        memory = np.frombuffer(mmap.mmap(opened, 0), np.uint8)
    finally:
        os.close(opened)
    return memory, memory[:_PAGE].view(np.int64).reshape(_MOST_LOANS, 2)


class _Mapped:
    """Memory of lenders. Thread-safe."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked process, where nobody would release a lock that was held."""
        self._lock = threading.Lock()
        self._of_lender: dict[tuple[int, int, int], tuple[Any, Any]] = {}

    def of(self, loan: Loan) -> tuple[Any, Any]:
        lender = loan.process, loan.descriptor, loan.file
        with self._lock:
            found = self._of_lender.get(lender)
            if found is None:
                for other in [each for each in self._of_lender if not _is_there(*each)]:
                    del self._of_lender[other]
                found = self._of_lender[lender] = _mapped(*lender)
            return found


def _is_there(process: int, descriptor: int, file: int) -> bool:
    try:
        return os.stat(f"/proc/{process}/fd/{descriptor}").st_ino == file
    except OSError:
        return False


_MAPPED = _Mapped()
os.register_at_fork(after_in_child=_MAPPED.forget)
