"""Settings of the process: the engine's thread pool and its instruction set."""

from __future__ import annotations

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within, require_name

__all__ = ["available_isas", "isa", "num_threads", "set_isa", "set_num_threads", "version"]

version: str = _ext.version()
"""The engine's version."""


def available_isas() -> list[str]:
    """Instruction sets that this build has kernels for and this machine runs, slowest first."""
    return _ext.available_isas()


def isa() -> str:
    """The instruction set in use: the fastest available, or what RECSDK_ISA names.

    Results are bit-equal on all instruction sets. Raises ValueError if RECSDK_ISA names one that is
    not available.
    """
    return _ext.isa()


def set_isa(name: str) -> None:
    """Switches the process to another instruction set; meant for tests.

    Do not call it while other calls run. Raises ValueError, which names the available ones, for any
    other.
    """
    require_name("set_isa", name)
    _ext.set_isa(name)


def num_threads() -> int:
    """Threads of the process-wide pool, the caller's included.

    By default RECSDK_NUM_THREADS, else the number of processors that the process may run on.
    Results do not depend on it.
    """
    return _ext.num_threads()


def set_num_threads(count: int) -> None:
    """Changes the size of the pool, 1 to 1024. Running calls go on with the threads they have.

    After a fork the child gets a fresh pool of the same size. Raises ValueError outside that range.
    """
    _ext.set_num_threads(int_within("set_num_threads", 1, 1025, count=count))
