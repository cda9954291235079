"""Embedding tables addressed by raw 64-bit keys.

`Table` and its multi-table calls work on numpy arrays, torch tensors and any DLPack CPU array; so
does `Index`, for rows of one's own.
`recsdk_core.nn` has torch modules (needs torch), `recsdk_core.testing` Hypothesis strategies and a
reference table (needs hypothesis); neither is imported from here.
"""

from __future__ import annotations

from recsdk_core._internal.interpreters import refuse_other_interpreters
from recsdk_core._internal.interruptions import held_back

refuse_other_interpreters()

with held_back():  # nanobind aborts the process where its making of types is interrupted
    from recsdk_core import _ext
from recsdk_core._internal.version import __version__, check_compiled_version  # noqa: E402

check_compiled_version(_ext.__version__)

from recsdk_core import checkpoint, init, optim  # noqa: E402
from recsdk_core._internal.initial_rows import initial_rows  # noqa: E402
from recsdk_core.admission import Admit  # noqa: E402
from recsdk_core.columns import Shuffle, hash_strings, interleave  # noqa: E402
from recsdk_core.combine import CombineBlock, combine_gradients, distinct_keys  # noqa: E402
from recsdk_core.errors import (  # noqa: E402
    BackendUnavailable,
    BusyError,
    CapacityError,
    CheckpointError,
    NonFiniteError,
    OutOfMemoryError,
    RecsdkError,
)
from recsdk_core.eviction import Evict, EvictionClock  # noqa: E402
from recsdk_core.index import Index, IndexCut  # noqa: E402
from recsdk_core.leavers import (  # noqa: E402
    IndexLeavers,
    LeaveCause,
    LeaverBatch,
    Leavers,
    LeftRows,
)
from recsdk_core.outcome import Default, Outcome  # noqa: E402
from recsdk_core.routing import (  # noqa: E402
    ArrivedBags,
    CutBags,
    count_keys,
    cut_bags,
    join_offsets,
    lay_out_offsets,
    read_bags,
)
from recsdk_core.runtime import (  # noqa: E402
    available_isas,
    isa,
    num_threads,
    set_isa,
    set_num_threads,
    version,
)
from recsdk_core.stats import Explanation, ExportBatch, IndexStats, TableStats  # noqa: E402
from recsdk_core.table import Lease, Table  # noqa: E402
from recsdk_core.tables import (  # noqa: E402
    Bags,
    JoinedBags,
    KeyData,
    StoreNumbers,
    join_rows,
    lease_tables,
    map_joined,
    map_tables,
    pool_joined,
    pool_tables,
    release_leases,
    update_joined,
    update_tables,
)
from recsdk_core.vectors import (  # noqa: E402
    VectorParts,
    VectorStretches,
    in_huge_pages,
    lay_out_vectors,
    pack_vectors,
    unpack_vectors,
)

__all__ = [
    "Admit",
    "ArrivedBags",
    "BackendUnavailable",
    "Bags",
    "BusyError",
    "CapacityError",
    "CheckpointError",
    "CombineBlock",
    "CutBags",
    "Default",
    "Evict",
    "EvictionClock",
    "Explanation",
    "ExportBatch",
    "Index",
    "IndexCut",
    "IndexLeavers",
    "IndexStats",
    "JoinedBags",
    "KeyData",
    "Lease",
    "LeaveCause",
    "LeaverBatch",
    "Leavers",
    "LeftRows",
    "NonFiniteError",
    "OutOfMemoryError",
    "Outcome",
    "RecsdkError",
    "Shuffle",
    "StoreNumbers",
    "Table",
    "TableStats",
    "VectorParts",
    "VectorStretches",
    "__version__",
    "available_isas",
    "checkpoint",
    "combine_gradients",
    "count_keys",
    "cut_bags",
    "distinct_keys",
    "hash_strings",
    "in_huge_pages",
    "init",
    "initial_rows",
    "interleave",
    "isa",
    "join_offsets",
    "join_rows",
    "lay_out_offsets",
    "lay_out_vectors",
    "lease_tables",
    "map_joined",
    "map_tables",
    "num_threads",
    "optim",
    "pack_vectors",
    "pool_joined",
    "pool_tables",
    "read_bags",
    "release_leases",
    "set_isa",
    "set_num_threads",
    "unpack_vectors",
    "update_joined",
    "update_tables",
    "version",
]
