"""What a rank is told of the others."""

from __future__ import annotations

from collections.abc import Collection

from recsdk_core import RecsdkError, agreement

__all__ = ["EndOfData", "PeerError", "is_known"]


class EndOfData(RecsdkError):
    """A rank has no further batch, so no rank trains the batch that was to be exchanged.

    Not an error: a pipeline trains what it has in flight and then raises StopIteration.
    """


class PeerError(RecsdkError):
    """Another rank failed, or could not be reached."""

    def __init__(
        self, rank: int | None, message: str, step: int | None = None, *, is_final: bool = False
    ) -> None:
        self.rank = rank
        """The rank that failed; None if the process group itself failed."""
        self.message = message
        """What that rank said."""
        self.step = step
        """The step that was to be exchanged; None: outside of any exchange."""
        self.is_final = is_final
        """Whether the process groups were closed for it, so that the ranks must be restarted."""
        where = "the exchange between hosts" if rank is None else f"rank {rank}"
        when = "" if step is None else f" in step {step}"
        hint = " (the process groups are closed; restart the ranks)" if is_final else ""
        super().__init__(f"{where} failed{when}: {message}{hint}")


def is_known(error: BaseException, ranks: Collection[int] | None = None) -> bool:
    """Whether these ranks know of an error, or have one of their own in its place. None: all."""
    is_of_peer = isinstance(error, PeerError) and error.rank is not None
    return isinstance(error, EndOfData) or agreement.is_known(error, ranks, unmarked=is_of_peer)
