"""Saving the tables of one model, on one process or on many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from recsdk_core import _ext
from recsdk_core._internal.packed_state import unpack_state
from recsdk_core.admission import Admit
from recsdk_core.checkpoint.admission_records import Records
from recsdk_core.checkpoint.columns import shared_name
from recsdk_core.checkpoint.model.held_back import warn_of_rows_held_back
from recsdk_core.checkpoint.model.shards import Shard, ShardCut, entry_of, row_fields
from recsdk_core.checkpoint.participants import Ranks, begin
from recsdk_core.checkpoint.reading import Position, Progress
from recsdk_core.checkpoint.saving import Codec, SaveOptions, ShardFile, fields_of, save_shards
from recsdk_core.checkpoint.stores import Store, Target, open_store

__all__ = ["Cuts", "save_tables"]


class Cuts:
    """What the shards of one rank hold now, until `finish`; training may go on meanwhile."""

    def __init__(
        self,
        shards: Sequence[Shard],
        is_delta: bool,
        max_copy_bytes: int | None = None,
        *,
        one_thread: bool = False,
    ) -> None:
        """`one_thread`: saving takes one thread, not two: for saving beside training."""
        self._shards = shards
        self.cuts: list[Any] = []  # `_ext.Cut` each, or what the shard's `cut` gives
        self.files: list[ShardFile] = []
        """The shards as `save_shards` takes them."""
        self._open: list[tuple[Shard, Any]] = []
        """The cuts that have not ended."""
        self._position: Position | None = None
        """Where the shards stand, once they are saved."""
        try:
            for shard in shards:
                cut = _cut(shard, is_delta, max_copy_bytes)
                self._open.append((shard, cut))
                self.cuts.append(cut)
                self.files.append(_shard_file(shard, cut, is_delta, one_thread))
                if cut.shared_rows is not None:
                    self.files.append(_shared_file(shard, cut, is_delta))
        except BaseException:
            self.finish()
            raise

    @property
    def num_bytes(self) -> int:
        """About how many bytes they take in files."""
        total = 0
        for shard, cut in zip(self._shards, self.cuts, strict=True):
            width = sum(item.width for item in row_fields(shard.table))
            total += cut.num_rows * (8 + 4 * width) + cut.num_erased * 8
            total += 0 if shard.table.admission is None else 24 * len(cut.admission[0])
        return total

    def finish(self) -> None:
        """Ends the cuts; if they were not saved, their changes still count for the next delta.

        The position is set first: as soon as a cut has ended, another thread may take the next one.
        Call it again if it was interrupted.
        """
        while self._open:
            shard, cut = self._open[0]
            if self._position is not None:
                shard.table._position = self._position
            cut.finish(self._position is not None)
            del self._open[0]

    def save(self, store: Store, ranks: Ranks, options: SaveOptions) -> Position:
        """Saves and ends the cuts."""
        try:
            self._position = save_shards(store, ranks, self.files, options)
        finally:
            self.finish()
        return self._position


def save_tables(
    give: Callable[[], tuple[Sequence[Shard], SaveOptions]], ranks: Ranks, path: Any
) -> Position:
    """Saves the shards of all ranks as one checkpoint; all ranks must call it.

    `give` gives this rank's shards, and the options, which must be the same on all ranks but for
    `user_state` and `progress`; what it raises all ranks raise. The rows are cut at once, before
    any rank waits for another. Raises CheckpointError on every rank if one fails; then nothing was
    saved.
    """
    made: list[tuple[Store, Cuts, SaveOptions]] = []

    def cut() -> tuple[dict[str, object], None]:
        shards, options = give()
        made.append((open_store(path), Cuts(shards, options.is_delta), options))
        return options.shared, None

    try:
        begin(ranks, "save", cut)
        [(store, cuts, options)] = made
        return cuts.save(store, ranks, options)
    except BaseException:
        for _, cuts, _ in made:
            cuts.finish()
        raise


def _cut(shard: Shard, is_delta: bool, max_copy_bytes: int | None) -> _ext.Cut | ShardCut:
    shard.table._check_cut(is_delta)
    if shard.cut is not None:
        return shard.cut(is_delta)
    warn_of_rows_held_back(shard.table, "save")
    return shard.table._engine.cut(is_delta, max_copy_bytes)


def _shard_file(
    shard: Shard, cut: _ext.Cut | ShardCut, is_delta: bool, one_thread: bool
) -> ShardFile:
    def write(
        target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        if not isinstance(cut, _ext.Cut):
            return cut.write(target, token, codec, progress)
        told = None if progress is None else _differences(progress)
        return _ext.write_rows(
            cut,
            target.write,
            token=token,
            codec=codec,
            progress=told,
            name=target.name,
            in_background=not one_thread,
            sums_content=target.sums_content,
        )

    admission = shard.table.admission
    return ShardFile(
        entry=entry_of(shard, cut, shard.owner.sharding),
        write=write,
        index=shard.owner.rank,
        num_shards=shard.owner.world_size,
        position=shard.table._position if is_delta else None,
        records=None if admission is None else partial(_records_of, admission, cut),
    )


def _shared_file(shard: Shard, cut: _ext.Cut | ShardCut, is_delta: bool) -> ShardFile:
    """The rows that keys without one share, all that the shard has; a delta has them all, too."""
    table, own = shard.table, cut.shared_rows
    assert own is not None
    is_owned = shard.owner.owns(own[0])
    keys, weights, packed = own[0][is_owned], own[1][is_owned], own[2][is_owned]
    state = unpack_state(packed, table.state_fields) if table.state_fields else {}
    fields = fields_of(table.dim, table.state_fields)

    def write(
        target: Target, token: bytes, codec: Codec, progress: Progress | None
    ) -> _ext.RowFileSummary:
        return _ext.write_row_file(
            target.write,
            kind="delta" if is_delta else "snapshot",
            dim=table.dim,
            fields=[(each.name, each.dtype, each.width) for each in fields],
            blocks=[_ext.RowBlock.rows(keys, {"weight": weights, **state})] if len(keys) else [],
            token=token,
            codec=codec,
            name=target.name,
            sums_content=target.sums_content,
        )

    entry = entry_of(shard, cut, shard.owner.sharding)
    return ShardFile(
        entry=replace(
            entry,
            name=shared_name(entry.name),
            columns=None,
            fields=fields,
            default=None,
            eviction=None,
            admission=None,
        ),
        write=write,
        index=shard.owner.rank,
        num_shards=shard.owner.world_size,
        position=table._position if is_delta else None,
    )


def _records_of(rule: Admit, cut: Any) -> Records:
    return Records.of_rule(rule, cut.admission)


def _differences(progress: Progress) -> Callable[[int], None]:
    """Turns the bytes so far into the bytes since the last call."""
    last = 0

    def call(num_bytes: int) -> None:
        nonlocal last
        progress(num_bytes - last)
        last = num_bytes

    return call
