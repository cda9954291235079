"""A growing table of rows addressed by raw 64-bit keys.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core._ext import Bags, Lease
from recsdk_core._internal.checks import (
    int_within,
    require_at_least,
    require_bool,
    require_finite,
    require_float32,
    require_number,
)
from recsdk_core._internal.config import (
    engine_admission,
    engine_default,
    engine_dtype,
    engine_eviction,
    engine_initializer,
    engine_nonfinite,
    engine_on_full,
    engine_optimizer,
    engine_rounding,
)
from recsdk_core._internal.keyed import (
    INT64,
    UINT64,
    Array,
    Keyed,
    OnFull,
    limits_of,
    now_of,
    times_of,
)
from recsdk_core._internal.packed_state import unpack_state
from recsdk_core.admission import Admit
from recsdk_core.checkpoint.table_io import SavesAndLoads
from recsdk_core.errors import BusyError
from recsdk_core.eviction import Evict
from recsdk_core.init import Initializer, Uniform
from recsdk_core.leavers import Leavers, OnOverflow, engine_overflow
from recsdk_core.optim import SGD, Optimizer
from recsdk_core.outcome import Default, Outcome
from recsdk_core.stats import ExportBatch, TableStats

__all__ = ["Array", "ExportBatch", "Lease", "OnFull", "Table", "TableStats"]

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""How weights are stored."""
Rounding: TypeAlias = Literal["stochastic", "nearest"]
"""How updates round to 16 bits."""

_EXPORT_BYTES = 2**24
_EXPORT_ROWS = 2**16


class Table(Keyed, SavesAndLoads):
    """A growing table of rows addressed by raw 64-bit keys.

    Every 64-bit pattern is a legal key. Array arguments may be numpy arrays, torch CPU tensors or
    any DLPack CPU array; they must be contiguous and are read without a copy. Keys are int64 or
    uint64 (the same 64 bits; int32 is widened with a copy), offsets int64 or int32, everything else
    float32. Anything else raises TypeError or ValueError, which says what to pass. Results are
    torch tensors if the first array argument was one, else numpy arrays.

    Thread safety: every method may be called from any thread and runs without the GIL. Reads run
    side by side. A call that raises has changed nothing but spare capacity. Arguments must not
    change until the call has returned: arrays are checked first and read again afterwards, so
    another thread that writes into them can make the call read or write outside of the table, and
    crash the process. A child of fork goes on with a table of its own. Fork only while no other
    thread is inside a call of the table (background saves do not count): otherwise the child finds
    the table locked by a thread that it does not have, and waits for ever.

    >>> import numpy as np
    >>> from recsdk_core import Table, optim
    >>> table = Table(dim=2, optimizer=optim.SGD(lr=0.5), name="user")
    >>> keys = np.array([-1, 9000000000000000000, -1])
    >>> table.find_or_insert(keys).shape
    (3, 2)
    >>> before = table.lookup(keys[:1])
    >>> table.apply_gradients(keys[:1], np.ones((1, 2), dtype=np.float32))
    >>> (before - table.lookup(keys[:1])).tolist()
    [[0.5, 0.5]]
    >>> len(table), -1 in table, 3 in table
    (2, True, False)
    """

    _engine: _ext.Table

    def __init__(
        self,
        dim: int,
        *,
        name: str = "table",
        optimizer: Optimizer = SGD(),
        initializer: Initializer = Uniform(low=-0.01, high=0.01),
        seed: int = 0,
        max_rows: int | None = None,
        eviction_groups: int | None = None,
        owned_groups: tuple[int, int] | None = None,
        on_full: OnFull = "refuse",
        eviction: Evict | None = None,
        admission: Admit | None = None,
        default: Default = Default(),
        on_nonfinite: Literal["apply", "raise", "skip"] = "apply",
        dtype: DType = "float32",
        rounding: Rounding = "stochastic",
        num_threads: int | None = None,
        hash_seed: int | None = None,
    ) -> None:
        """Makes an empty table; it takes no memory for rows until the first insertion.

        `dim` is the row width D, at least 1. `name` and `seed` (0 to 2**64 - 1) identify initial
        rows: a new row is a function of seed, name, key and column only. Beyond `max_rows` rows
        (None: no limit) keys are refused; with `on_full="raise"` the call that brings them raises
        CapacityError and changes nothing. `max_rows` divides evenly over `eviction_groups` groups
        of keys, a power of two; 1: only the whole counts. None: as many as leave each 4,096 rows,
        but no fewer than 64 where that leaves 16, at most 65,536. A key's group follows from its
        virtual shard, so what is refused depends on no order, thread or rank. A table that has a
        part of the groups, from `owned_groups[0]` to below `owned_groups[1]`, has their part of
        `max_rows`, and refuses keys of others. With `eviction` keys leave a full group for those
        that come, see `Evict`; it needs `max_rows`, unless it lets keys leave whatever room there
        is. `on_full` then is about keys for which nobody may leave. With `admission` only some new
        keys get a row, see `Admit`. `default` says what a key without a row reads, see `Default`.
        `on_nonfinite` says what happens to a summed gradient that is infinite or not a number: it
        is applied as torch does ("apply"), the update raises NonFiniteError ("raise"), or that
        key's update is left out ("skip"). Weights are stored as `dtype`: "float32", "bfloat16" or
        "float16"; state, arithmetic and arrays are float32 in any case. `rounding` says how updates
        round to 16 bits: to one of the two neighbours, more likely the nearer, by random bits that
        depend on seed, name, key, column and update count only ("stochastic"), or to the nearest,
        ties to even ("nearest"). Initial rows and `upsert` always round to the nearest.
        `num_threads`, 1 to 1024, limits the threads of this table's calls (None: the pool's size).
        `hash_seed` seeds the index (None: random); no result depends on it.

        Raises ValueError or TypeError, which names the wrong argument.
        """
        width = int_within("Table", 1, INT64, dim=dim)
        number = int_within("Table", 0, UINT64, seed=seed)
        limits = limits_of(
            "Table",
            name=name,
            max_rows=max_rows,
            eviction_groups=eviction_groups,
            owned_groups=owned_groups,
            num_threads=num_threads,
            hash_seed=hash_seed,
        )
        self._engine = _ext.Table(
            width,
            name,
            engine_optimizer(optimizer),
            engine_initializer(initializer, width),
            number,
            limits.hash_seed,
            limits.max_rows,
            limits.eviction_groups,
            limits.owned_groups,
            engine_on_full(on_full),
            engine_default(default),
            engine_nonfinite(on_nonfinite),
            engine_dtype(dtype),
            engine_rounding(rounding),
            limits.num_threads,
            engine_eviction(eviction, limits.max_rows),
            engine_admission(admission),
        )
        self._eviction = eviction
        self._evicted_by_request = 0
        self._admission = admission
        self._dim = width
        self._name = name
        self._optimizer = optimizer
        self._initializer = initializer
        self._seed = number
        self._limits = limits
        self._on_full: OnFull = on_full
        self._default = default
        self._on_nonfinite = on_nonfinite
        self._dtype: DType = dtype
        self._rounding: Rounding = rounding

    @property
    def dim(self) -> int:
        """Row width D."""
        return self._dim

    @property
    def name(self) -> str:
        """Part of the identity of initial rows."""
        return self._name

    @property
    def seed(self) -> int:
        """Drives initial rows."""
        return self._seed

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with the learning rate in use."""
        return self._optimizer

    @property
    def initializer(self) -> Initializer:
        """How new rows get their values."""
        return self._initializer

    @property
    def admission(self) -> Admit | None:
        """Which new keys get a row; None: all."""
        return self._admission

    @property
    def default(self) -> Default:
        """What a key without a row reads."""
        return self._default

    @property
    def dtype(self) -> DType:
        """The type in which weights are stored."""
        return self._dtype

    @property
    def rounding(self) -> Rounding:
        """How updates round to 16 bits."""
        return self._rounding

    @property
    def on_nonfinite(self) -> Literal["apply", "raise", "skip"]:
        """What happens to a summed gradient that is infinite or not a number."""
        return self._on_nonfinite

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next updates; set it to 0 or more, finite as a float32.

        With `catch_up` its product with weight_decay must be below 1. Raises ValueError or
        TypeError for anything else. Updates that begin later go by it.
        """
        return self._optimizer.lr

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        require_float32("Table", learning_rate=value)
        require_at_least("Table", 0.0, learning_rate=value)
        before = self._optimizer
        self._optimizer = replace(before, lr=float(value))
        try:  # nothing comes between the two, so a Ctrl-C finds neither set, or both
            self._engine.set_learning_rate(self._optimizer.lr)
        except Exception:
            self._optimizer = before
            raise

    @property
    def update_count(self) -> int:
        """Optimizer updates so far, empty ones included; set it when restoring a table.

        Raises ValueError or TypeError unless it is set to 0 to 2**62.
        """
        return self._engine.update_count()

    @update_count.setter
    def update_count(self, value: int) -> None:
        self._engine.set_update_count(int_within("Table", 0, UINT64, update_count=value))

    @property
    def log_decay(self) -> float:
        """Sum of log(1 - lr * weight_decay) over all updates with `catch_up`, else 0.

        The rows' state "log_decay" is compared with it; set it when restoring a table. Raises
        ValueError unless it is set to a finite number of 0 or less, and to 0 without `catch_up`.
        """
        return self._engine.log_decay()

    @log_decay.setter
    def log_decay(self, value: float) -> None:
        require_finite("Table", log_decay=value)
        self._engine.set_log_decay(value)

    @property
    def state_fields(self) -> tuple[tuple[str, int], ...]:
        """(name, width) of each field of optimizer state that a row has."""
        return self._engine.state_fields()

    def map(
        self,
        keys: Array,
        *,
        insert: bool,
        lease: Lease | None = None,
        times: Array | int | None = None,
        scores: Array | None = None,
        counts: Array | int | None = None,
        clicks: Array | int | None = None,
        now: int | None = None,
    ) -> tuple[Array, Array]:
        """Finds the rows of keys (N,), and with `insert` gives a row to each unseen key.

        Returns (rows int64 (N,), outcomes uint8 (N,)). In place of the row number of a key without
        a row stands what `pool_tables` and `update_tables` need of it. Of a new key that occurs
        several times the first is INSERTED, the rest FOUND. Row numbers are given in input order.
        Which keys are REFUSED depends on the keys of the call, not on their order: in a group of
        keys that has too little room, those that are lowest by a fixed hash. Empty input is fine.

        With eviction others leave instead, see `Evict`; they, and their rows, stay what they are to
        readers and earlier leases until the call's lease is released, if it carries a step. `times`
        int64 (N,) or one for all are for `Evict.lru(by="time")`, and move `time` on if they are
        later; keys that come without one have that, and -2**63 says that none is known. Finite
        `scores` float32 (N,) are for `Evict.score()`. Of times and scores of equal keys the largest
        counts. With admission a new key gets a row only if the rule lets it in, see `Admit`;
        `counts`, int64 (N,) or one for all, 1 or more, say how many occurrences each key stands
        for, to rules by shows and clicks too, which alone take `clicks`: int64 (N,) or one for all,
        0 or more. They add up. `now`, an int64 above -2**63, is the table's `time` from this call
        on, if it succeeds, whatever `times` are; saves do not see it while the call's batch is in
        flight. Only for `Evict.lru(by="time")`.

        Raises BusyError when inserting without a step while leases with a step are open, and
        CapacityError under `on_full="raise"`. Raises ValueError for times, scores, counts, clicks
        or now that the rules do not take, or that they need and do not get; with a rule, also for a
        lease of an earlier step than one that was mapped before. Also raises OutOfMemoryError, and
        what a custom initializer raises.
        Cost: one cache line per key, plus one row per insertion; with eviction one more line per
        key, and a few per key that leaves; with admission keys without a row are sorted.
        """
        return self._engine.map(
            keys,
            insert,
            lease,
            times_of(times),
            scores,
            times_of(counts, "counts"),
            times_of(clicks, "clicks"),
            now_of("Table.map", now),
        )

    def find_or_insert(
        self,
        keys: Array,
        *,
        lease: Lease | None = None,
        times: Array | int | None = None,
        scores: Array | None = None,
        counts: Array | int | None = None,
        clicks: Array | int | None = None,
        now: int | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """The rows of keys (N,), float32 (N, D); an unseen key gets a row.

        A key that is refused or not admitted reads the default, see `Default`. With
        `return_outcomes` returns (values, outcomes uint8 (N,)). What comes with keys, duplicates,
        errors and cost are those of `map`, plus reading the rows.
        """
        return self._engine.find_or_insert(
            keys,
            lease,
            return_outcomes,
            times_of(times),
            scores,
            times_of(counts, "counts"),
            times_of(clicks, "clicks"),
            now_of("Table.find_or_insert", now),
        )

    def leavers(
        self,
        *,
        max_rows: int = 65_536,
        on_overflow: OnOverflow = "count",
        block_seconds: float = 60.0,
    ) -> Leavers:
        """Reads what leaves from now on: keys, why, and their rows as they were last.

        `max_rows`, at least 1, are the places for rows that are yet to be read, those that batches
        in flight may use included; memory for them is reserved at once. When more leave,
        `on_overflow` decides: "count": they are lost, and counted; "raise": the call that would
        make them leave raises CapacityError and changes nothing; "block": it waits until another
        thread reads, and raises BusyError after `block_seconds`, or CapacityError where reading all
        would not do. With it waits every call that writes or looks for keys, `lookup` and `len`
        too, and KeyboardInterrupt. One at a time: raises BusyError while another one is open, or
        leases with a step are; ValueError or TypeError for a bad argument.
        `set_optimizer` and `rename` close it. Cost: nothing unless it is called; then a copy of
        each row that leaves. See `Leavers` for an example.
        """
        options = engine_overflow("Table.leavers", max_rows, on_overflow, block_seconds)
        return Leavers(self._engine.leavers(*options), self.state_fields)

    def lookup(self, keys: Array, *, return_outcomes: bool = False) -> Any:
        """The rows of keys (N,), read only: float32 (N, D).

        A key without a row reads the default and is MISSING. With `return_outcomes` returns
        (values, outcomes uint8 (N,)). Keys of batches in flight that carry a step are not seen.
        """
        return self._engine.lookup(keys, return_outcomes)

    def upsert(
        self,
        keys: Array,
        values: Array,
        state: Mapping[str, Array] | None = None,
        *,
        times: Array | int | None = None,
        scores: Array | None = None,
        clicks: Array | int | None = None,
        now: int | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """Writes values (N, D) as the weights of keys (N,), inserting unseen keys.

        Of duplicates the last wins. `state` has float32 (N, width) for every one of `state_fields`;
        without it optimizer state is made fresh. No rule of admission keeps a key out. `times`,
        `scores`, `clicks` and `now` are those of `map` for eviction. With `return_outcomes` returns
        outcomes uint8 (N,), else None. Raises BusyError while leases with a step are open.
        """
        packed = None if state is None else self._pack_state(state)
        return self._engine.upsert(
            keys,
            values,
            packed,
            return_outcomes,
            times_of(times),
            scores,
            times_of(clicks, "clicks"),
            now_of("Table.upsert", now),
        )

    def _pack_state(self, state: Mapping[str, Array]) -> Array | None:
        """The state fields side by side, (N, sum of widths); None if the rows have no state."""
        fields = self.state_fields
        if not isinstance(state, Mapping):
            raise TypeError(
                f"table {self._name!r}: state must be a mapping of arrays by field, got "
                f"{type(state).__name__}"
            )
        if set(state) != {name for name, _ in fields}:
            raise ValueError(
                f"table {self._name!r}: state must have the fields {[n for n, _ in fields]}, "
                f"got {sorted(map(str, state))}"
            )
        arrays = [state[name] for name, _ in fields]
        if len(arrays) == 1 and arrays[0] is None:
            raise TypeError(
                f"table {self._name!r}: state {fields[0][0]!r} must be float32, got None"
            )
        if len(arrays) <= 1:
            return arrays[0] if arrays else None
        parts = [np.asarray(array) for array in arrays]
        for part, (name, width) in zip(parts, fields, strict=True):
            if part.dtype != np.float32:
                raise TypeError(
                    f"table {self._name!r}: state {name!r} must be float32, got {part.dtype}; "
                    "convert it to float32"
                )
            if part.ndim != 2 or part.shape[1] != width:
                raise ValueError(
                    f"table {self._name!r}: state {name!r} must have shape (N, {width}), "
                    f"got {part.shape}"
                )
        return np.concatenate(parts, axis=1)

    def apply_gradients(
        self, keys: Array, gradients: Array, *, return_outcomes: bool = False
    ) -> Any:
        """One optimizer update with `gradients` (N, D) of keys (N,).

        Gradients of equal keys are added in order. A key without a row is MISSING and is not
        inserted; shared rows are trained by theirs. An empty call also advances the update count.
        With `return_outcomes` returns outcomes uint8 (N,), else None. Raises NonFiniteError under
        `on_nonfinite="raise"`.
        """
        return self._engine.apply_gradients(keys, gradients, return_outcomes)

    def pool(
        self,
        keys: Array,
        offsets: Array,
        weights: Array | None = None,
        pooling: str = "sum",
        *,
        insert: bool = False,
        lease: Lease | None = None,
        return_outcomes: bool = False,
    ) -> Any:
        """Reduces bags of keys to one vector each: float32 (B, D).

        Bag b is `keys[offsets[b]:offsets[b + 1]]`, offsets (B + 1,) ascending from 0 to N;
        `weights` (N,) multiply the rows. `pooling` is "sum" or "mean"; the mean divides by the
        number of keys of the bag whatever their outcome, or by the sum of its weights (0 gives
        zeros). An empty bag pools to zeros; a key without a row contributes the default. With
        `insert`, unseen keys get a row first; where a rule needs clicks, `map` gives it to them and
        `pool_rows` pools. With `return_outcomes` returns (pooled, outcomes uint8 (N,)).

        Raises ValueError or TypeError for arguments that do not fit each other, and with `insert`
        if a rule needs clicks; then also what `map` raises. Nothing has changed then, and nothing
        is inserted. Cost: that of `map`, and reading each key's row once.

        >>> import numpy as np
        >>> from recsdk_core import Table, init
        >>> table = Table(dim=2, initializer=init.Constant(value=1.0))
        >>> table.pool(np.array([4, 5, 4]), np.array([0, 2, 2, 3]), insert=True)
        array([[2., 2.],
               [0., 0.],
               [1., 1.]], dtype=float32)
        """
        require_bool("Table.pool", insert=insert)
        if insert and any(rule and rule.needs_clicks for rule in (self._eviction, self._admission)):
            raise ValueError(
                f"table {self._name!r}: a rule goes by clicks, which pool does not take; map the "
                "keys with clicks, then pool_rows"
            )
        return self._engine.pool(keys, offsets, weights, pooling, insert, lease, return_outcomes)

    def pool_backward(
        self,
        keys: Array,
        offsets: Array,
        grad: Array,
        weights: Array | None = None,
        pooling: str = "sum",
        *,
        return_weights_grad: bool = False,
    ) -> Any:
        """One optimizer update with the gradient (B, D) of pooled bags, arguments as in `pool`.

        It finds keys but never inserts; gradients of a key are added in batch order. With
        `return_weights_grad` returns the gradient of `weights`, float32 (N,), else None. Raises
        NonFiniteError under `on_nonfinite="raise"`.
        """
        return self._engine.pool_backward(
            keys, offsets, grad, weights, pooling, return_weights_grad
        )

    def pool_rows(self, bags: Bags) -> Any:
        """Reduces bags that were mapped before: float32 (B, D). See `pool_tables`."""
        return self._engine.pool_rows(bags)

    def update_rows(self, bags: Bags, grad: Array, weights_grad: Array | None = None) -> None:
        """One optimizer update with the gradient (B, D) of bags that were mapped before.

        `weights_grad`, float32 (N,), is filled with the gradient of the bags' weights. See
        `update_tables`.
        """
        self._engine.update_rows(bags, grad, weights_grad)

    def limit_norms(self, bags: Bags, max_norm: float, norm_type: float = 2.0) -> int:
        """Scales rows of keys that were mapped before back to a norm; returns how many it scaled.

        A row whose `norm_type`-norm exceeds `max_norm` is multiplied by max_norm / (norm + 1e-7),
        as torch's embedding_renorm_ does, once however often its key is there. Optimizer state and
        update count stay; 16-bit rows are rounded to the nearest. Of `bags` only rows and outcomes
        matter, which a lease must hold. Raises ValueError unless max_norm is 0 or more and
        norm_type above 0, infinity included. Cost: reading these rows; if some exceed, reading them
        again while insertion waits. May be called from any thread.

        >>> import numpy as np
        >>> from recsdk_core import Bags, Table
        >>> table = Table(dim=2)
        >>> _ = table.upsert(np.array([4]), np.array([[3.0, 4.0]], np.float32))
        >>> table.limit_norms(Bags(*table.map(np.array([4]), insert=False)), max_norm=1.0)
        1
        >>> table.lookup(np.array([4])).round(3)
        array([[0.6, 0.8]], dtype=float32)
        """
        require_number("Table.limit_norms", max_norm=max_norm, norm_type=norm_type)
        return self._engine.limit_norms(bags, float(max_norm), float(norm_type))

    def norm_factors(self, bags: Bags, max_norm: float, norm_type: float = 2.0) -> Any:
        """By what `limit_norms` would multiply the row of each key: float32 (N,); it writes none.

        1 for a row within the limit, and for a key without a row. Raises ValueError unless
        `max_norm` is 0 or more and `norm_type` above 0.
        """
        require_number("Table.norm_factors", max_norm=max_norm, norm_type=norm_type)
        return self._engine.norm_factors(bags, float(max_norm), float(norm_type))

    def export(self, batch_size: int | None = None, *, state: bool = True) -> Iterator[ExportBatch]:
        """Visible rows in batches of up to `batch_size`, in ascending order of row number.

        By default a batch has as many rows as fit into 16 MiB, but 1 to 65536. Arrays are numpy.
        With `state=False` each batch's state is empty. Rows inserted or erased while the export
        runs may or may not be seen. Raises ValueError for a `batch_size` below 1, and RuntimeError
        for a next batch after `set_optimizer` or `rename`.
        """
        require_bool("Table.export", state=state)
        if batch_size is None:
            batch_size = self._rows_per_batch(state)
        return self._export(int_within("Table.export", 1, batch_size=batch_size), state)

    def _rows_per_batch(self, with_state: bool) -> int:
        width = sum(width for _, width in self.state_fields) if with_state else 0
        row_bytes = 8 + 4 * (self._dim + width)
        return min(max(_EXPORT_BYTES // row_bytes, 1), _EXPORT_ROWS)

    def _export(self, batch_size: int, with_state: bool) -> Iterator[ExportBatch]:
        engine, fields = self._engine, self.state_fields if with_state else ()
        begin, is_last = 0, False
        while not is_last:
            if self._engine is not engine:
                raise RuntimeError(
                    f"table {self._name!r}: got another optimizer or name since this export began; "
                    "begin it anew"
                )
            capacity = min(batch_size, len(self) + 1)  # what a batch takes before it is filled
            begin, keys, weights, packed = engine.export_rows(begin, capacity, bool(fields))
            is_last = len(keys) < capacity
            if len(keys):
                state = {} if packed is None else unpack_state(packed, fields)
                yield ExportBatch(keys=keys, weights=weights, state=state)

    def stats(self) -> TableStats:
        """Cumulative counts and sizes."""
        of_table = {"evicted_by_request": self._evicted_by_request}  # first: never above `evicted`
        counts = self._engine.stats()
        outcomes = {kind: counts["outcomes"][kind] for kind in Outcome}
        return TableStats(**{**counts, **of_table, "outcomes": outcomes})

    def memory_bytes(self) -> int:
        """Bytes of memory held: index, rows, metadata, tracked changes, copies for a cut."""
        return self._engine.memory_bytes()

    def __repr__(self) -> str:
        limit = "" if self.max_rows is None else f", max_rows={self.max_rows}"
        return (
            f"Table(name={self._name!r}, dim={self._dim}, rows={len(self)}{limit}, "
            f"optimizer={self._optimizer})"
        )

    def shared_rows(self) -> ExportBatch:
        """The rows that keys without one share, as they are now; none unless `default` says so.

        `keys` (n,) are those that stand for them where they are saved, each one of the keys that
        read its row; weights (n, D) and state as those of `export`.

        >>> from recsdk_core import Default, Table
        >>> Table(dim=8, default=Default.shared_rows(4)).shared_rows().weights.shape
        (4, 8)
        """
        keys, weights, packed = self._engine.shared_rows()
        fields = self.state_fields
        state = unpack_state(packed, fields) if fields else {}
        return ExportBatch(keys=keys, weights=weights, state=state)

    def _config(self) -> dict[str, Any]:
        """The arguments that make an equal table, without `hash_seed`."""
        return {
            "dim": self._dim,
            "name": self._name,
            "optimizer": self._optimizer,
            "initializer": self._initializer,
            "seed": self._seed,
            "max_rows": self._limits.max_rows,
            "eviction_groups": self._limits.eviction_groups,
            "owned_groups": self._limits.owned_groups,
            "on_full": self._on_full,
            "eviction": self._eviction,
            "admission": self._admission,
            "default": self._default,
            "on_nonfinite": self._on_nonfinite,
            "dtype": self._dtype,
            "rounding": self._rounding,
            "num_threads": self._limits.num_threads,
        }

    def empty_copy(self, **changes: Any) -> Table:
        """An empty table with the same arguments of the constructor, apart from those given.

        >>> from recsdk_core import Table
        >>> Table(dim=8, name="user", max_rows=100).empty_copy(dim=4).max_rows
        100
        """
        return Table(**{**self._config(), **changes})

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Gives the table another optimizer: rows stay, and get its fresh state.

        The update count stays too. `log_decay` becomes 0, the next save must be full, and the
        counters of `stats()` begin anew, with the rows as inserted or, with eviction or admission,
        with none.
        Raises BusyError while leases or a save are open, and OutOfMemoryError; then nothing has
        changed. Call it while no other thread uses the table. Cost: all rows are copied, and
        held twice until the end.
        """
        self._replace_optimizer(optimizer, drop_state=True)

    def _replace_optimizer(self, optimizer: Optimizer, *, drop_state: bool) -> None:
        """As `set_optimizer`; may keep the state, with log_decay, if both have the same fields."""
        self.check_replaceable("optimizer")
        made = self._filled_copy({"optimizer": optimizer}, drop_state=drop_state)
        self._engine, self._optimizer, self._position = made._engine, optimizer, None
        self._evicted_by_request = 0

    def rename(self, name: str) -> None:
        """Gives the table another name, so keys that are new from now on get other first rows.

        Rows and their optimizer state stay. The next save must be full, and the counters of
        `stats()` begin anew, see `set_optimizer`, as do errors, thread safety and cost.
        """
        self.check_replaceable("name")
        made = self._filled_copy({"name": name})
        self._engine, self._name, self._position = made._engine, name, None
        self._evicted_by_request = 0

    def check_replaceable(self, what: str) -> None:
        """Raises BusyError, naming `what`, while the table's engine cannot become another."""
        try:
            self.check_idle()
        except BusyError as error:
            raise BusyError(
                f"table {self._name!r}: its {what} cannot be set while batches are in flight or "
                "a save is under way; finish them, and let go of outputs of earlier forwards"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles configuration, visible rows, their optimizer state and the update count.

        With eviction or admission also what they keep of keys, and their clock, and the rows that
        keys without one share; BusyError with any of these while a save is open.
        """
        if self._has_more:
            return _restore_image, (self._config(), self._image())
        counts = (self.update_count, self.log_decay)
        return _restore, (self._config(), list(self.export()), *counts)

    @property
    def _has_clock(self) -> bool:
        return self._eviction is not None or self._admission is not None

    @property
    def _has_more(self) -> bool:
        """Whether it holds more than rows of keys and counts of updates."""
        return self._has_clock or self._default.kind == "shared_rows"

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        """What pickling and unpickling would give."""
        return self._filled_copy({})

    def _filled_copy(self, changes: dict[str, Any], *, drop_state: bool = False) -> Table:
        """A table with its rows and other arguments; without state as after set_optimizer."""
        config = {**self._config(), **changes}
        if self._has_more:
            return _restore_image(config, self._image(), drop_state=drop_state)
        batches = self.export(state=not drop_state)
        log_decay = 0.0 if drop_state else self.log_decay
        return _restore(config, batches, self.update_count, log_decay)

    def _image(self) -> _Image:
        """All visible rows and counts, with what rules keep of them, as one row file."""
        pieces: list[bytes] = []
        cut = self._engine.cut(False, None)
        try:
            _ext.write_rows(cut, lambda piece: pieces.append(bytes(piece)), token=bytes(16))
        finally:
            cut.finish(False)
        state = cut.eviction or _ext.EvictionState()
        return _Image(
            rows=b"".join(pieces),
            update_count=cut.update_count,
            log_decay=cut.log_decay,
            eviction=(state.step, None, state.is_begun, state.time, state.had_leases),
            records=cut.admission,
            shared=cut.shared_rows,
        )


@dataclass(frozen=True, kw_only=True)
class _Image:
    """What a table holds that has more than rows of keys."""

    rows: bytes
    update_count: int
    log_decay: float
    eviction: tuple[int, None, bool, int | None, bool]
    records: tuple[NDArray[np.int64], ...] | None
    """Keys without a row, how often they were seen, in which step last, and clicks: (n,) each."""
    shared: tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]] | None
    """Rows that keys without one share: keys (n,), weights (n, D), packed state (n, width)."""


def _restore_image(config: dict[str, Any], image: _Image, *, drop_state: bool = False) -> Table:
    table = Table(**config)
    restore = _ext.Restore(table._engine)

    def read(offset: int, size: int) -> bytes:
        return image.rows[offset : offset + size]

    rows = _ext.RowFile(read, len(image.rows), "rows in memory")
    restore.add_file(rows, drop_state=drop_state)
    if image.records is not None:
        restore.add_records(*image.records)
    if image.shared is not None:
        keys, weights, packed = image.shared
        restore.add_shared(keys, weights, None if drop_state else packed)
    state = _ext.EvictionState(*image.eviction)
    restore.commit(image.update_count, 0.0 if drop_state else image.log_decay, state)
    return table


def _restore(
    config: dict[str, Any],
    batches: Iterator[ExportBatch] | list[ExportBatch],
    update_count: int,
    log_decay: float,
) -> Table:
    table = Table(**config)
    for batch in batches:
        table.upsert(batch.keys, batch.weights, batch.state or None)
    table.update_count = update_count
    table.log_decay = log_decay
    return table
