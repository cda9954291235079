"""How the ranks that write or read one checkpoint agree, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from recsdk_core.agreement import attempt, raise_together, text_of
from recsdk_core.errors import CheckpointError

__all__ = ["OneRank", "Ranks", "begin", "refuse_different", "share", "together"]

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that take part."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in order; every rank must call it. Values are plain data."""


class OneRank:
    """A process on its own."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """The value alone."""
        return [value]


def together(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Runs work on every rank; returns the results of all, or raises on every rank if one failed.

    A rank that failed raises its own error, the others CheckpointError with its number and text.
    """
    result, error = attempt(work)
    replies = ranks.gather((None if error is None else text_of(error), result))
    raise_together(error, [text for text, _ in replies], _failed)
    return [result for _, result in replies]


def begin(ranks: Ranks, call: str, work: Callable[[], tuple[Mapping[str, object], T]]) -> list[T]:
    """Runs the first work of a call on every rank, as `together` does; the results of all.

    It costs one exchange, in which the ranks also tell what they call and with what: `work` gives,
    before its result, the arguments that all must be given alike, as plain data. Raises
    CheckpointError on every rank if they were not, or if one calls something else. So every call
    begins with it.
    """
    replies = together(ranks, lambda: (call, *work()))
    first_call, first, _ = replies[0]
    for rank, (other_call, given, _) in enumerate(replies):
        if other_call != first_call:
            raise CheckpointError(
                f"rank 0 calls {first_call} while rank {rank} calls {other_call}; all ranks must "
                "make the same calls in the same order"
            )
        for name, value in first.items():
            if given[name] != value:
                raise CheckpointError(
                    f"{call}: {name} is {value!r} on rank 0 and {given[name]!r} on rank {rank}; "
                    "all ranks must pass the same"
                )
    return [result for *_, result in replies]


def _failed(rank: int, text: str) -> CheckpointError:
    return CheckpointError(f"rank {rank} failed, so no rank went on: {text}")


def share(ranks: Ranks, work: Callable[[], T]) -> T:
    """Runs work on rank 0 only; its result on every rank."""
    return together(ranks, lambda: work() if ranks.rank == 0 else None)[0]  # type: ignore[return-value]


def refuse_different(of_ranks: Sequence[Mapping[str, str]], what: str, remedy: str) -> None:
    """Raises CheckpointError if ranks have different rows of a table.

    `of_ranks` has for each rank the digests of its copies, by table name. The message says `what`
    they have, and ends with `remedy`.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in enumerate(of_ranks):
        for table, digest in digests.items():
            other, expected = first.setdefault(table, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"table {table!r} is whole on ranks {other} and {rank}, which have {what}; "
                    f"under this name a checkpoint can hold the rows of one rank only; {remedy}"
                )
