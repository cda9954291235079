"""Where the rows of tables are: what every home of rows offers.

The engine is one (`engine`), device memory another (`recsdk_sharding.device.home`);
`choose_home` says which one a table has. Callers never ask which one it is.

Shape letters: n or N keys, P pieces, T shards, M weights that come late, D row width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import recsdk_core
from recsdk_core import ExportBatch, JoinedBags, Lease, StoreNumbers, optim
from recsdk_core.batch_leases import BatchLeases
from recsdk_core.checkpoint import Position
from recsdk_core.checkpoint.model.shards import ShardCut
from recsdk_core.checkpoint.replacing import NewRows
from recsdk_core.leavers import OnOverflow
from recsdk_core.nn.accumulation import Accumulation
from recsdk_core.nn.function import FeatureBags, SharedTraining
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding.placement.layout import Shard

__all__ = [
    "Anchor",
    "BatchPlan",
    "GroupBags",
    "Guard",
    "HeldShard",
    "MappedBags",
    "MappedBatch",
    "PoolRequest",
    "RowHome",
    "RowTable",
    "ShardGroup",
]

Anchor: TypeAlias = Callable[[], torch.Tensor]
"""Gives the parameter that connects tables to a graph; raises if there is none for all of them."""
Guard: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Makes the context manager that a backward runs in."""


class RowTable(Protocol):
    """A table as its owner sees it: the members mean what those of `recsdk_core.Table` do."""

    learning_rate: float
    update_count: int
    log_decay: float

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> recsdk_core.table.DType: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_rows(self) -> int | None: ...
    @property
    def optimizer(self) -> optim.Optimizer: ...
    @property
    def state_fields(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def position(self) -> Position | None: ...

    def __len__(self) -> int: ...
    def __contains__(self, key: object) -> bool: ...
    def lookup(self, keys: NDArray[np.int64], *, return_outcomes: bool = False) -> Any: ...
    def find_or_insert(
        self,
        keys: NDArray[np.int64],
        *,
        lease: recsdk_core.Lease | None = None,
        return_outcomes: bool = False,
    ) -> Any: ...
    def upsert(
        self,
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
        state: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> Any: ...
    def erase(self, keys: NDArray[np.int64], *, return_outcomes: bool = False) -> Any: ...
    def clear(self) -> None: ...
    def leavers(
        self,
        *,
        max_rows: int = ...,
        on_overflow: OnOverflow = ...,
        block_seconds: float = ...,
    ) -> recsdk_core.Leavers: ...
    def export(
        self, batch_size: int | None = None, *, state: bool = True
    ) -> Iterator[ExportBatch]: ...
    def set_optimizer(self, optimizer: optim.Optimizer) -> None: ...
    def stats(self) -> recsdk_core.TableStats: ...
    def check_invariants(self) -> None: ...


class HeldShard(Protocol):
    """One shard in its home."""

    @property
    def table(self) -> RowTable:
        """The rows."""

    @property
    def index(self) -> recsdk_core.Table | recsdk_core.Index:
        """Maps the shard's keys to row numbers; a table of the engine does so itself."""

    def check_idle(self) -> None:
        """Raises BusyError while batches are in flight, so that rows cannot be replaced."""

    def check_room(self, keys: NDArray[np.int64]) -> None:
        """Raises CapacityError unless keys (n,) without a row can have one."""

    def rows(self) -> NewRows:
        """The rows that readers see now, by row number, with what the rules keep of keys.

        With eviction or admission BusyError while a save is under way.
        """

    def host_table(self) -> recsdk_core.Table:
        """The engine's table that describes the shard to checkpoints, and into which they load."""

    def cutter(self, table: recsdk_core.Table) -> Callable[[bool], ShardCut] | None:
        """Cuts the rows to save: all (False) or changes (True). None: `host_table` has them."""

    def take_loaded(self, table: recsdk_core.Table) -> None:
        """Takes the rows of the `host_table`, once a checkpoint is loaded into it."""


@dataclass(frozen=True)
class ShardGroup:
    """T shards of one home whose batches are mapped together: the same in each batch."""

    held: Sequence[Any]
    """The shards, each a `HeldShard` of the home."""
    accumulations: Sequence[Accumulation[Any] | None]
    """What collects the gradients of several backwards of each; None: each is an update."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What the home found out about them, for the next batch."""

    @cached_property
    def tables(self) -> list[Any]:
        """Their rows."""
        return [each.table for each in self.held]

    @cached_property
    def accumulates(self) -> bool:
        """Whether one of them does."""
        return any(each is not None for each in self.accumulations)


@dataclass(frozen=True, kw_only=True)
class GroupBags:
    """The bags of all shards of a group, in one array of each kind, before their keys are mapped.

    They are P pieces, one after the other: shard by shard, and in a shard in the order in which
    gradients of a key are added. A piece is a feature's bags, or those that one rank sent of it.
    """

    group: ShardGroup
    """The shards."""
    num_pieces_T: NDArray[np.int64]
    """Of each shard."""
    num_keys_P: NDArray[np.int64]
    starts_P: NDArray[np.int64]
    """Where the vectors of each piece begin: a number, or a column of the matrix of results."""
    offsets: Sequence[torch.Tensor | None] | None = None
    """Of each piece, int64 (its bags + 1,); None: each of its keys is a bag."""
    weights: Sequence[torch.Tensor | None] | None = None
    """Of each piece, float32 (its keys,); None: it has none."""
    is_mean_P: NDArray[np.bool_] | None = None
    """Whether bags are averaged; None: none are."""

    @property
    def are_plain(self) -> bool:
        """Whether no key has a weight, and no table accumulates gradients."""
        return not self.group.accumulates and all(each is None for each in self.weights or ())

    def mapped(
        self, rows_N: torch.Tensor | None, outcomes_N: torch.Tensor, leases: Sequence[Lease]
    ) -> MappedBags:
        """The same, mapped."""
        return MappedBags(
            group=self.group,
            num_pieces_T=self.num_pieces_T,
            num_keys_P=self.num_keys_P,
            starts_P=self.starts_P,
            offsets=self.offsets,
            weights=self.weights,
            is_mean_P=self.is_mean_P,
            rows=rows_N,
            outcomes_N=outcomes_N,
            leases=leases,
        )


@dataclass(frozen=True, kw_only=True)
class MappedBags(GroupBags):
    """The same, mapped."""

    rows: torch.Tensor | None
    """Row numbers, int64 (N,), as `map_joined` gave them; None: they are where the plan of the
    batch wanted them."""
    outcomes_N: torch.Tensor
    """Outcomes, uint8, as `map_joined` gave them."""
    leases: Sequence[Lease]
    """The batch of each shard that its keys were mapped under."""

    @property
    def rows_N(self) -> torch.Tensor:
        """Row numbers, int64, as `map_joined` gave them."""
        assert self.rows is not None
        return self.rows

    def joined(self) -> JoinedBags:
        """The pieces of all shards as the core takes them, without their weights."""
        is_mean_P = self.is_mean_P
        return JoinedBags(
            self.rows_N,
            self.outcomes_N,
            self.num_pieces_T,
            self.num_keys_P,
            self.starts_P,
            self.offsets,
            None if is_mean_P is None else is_mean_P.view(np.uint8),
        )

    @cached_property
    def features(self) -> list[list[FeatureBags]]:
        """The pieces of each shard as the core takes them."""
        counts = self.num_keys_P.tolist()
        none = [None] * len(counts)
        pieces = zip(
            self.rows_N.split_with_sizes(counts),
            self.outcomes_N.split_with_sizes(counts),
            self.offsets or none,
            self.weights or none,
            none if self.is_mean_P is None else self.is_mean_P.tolist(),
            self.starts_P.tolist(),
            strict=True,
        )
        made = [
            FeatureBags(
                rows=rows,
                outcomes=outcomes,
                offsets=offsets,
                weights=weights,
                pooling="mean" if is_mean else "sum",
                column=start,
            )
            for rows, outcomes, offsets, weights, is_mean, start in pieces
        ]
        ends = accumulate(self.num_pieces_T.tolist(), initial=0)
        return [made[begin:end] for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class PoolRequest:
    """How the bags of a batch are pooled."""

    num_values: int = 0
    """Numbers that are pooled; not used with a `shape`."""
    weight_starts_P: NDArray[np.int64] | None = None
    """Where the weights of each piece begin among those that come late; None: none do."""
    shape: tuple[int, int] | None = None
    """(B, C) of the matrix of results, if bags are pooled straight into it. Pieces then start at
    one of its columns."""
    pooled: range | None = None
    """Which numbers are read; None: all. A piece that begins elsewhere is trained all the same."""
    shared: SharedTraining | None = None
    """What is trained; None: the bags that are pooled."""
    out: Callable[[int], torch.Tensor] | None = None
    """Makes memory that numbers may be pooled to, float32 (num_values,); None: new memory."""


class BatchPlan(Protocol):
    """What a home knows of a batch before its keys are mapped."""

    @property
    def numbers(self) -> StoreNumbers | None:
        """Where `map_joined` is to write row numbers; None: it gives them."""

    def batch(self, bags: MappedBags, request: PoolRequest) -> MappedBatch:
        """The mapped batch, to be pooled. `bags` and `request` are those of the plan, or what a
        home that wants no numbers pools in their place."""


class MappedBatch(Protocol):
    """The bags that this rank pools, mapped to rows."""

    in_flight: BatchLeases
    """Its leases, until its backward begins or it is given up."""

    def open(self) -> None:
        """Makes the batch usable for work on the current stream."""

    def take_weights(self, weights_M: torch.Tensor) -> None:
        """Takes the weights that came late, with their graph."""

    def pool(self, anchor: Anchor, guard: Guard) -> torch.Tensor:
        """The pooled bags as one autograd node: float32 (num_values,), or of the request's `shape`.

        Its backward runs in what `guard` makes. It gives each table one optimizer update, even for
        an empty batch, and then ends the batch's leases; a second one raises RuntimeError. A table
        that accumulates keeps its lease until the update. `anchor` gives what makes the result
        require a gradient. Backward calls it again: if that is frozen by now, or if the call
        raises, no table is updated.
        """

    def record_stream(self, stream: torch.Stream) -> None:
        """Tells the allocator that work on the stream uses the device memory."""


class RowHome(Protocol):
    """Makes tables on one device and plans their batches. Copied and pickled with modules."""

    @property
    def device(self) -> torch.device:
        """Where vectors are pooled."""

    @property
    def pools_to_results(self) -> bool:
        """Whether bags may be pooled straight into the matrix of results, means included.

        Only then may bags be averaged, and a batch have a `shape`.
        """

    @property
    def averages_late_weights(self) -> bool:
        """Whether those means may be of weights that come late."""

    @property
    def trains_with_all_gradients(self) -> bool:
        """Whether a batch may have `shared`: tables that all ranks have, trained with the gradients
        of all ranks' results."""

    @property
    def reads_at_once(self) -> bool:
        """Whether `RowTable`s are read by row number where a batch is looked up, without a wait."""

    @property
    def copies_tables(self) -> bool:
        """Whether tables can be copied and pickled; else their rows are, and go into new ones."""

    def make_stores(
        self, tables: Sequence[tuple[HashTableConfig, Sequence[Shard]]]
    ) -> Sequence[torch.Tensor]:
        """The tensor that becomes the parameter of each table, for its shards."""

    def make_shards(
        self,
        config: HashTableConfig,
        shards: Sequence[Shard],
        store: torch.Tensor,
        optimizer: optim.Optimizer,
    ) -> Sequence[HeldShard]:
        """The shards, empty; `store` as `make_stores` makes it."""

    def check_dtype(self, table: str, dtype: torch.dtype) -> None:
        """Raises ValueError if the parameter of a table cannot be converted to this type."""

    def replace_rows(self, changes: Sequence[tuple[HeldShard, NewRows]]) -> None:
        """Gives each shard rows in place of all that it has. The next save of each must be full.

        Raises BusyError while batches are in flight. If it raises, every shard has the rows that it
        had.
        """

    def plan(self, bags: GroupBags, request: PoolRequest, *, training: bool) -> BatchPlan:
        """What is to be done with a batch whose keys are not mapped yet; runs in the background."""
