"""The methods of `Table` for saving and loading, on one process.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from recsdk_core import _ext
from recsdk_core._internal.checks import int_within
from recsdk_core._internal.interruptions import held_back
from recsdk_core.checkpoint.handle import SaveHandle
from recsdk_core.checkpoint.model.loading import Loading, load_tables
from recsdk_core.checkpoint.model.saving import Cuts, save_tables
from recsdk_core.checkpoint.model.shards import Shard
from recsdk_core.checkpoint.participants import OneRank
from recsdk_core.checkpoint.reading import Checkpoint, Position, Progress
from recsdk_core.checkpoint.saving import Codec, SaveOptions
from recsdk_core.checkpoint.stores import Store, open_store
from recsdk_core.checkpoint.user_state import pack
from recsdk_core.errors import BusyError, CheckpointError

if TYPE_CHECKING:
    from recsdk_core.table import Table

__all__ = ["SavesAndLoads"]


class SavesAndLoads:
    """The methods of `Table` that save and load; mixed into it."""

    _engine: _ext.Table
    _position: Position | None = None
    _handle: SaveHandle | None = None

    @property
    def position(self) -> Position | None:
        """Where its last save or load stands; None: there was none, or its rows were replaced."""
        return self._position

    def save(
        self,
        path: Any,
        *,
        overwrite: bool = False,
        step: int | None = None,
        user_state: Any = None,
        codec: Codec = "none",
        progress: Progress | None = None,
    ) -> Position:
        """Saves all visible rows, optimizer state and metadata as a checkpoint, a snapshot.

        `path` (1 to 1024 characters) is a local folder to make, or an fsspec URL. If a checkpoint
        is there already, it raises unless `overwrite`, which keeps the old one until the new one is
        complete. `step` and `user_state` (JSON values, bytes, numpy arrays) are saved too. `codec`
        "zstd" compresses. `progress` is called with the bytes written since its last call. Rows of
        batches in flight that carry a step are left out, as in `export`.

        Cost: one pass over the rows, streamed, with at most 64 MiB of extra memory beside copies of
        rows that other threads update meanwhile. Raises CheckpointError if it cannot save; then
        nothing was saved, and the changes still count for the next delta.

        >>> import numpy as np, tempfile
        >>> from recsdk_core import Table
        >>> table = Table(dim=2, name="user")
        >>> rows = table.find_or_insert(np.array([7, -1]))
        >>> folder = tempfile.mkdtemp()
        >>> _ = table.save(f"{folder}/first")
        >>> table.erase(np.array([7]))
        >>> _ = table.save_delta(f"{folder}/second")
        >>> other = Table(dim=2, name="user")
        >>> _ = other.load(f"{folder}/second")
        >>> len(other), bool((other.lookup(np.array([-1])) == rows[1]).all())
        (1, True)
        """
        return self._save(
            path,
            SaveOptions(
                overwrite=overwrite,
                step=step,
                user_state=user_state,
                codec=codec,
                progress=progress,
            ),
        )

    def save_delta(
        self,
        path: Any,
        *,
        overwrite: bool = False,
        step: int | None = None,
        user_state: Any = None,
        codec: Codec = "none",
        progress: Progress | None = None,
    ) -> Position:
        """Saves the rows that changed, and the keys that left, since the last save or load.

        The checkpoint is a delta; loading it needs the checkpoints of its chain before it.
        Arguments and errors as in `save`. It also raises CheckpointError if nothing was saved or
        loaded before, or if a checkpoint of the chain is neither where it was saved or loaded nor
        beside `path`: then save in full. Cost: that of `save` for the changed rows, and reading the
        manifest of each checkpoint of the chain.
        """
        return self._save(
            path,
            SaveOptions(
                is_delta=True,
                overwrite=overwrite,
                step=step,
                user_state=user_state,
                codec=codec,
                progress=progress,
            ),
        )

    def save_async(
        self,
        path: Any,
        *,
        delta: bool = False,
        max_copy_bytes: int | None = None,
        overwrite: bool = False,
        step: int | None = None,
        user_state: Any = None,
        codec: Codec = "none",
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Saves in the background what the table holds now, while training goes on.

        An update first copies the rows that are not yet written. When the copies hold
        `max_copy_bytes` (None: no limit), updates wait for the writer, and `stats()` counts it; the
        copies take up to 8 MiB more. With eviction, what it keeps of the rows is copied at once, 8
        to 48 bytes a row. Otherwise the writer gives way to updates: under updates
        without a pause it takes a fifth of a processor. The first steps of training, about 40,
        ready memory for it, which stays (`tracking_bytes` of `stats()`): two bits per row, and
        copies of two steps and 8 MiB more, but at most 64 MiB, an eighth of the rows, and the last
        `max_copy_bytes`. Steps beside an earlier save wait for fresh memory as well. Apart from its
        token the checkpoint is the same, byte for byte, as `save` or (with `delta`) `save_delta`
        would write at this moment; `user_state` is copied, too. Other arguments as in `save`;
        `progress` is called on another thread.

        Returns a handle with `wait()`, `result()` and `progress` at once; its `wait` raises errors
        of the save. Raises BusyError while another save of this table is under way.
        """
        if max_copy_bytes is not None:
            max_copy_bytes = int_within("Table.save_async", 0, 2**63, max_copy_bytes=max_copy_bytes)
        options = SaveOptions(
            is_delta=delta,
            overwrite=overwrite,
            step=step,
            user_state=pack(user_state),
            codec=codec,
            progress=progress,
        )
        store = open_store(path)
        before = self._handle
        try:
            with held_back():
                self._handle = self._begin_save(store, options, max_copy_bytes)
        except BaseException:
            if self._handle is not None and self._handle is not before:
                self._handle._give_up("as the call that began it was interrupted")
            raise
        return self._handle

    def _begin_save(
        self, store: Store, options: SaveOptions, max_copy_bytes: int | None
    ) -> SaveHandle:
        shard = Shard(table=self._table())
        cuts = Cuts([shard], options.is_delta, max_copy_bytes, one_thread=True)

        def work(count: Progress) -> Position:
            cuts.cuts[0].prepare_copies()
            told = replace(options, progress=_both(count, options.progress))
            return cuts.save(store, OneRank(), told)

        try:
            return SaveHandle(work, cuts.cuts[0], cuts.num_bytes, store.location)
        except BaseException:
            cuts.finish()
            raise

    def load(
        self,
        path: Any | Sequence[Any],
        *,
        name: str | None = None,
        allow: Collection[str] = (),
        progress: Progress | None = None,
    ) -> Checkpoint:
        """Replaces all rows, the update count and the learning rate by those of a checkpoint.

        `path` is that of a snapshot, or of a delta whose predecessors lie in the same folder (which
        a URL `dir::...` does not show), or a list of paths: a snapshot, then its deltas in order.
        Checkpoints of any number of ranks and any sharding rule load. `name` is the table's name in
        the checkpoint, by default this table's. `allow` names what may differ: "optimizer" drops
        the saved state, "seed" and "initializer" accept that rows made later differ, "eviction"
        drops what eviction kept of keys, "admission" how often keys without a row were seen.

        With eviction, what the saved table's kept of keys and its clock are loaded; it must have
        kept all that this table's rule needs, or nothing: then keys count as never seen, and leave
        first. Where there is too little room, the lowest leave, those below `min_age` too.

        Returns the checkpoint, for its `user_state()` and `manifest.step`. Everything is read and
        verified before the first row changes. Raises CheckpointError for what is missing, damaged
        or does not fit this table, CapacityError beyond `max_rows`, BusyError while batches are in
        flight; then the table is unchanged. Loading into a table that holds rows needs memory for
        both.
        """
        if name is not None and not isinstance(name, str):
            raise TypeError(f"Table.load: name must be a string, got {name!r}")
        self._refuse_while_saving()
        table = self._table()
        loading = Loading(
            names={} if name is None else {table.name: name},
            allow=allow,
            may_lack=True,
            progress=progress,
        )
        return load_tables(lambda: ([Shard(table=table)], loading), OneRank(), path)

    def _table(self) -> Table:
        return cast("Table", self)

    def _refuse_while_saving(self) -> None:
        if self._handle is None:
            return
        if not self._handle.is_done:
            raise BusyError(
                f"table {self._table().name!r} is being saved in the background; wait for that "
                "first"
            )
        self._handle._end_inherited_cut()

    def _check_cut(self, is_delta: bool) -> None:
        """Raises if its rows, or what changed, cannot be saved now."""
        self._refuse_while_saving()
        if is_delta and self._position is None:
            raise CheckpointError(
                f"table {self._table().name!r}: a delta needs a checkpoint before it: save or load "
                "one in full first"
            )

    def _save(self, path: Any, options: SaveOptions) -> Position:
        shards = [Shard(table=self._table())]
        return save_tables(lambda: (shards, options), OneRank(), path)


def _both(first: Progress, second: Progress | None) -> Progress:
    def call(num_bytes: int) -> None:
        first(num_bytes)
        if second is not None:
            second(num_bytes)

    return call
