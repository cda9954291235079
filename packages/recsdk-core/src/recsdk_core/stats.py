"""What an index and a table tell: statistics, and batches of rows.

Shape letters: n rows of a batch, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsdk_core.outcome import Outcome

__all__ = ["ExportBatch", "Explanation", "IndexStats", "TableStats"]


@dataclass(frozen=True, kw_only=True)
class ExportBatch:
    """Some rows of a table, as `Table.export` gives them and `Table.upsert` takes them."""

    keys: NDArray[np.int64]
    """Keys, int64 (n,)."""
    weights: NDArray[np.float32]
    """Weights, float32 (n, D)."""
    state: dict[str, NDArray[np.float32]]
    """Optimizer state, float32 (n, width) for each of `Table.state_fields`."""


@dataclass(frozen=True, kw_only=True)
class IndexStats:
    """Cumulative counts of an index, and its sizes in bytes."""

    num_rows: int
    """Keys visible to readers, each of which has a row."""
    num_rows_in_flight: int
    """Keys inserted by batches that readers do not see yet."""
    num_rows_held_back: int
    """Of these, keys of batches that have ended, but wait for one of an earlier step: saves lack
    them while something keeps that one's lease, or its output."""
    outcomes: Mapping[Outcome, int]
    """Keys by outcome, over all calls of visible batches."""
    erased: int
    """Keys that `erase` and `clear` took out."""
    evicted: int
    """Keys that left for others, or by `evict`."""
    expired: int
    """Keys that left since they were not seen for long."""
    returned: int
    """Keys that got a row again soon after they left: churn, see `Evict.with_churn`."""
    churn_lost: int
    """Keys that left and were forgotten before it was too late to count them as returned."""
    admission_records: int
    """Keys without a row whose count is kept, see `Admit.count`; batches in flight included."""
    records_lost: int
    """Counts of such keys that left for others."""
    index_bytes: int
    """Memory from keys to row numbers."""
    metadata_bytes: int
    """Memory that is kept per row number."""
    tracking_bytes: int
    """Memory that tracks changes since the last save, or is ready for copies in the next."""
    index_slots: int
    """Key slots of the hashed part of the index."""
    index_segments: int
    """Segments of the index."""
    index_directory: int
    """Entries of the index's directory."""
    index_splits: int
    """Segments split so far."""
    index_overflowed: int
    """Hashed keys that lie outside their home bucket."""
    index_crowded: int
    """Segments of keys that collide under the `hash_seed`; 0 unless somebody chose them."""
    index_probes: int
    """Buckets read if every hashed key is looked up once."""
    index_dense_keys: int
    """Keys of dense ranges, which are mapped directly."""
    index_dense_pages: int
    """Ranges of 2048 keys that are mapped directly."""


@dataclass(frozen=True, kw_only=True)
class TableStats(IndexStats):
    """Cumulative counts of a table, and its sizes in bytes."""

    updates: int
    """Optimizer updates so far, empty ones included."""
    evicted_by_request: int
    """Those of `evicted` that `Table.evict` took out; the others left a full table."""
    nonfinite: int
    """Rows whose summed gradient was not finite."""
    row_bytes: int
    """Memory of rows, used or reserved."""
    checkpoint_copied_bytes: int
    """Memory of copies of rows that changed while a cut was open."""
    checkpoint_waits: int
    """How often an update waited until more of a cut was written."""
    checkpoint_wait_seconds: float
    """How long these waits took in all."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How a key stands in a table or index, as readers see it; its text says it in words."""

    key: int
    """The key, int64."""
    row: int | None
    """Its row number; None: it has no row."""
    columns: Mapping[str, float]
    """What eviction keeps of it, by the names of `recsdk_core.predicates`; empty without a row."""
    seen: int | None
    """How often it was seen without a row, if a rule of admission keeps that."""
    group: int | None
    """Its group of keys; None: there is no limit of rows."""
    group_rows: int
    """Keys that have rows in the group, batches in flight included."""
    group_quota: int
    """Rows that the group may have."""
    num_before: int | None
    """Keys of the group that leave before it; None: it has no row, or nobody leaves."""
    has_expired: bool
    """It leaves at the next look for keys that have expired."""
    reasons: tuple[str, ...]
    """Why it has a row or none, and what would take it out."""

    def __str__(self) -> str:
        return f"key {self.key}: " + "; ".join(self.reasons)
