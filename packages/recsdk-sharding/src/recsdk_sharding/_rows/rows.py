"""The rows of one table that one process owns, and how they enter and leave a `state_dict`.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import recsdk_core
from recsdk_core import optim
from recsdk_core.checkpoint.columns import name_of
from recsdk_core.nn.accumulation import Accumulation
from recsdk_core.nn.rows_parameter import RowsParameter
from recsdk_core.nn.unused_entries import UnusedEntry
from recsdk_sharding._configs.configs import HashTableConfig
from recsdk_sharding._rows.accumulate import accumulate_steps_of_parameter
from recsdk_sharding._rows.choose_home import home_of
from recsdk_sharding._rows.home import HeldShard, RowHome, RowTable
from recsdk_sharding._rows.optimizers import arguments_of_class, optimizer_of_parameter
from recsdk_sharding._rows.row_state import (
    SavedShard,
    entry_of,
    fields_of,
    prefix_of,
    put_state,
    rows_for,
    shards_of_entries,
)
from recsdk_sharding.placement.devices import check_device
from recsdk_sharding.placement.layout import Shard

__all__ = ["APPLIED", "OwnedShard", "TableRows", "anchor_of"]

APPLIED = "_optimizer_classes"
"""Where `apply_optimizer_in_backward` leaves the classes on a parameter."""
_ATTACHED = (APPLIED, "_optimizer_kwargs")


@dataclass(frozen=True)
class OwnedShard:
    """A shard that this process owns."""

    name: str
    """The table's name, followed by `.columns_<first>_<last>` if it has not all columns."""
    shard: Shard
    """Which rows and columns it has."""
    held: HeldShard
    """The rows, in their home."""
    accumulation: Accumulation[Any] | None
    """Collects the gradients of several backwards; None: each is an update."""
    is_stateless: bool
    """Whether no optimizer was applied."""

    @property
    def table(self) -> RowTable:
        """The rows, as their owner sees them."""
        return self.held.table


class _StateLost(RuntimeError):
    """Optimizer state was loaded that the optimizer applied later cannot have."""


class TableRows(nn.Module):
    """The shards of one table that a process owns, in the home that its device has.

    Under most plans that is one shard; it may be none, and with column-wise plans more than one.

    The home makes the parameter `weight`. It carries the optimizer and `requires_grad`, and never
    gets a `.grad`. Tables are made at their first use. An optimizer that is applied later is taken
    at the next use, unless the table is sharded: rows get the state that was loaded for them, or a
    fresh one.

    In a `state_dict` the shard number r of the rows has, under `rank_<r>.`: `keys` int64 (n,),
    `weight` (n, D) in the dtype of the stored rows (loading takes any of the three),
    `state.<field>` float32 (n, width) per field of optimizer state, the scalars `update_count` and
    `seed` int64, `log_decay` float64 if the optimizer catches up, and `ranks` int64 (3,), which
    says among how many shards, by which rule and in what unit the keys were spread. With eviction
    also `evict_<what>` (n,), what it keeps of keys, and its `evict_clock`.
    A shard of some columns has them under `rank_<r>.columns_<first>_<last>.`. Loading takes the
    shards of any layout, keeps the rows and columns that this process owns, and replaces what the
    tables had. All shards that may have such keys must be there.
    """

    def __init__(
        self,
        config: HashTableConfig,
        shards: Sequence[Shard] | None = None,
        device: torch.device | None = None,
        store: torch.Tensor | None = None,
    ) -> None:
        """`shards`: what this process owns; None: all of the table.

        `store`: as the home makes it; None: it makes one for this table.
        """
        super().__init__()
        self.config = config
        self._is_planned = shards is not None
        self._shards = [Shard.whole(config.embedding_dim)] if shards is None else list(shards)
        self._held: Sequence[HeldShard] | None = None
        self._optimizer: optim.Optimizer | None = None
        self._kept: list[SavedShard] = []  # loaded before an optimizer, whose state they have
        self._lost_state = False  # loaded before an optimizer, and not kept
        self._accumulations: list[Accumulation[Any] | None] = []
        self.home: RowHome = home_of(device)
        """Where the rows are."""
        if store is None:
            [store] = self.home.make_stores([(config, self._shards)])
        self.weight = RowsParameter.of_table(config.name, store)
        self._siblings: list[weakref.ref[TableRows]] = []

    @staticmethod
    def of_tables(
        configs: Sequence[HashTableConfig],
        shards: Sequence[Sequence[Shard]] | None,
        device: torch.device | None,
    ) -> list[TableRows]:
        """Tables that are used together, so that their home may keep them in common stores."""
        own = shards or [[Shard.whole(config.embedding_dim)] for config in configs]
        stores = home_of(device).make_stores(list(zip(configs, own, strict=True)))
        made = [
            TableRows(config, None if shards is None else own[number], device, stores[number])
            for number, config in enumerate(configs)
        ]
        for each in made:
            each._siblings = [weakref.ref(other) for other in made]
        return made

    @property
    def shards(self) -> list[OwnedShard]:
        """What this process owns, by first column; tables are made on first use.

        Raises BusyError if an optimizer was applied while batches are in flight. Raises
        RuntimeError if it came after state was loaded that was not kept or is of another optimizer,
        and ValueError if a second one was applied.
        """
        held = self._made()
        return [
            OwnedShard(self._name_of(shard), shard, own, accumulation, self._optimizer is None)
            for shard, own, accumulation in zip(
                self._shards, held, self._accumulations, strict=True
            )
        ]

    def _made(self) -> Sequence[HeldShard]:
        if self._held is None:
            self._held = self._make()
            for other in filter(None, (sibling() for sibling in self._siblings)):
                # So that the home knows all tables of its stores. Optimizers may come later.
                if other._held is None and hasattr(other.weight, APPLIED):
                    other._held = other._make()
        elif self._optimizer is None:
            self._adopt_optimizer(self._held)
        elif self._lost_state:
            raise self._state_lost("its optimizer state was left out")
        elif len(getattr(self.weight, APPLIED, [])) > 1:
            optimizer_of_parameter(self.weight, self.config.name)  # refuses the second
        return self._held

    def _state_lost(self, problem: str) -> _StateLost:
        return _StateLost(
            f"table {self.config.name!r} was loaded before its optimizer was applied, and "
            f"{problem}; load it again, now that the optimizer is known"
        )

    def _applied_optimizer(self) -> optim.Optimizer | None:
        """The optimizer that the tables have, or take at their next use."""
        if self._optimizer is None and (self._held is None or not self._is_planned):
            return optimizer_of_parameter(self.weight, self.config.name)
        return self._optimizer

    def _adopt_optimizer(self, held: Sequence[HeldShard]) -> None:
        """Takes an optimizer that was applied after the tables were made."""
        optimizer = self._applied_optimizer()
        if optimizer is None:
            return
        if self._lost_state:
            raise self._state_lost("its optimizer state was left out")
        [own] = held  # all of them, before a plan
        found = None
        if self._kept:
            try:
                found = rows_for(self._shards[0], self._kept, self.config, optimizer)
            except ValueError as error:
                raise self._state_lost(str(error)) from error
        accumulations = self._make_accumulations()
        own.table.set_optimizer(optimizer)
        if found is not None:
            put_state(self.home, own, found)
        self._optimizer, self._accumulations, self._kept = optimizer, accumulations, []

    def _name_of(self, shard: Shard) -> str:
        name = self.config.name
        if shard.columns == (0, self.config.embedding_dim):
            return name
        return name_of(name, shard.columns)

    @property
    def optimizer(self) -> optim.Optimizer | None:
        """The optimizer that was applied to the parameter."""
        self._made()
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next updates; set it to change that of all shards."""
        held = self._made()
        return held[0].table.learning_rate if held else (self._optimizer or optim.SGD()).lr

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._made()
        self.set_learning_rate(value)

    def set_learning_rate(self, value: float) -> None:
        """Changes the rate of tables that are made, where it is another one; cheap where not."""
        for held in self._held or ():
            if held.table.learning_rate != value:
                held.table.learning_rate = value

    def _make_accumulations(self) -> list[Accumulation[Any] | None]:
        by_optimizer = accumulate_steps_of_parameter(self.weight)
        by_config = self.config.accumulate_steps
        if by_optimizer > 1 and by_config > 1 and by_optimizer != by_config:
            raise ValueError(
                f"table {self.config.name!r}: its config has accumulate_steps={by_config}, its "
                f"optimizer accumulate_step={by_optimizer}; give one of them"
            )
        steps = max(by_optimizer, by_config)
        return [Accumulation(steps) if steps > 1 else None for _ in self._shards]

    def _make(self) -> Sequence[HeldShard]:
        self._accumulations = self._make_accumulations()
        self._optimizer = optimizer_of_parameter(self.weight, self.config.name)
        optimizer = self._optimizer or optim.SGD()
        return self.home.make_shards(self.config, self._shards, self.weight, optimizer)

    def check_trainable(self) -> None:
        """Raises RuntimeError if the parameter requires a gradient but has no optimizer.

        ValueError if it is another one than was given the optimizer, as by functional_call.
        """
        if self._optimizer is not None and self.weight.requires_grad:
            if not getattr(self.weight, APPLIED, None):
                raise ValueError(
                    f"table {self.config.name!r}: a call was given another `weight`, whose rows it "
                    "can neither hold nor train: leave `weight` out of the parameters that "
                    "functional_call gets, or detach() it to read rows only"
                )
        elif self.optimizer is None and self.weight.requires_grad:
            raise RuntimeError(
                f"table {self.config.name!r} has no optimizer: call torchrec's "
                "apply_optimizer_in_backward(optimizer_class, module.parameters(), {...}) before "
                "it trains, and before DistributedModelParallel, or freeze it with "
                "requires_grad_(False)"
            )

    def take_rows_of(self, other: TableRows) -> None:
        """Copies another's optimizer, `requires_grad`, learning rate, and rows of this process."""
        self.weight.requires_grad_(other.weight.requires_grad)
        self._attach(other._attached())
        if other._held is not None:
            self._replace_rows([SavedShard.of_held(each.held, each.shard) for each in other.shards])
            self.learning_rate = other.learning_rate

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TableRows:
        """Moves rows and optimizer state, if `fn` moves tensors to another device.

        Raises ValueError for another device than the plan's and for a type that the home cannot
        hold, BusyError while batches are in flight; then nothing has moved.
        """
        probe = fn(self.weight.detach()[:0])
        if probe.device == self.weight.device:
            self.home.check_dtype(self.config.name, probe.dtype)
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]
        if self._is_planned:
            raise ValueError(
                f"table {self.config.name!r}: a plan has put its rows on {self.weight.device}, so "
                f"it cannot move to {probe.device}: save it, and load it into a model that is "
                "sharded for that device"
            )
        check_device(probe.device, f"table {self.config.name!r}")
        for own in self._made() if self._held is not None else []:
            own.check_idle()
        moved = TableRows(self.config, device=probe.device)
        moved.take_rows_of(self)
        self.weight = moved.weight
        self.home, self._held = moved.home, moved._held
        self._accumulations = moved._accumulations
        return self

    def _attached(self) -> dict[str, Any]:
        """What `apply_optimizer_in_backward` left on the parameter.

        Without what torchrec's own sharders do to it.
        """
        arguments = [
            arguments_of_class(given) for given in getattr(self.weight, "_optimizer_kwargs", [])
        ]
        classes = list(getattr(self.weight, "_optimizer_classes", []))
        return dict(zip(_ATTACHED, (classes, arguments), strict=True))

    def _attach(self, attached: dict[str, Any]) -> None:
        # Not by applying again: that would keep the parameter alive for ever, through its hook.
        classes, arguments = attached.values()
        if not classes:
            return
        self.weight.__dict__.update(attached)
        made = []
        if not self._is_planned:  # else what shards it gives it one, without state on the device
            pairs = zip(classes, arguments, strict=True)
            made = [make([self.weight], **given) for make, given in pairs]
        self.weight.__dict__["_in_backward_optimizers"] = made

    def __getstate__(self) -> dict[str, Any]:
        if self._held is not None:
            self._made()
        # Copies of a parameter lose its attributes, so they travel beside it.
        state = {**self.__dict__, "_attached_to_weight": self._attached(), "_saved": None}
        state["_siblings"] = []  # a copy has a store of its own
        state["_accumulations"] = [  # their gradients stay with the original
            None if each is None else Accumulation(each.num_backwards)
            for each in self._accumulations
        ]
        if self._held and not self.home.copies_tables:
            state["_held"] = None
            saved = [SavedShard.of_held(each.held, each.shard) for each in self.shards]
            state["_saved"] = saved, self.learning_rate
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached, saved = state.pop("_attached_to_weight"), state.pop("_saved")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.weight.__class__ = RowsParameter  # a pickled one is plain; optimizers may have it too
        self.weight.table_name = self.config.name
        self._attach(attached)
        if saved is not None:
            self._replace_rows(saved[0])
            self.learning_rate = saved[1]

    def extra_repr(self) -> str:
        rows = [len(own.table) for own in self._held or []]
        return f"name={self.config.name!r}, dim={self.config.embedding_dim}, rows={rows}"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for each in self.shards:
            saved = SavedShard.of_held(each.held, each.shard)
            start = prefix + prefix_of(each.shard, self.config.embedding_dim)
            for name, tensor in saved.tensors().items():
                destination[f"{start}{name}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        name = f"table {self.config.name!r}: "
        try:
            unexpected_keys.extend(self._unused(state_dict, prefix))
            if not self._shards:
                return
            saved = shards_of_entries(state_dict, prefix, self.config.embedding_dim)
            if saved:
                with self.being_replaced():
                    self._replace_rows(saved)
                    self._keep_state(saved)
            else:
                start = prefix_of(self._shards[0], self.config.embedding_dim)
                missing_keys.append(f"{prefix}{start}keys")
        except (ValueError, TypeError, KeyError, recsdk_core.RecsdkError) as error:
            error_msgs.append(name + str(error).removeprefix(name))  # the engine names it too

    def _unused(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """The entries below a prefix that no table, or this one's optimizer, is made of.

        State that a table without an optimizer leaves out is not among them.
        """
        advice = (
            "weights of a dense table, whose rows have no ids: use "
            f"recsdk_sharding.import_rows(model, state_dict, {{{self.config.name!r}: ids}})"
        )
        entries = {n: entry_of(n.removeprefix(prefix)) for n in state_dict if n.startswith(prefix)}
        optimizer = self._applied_optimizer()
        known = {f"state.{name}" for name in fields_of(optimizer)}
        return [
            UnusedEntry(name, advice) if name == f"{prefix}weight" else name
            for name, entry in entries.items()
            if entry is None
            or (entry.startswith("state.") and entry not in known and optimizer is not None)
        ]

    @contextmanager
    def being_replaced(self) -> Iterator[None]:
        """Inside, all rows are replaced, so that state lost by an earlier load does not matter.

        It matters again if the body raises.
        """
        was_lost = False
        try:
            self._made()
        except _StateLost:
            was_lost, self._kept, self._lost_state = True, [], False
        try:
            yield
        except BaseException:
            self._lost_state = self._lost_state or was_lost
            raise

    def _keep_state(self, saved: Sequence[SavedShard]) -> None:
        """Keeps loaded state for an optimizer that is applied later; not of a frozen table."""
        has_state = self._optimizer is None and any(each.state for each in saved)
        is_kept = has_state and self.weight.requires_grad and not self._is_planned
        self._kept = [each.copy() for each in saved] if is_kept else []
        self._lost_state = has_state and not is_kept

    def note_loaded(self, *, has_state: bool) -> None:
        """Notes that rows were loaded from a checkpoint, their state only if there is an optimizer.

        `has_state`: whether the checkpoint has optimizer state.
        """
        self._kept, self._lost_state = [], has_state and self._optimizer is None

    def _replace_rows(self, saved: list[SavedShard]) -> None:
        shards = self.shards
        found = [rows_for(each.shard, saved, self.config, self.optimizer) for each in shards]
        for each, rows in zip(shards, found, strict=True):
            limit, evicts = each.table.max_rows, self.config.eviction is not None
            if limit is not None and len(rows.keys) > limit and not evicts:
                raise ValueError(
                    f"{len(rows.keys)} rows to load do not fit into this rank's {limit}; raise "
                    "max_rows, or num_embeddings if the rows are on a device"
                )
        changes = [(each.held, rows.new_rows()) for each, rows in zip(shards, found, strict=True)]
        for each in shards:
            if each.accumulation is not None:
                each.accumulation.drop()  # its leases would keep the table from being replaced
        self.home.replace_rows(changes)


def anchor_of(rows: Sequence[TableRows]) -> torch.Tensor:
    """The parameter that connects the tables of one autograd node to the graph.

    Tables without an optimizer are not connected: nothing trains them.

    Raises ValueError if some tables are frozen and others not: a node trains all of its tables.
    """
    frozen = [each.config.name for each in rows if not each.weight.requires_grad]
    if 0 < len(frozen) < len(rows):
        raise ValueError(
            f"tables {frozen} are frozen (requires_grad_(False)) and others of the same collection "
            "are not: freeze all tables of a collection or none; put them in two collections"
        )
    if any(each.optimizer is None for each in rows):
        return rows[0].weight.detach()
    return rows[0].weight
