"""Copies of one table on several ranks. A checkpoint keeps one of them, so they must be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recsdk_core.errors import CheckpointError

__all__ = ["refuse_different"]


def refuse_different(of_ranks: Sequence[Mapping[str, str]], remedy: str) -> None:
    """Raises CheckpointError if ranks have different rows of a table, or another order of them.

    `of_ranks` has for each rank the digests of its copies, by table name. `remedy` ends the
    message.
    """
    first: dict[str, tuple[int, str]] = {}
    for rank, digests in enumerate(of_ranks):
        for table, digest in digests.items():
            other, expected = first.setdefault(table, (rank, digest))
            if digest != expected:
                raise CheckpointError(
                    f"table {table!r} is whole on ranks {other} and {rank}, which have different "
                    "rows, or the same rows in another order; under this name a checkpoint can "
                    f"hold the rows of one rank only; {remedy}"
                )
