"""What the package raises for run-time conditions; caller mistakes are ValueError and TypeError."""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "BusyError",
    "CapacityError",
    "CheckpointError",
    "NonFiniteError",
    "OutOfMemoryError",
    "RecsdkError",
]


class RecsdkError(RuntimeError):
    """A run-time condition that the caller could not have prevented.

    The base of every recsdk error that is not a caller's mistake. A call that raises has changed
    nothing but spare capacity.
    """


class CapacityError(RecsdkError):
    """A fixed limit was reached."""


class BusyError(RecsdkError):
    """The call is not allowed while batches are in flight."""


class CheckpointError(RecsdkError):
    """A checkpoint is damaged, does not fit what it is loaded into, or cannot be written."""


class NonFiniteError(RecsdkError):
    """A gradient was infinite or not a number, and the table was told to raise on that."""


class OutOfMemoryError(RecsdkError, MemoryError):
    """The operating system gave no memory."""


class BackendUnavailable(RecsdkError):
    """The backend that was asked for is not on this machine."""
