"""Gradients of a table's rows that wait for the step of a `RowOptimizer`.

Shape letters: N keys, B bags, U distinct rows, D row width.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core.checkpoint.replacing import give_state
from recsdk_core.combine import CombineBlock, combine_gradients, distinct_keys
from recsdk_core.nn._state import LoadedState
from recsdk_core.nn.accumulation import Accumulation
from recsdk_core.optim import Optimizer
from recsdk_core.outcome import Outcome
from recsdk_core.table import Lease, Table
from recsdk_core.tables import Bags, release_leases

if TYPE_CHECKING:
    from recsdk_core.nn.function import FeatureBags

__all__ = ["RowGradients"]

_MOST_KEYS = 1 << 20  # of a batch, that may repeat


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Mapped bags with their gradients, as a backward left them."""

    rows: torch.Tensor
    outcomes: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    pooling: str = "sum"
    grad_BD: torch.Tensor

    def bags(self, rows: torch.Tensor) -> Bags:
        """The bags, with these numbers for their keys' rows, int64 (N,)."""
        return Bags(rows, self.outcomes, self.offsets, self.weights, self.pooling)

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps, less offsets and weights."""
        return self.rows.nbytes + self.outcomes.nbytes + self.grad_BD.nbytes


class RowGradients:
    """The gradient of each row that backwards have touched, added up.

    Backwards are kept as they come, and added up when `values` is read or when they need more than
    `most_bytes` and more than half of the sums; the bits do not depend on when. It keeps the leases
    of their batches, so that no other key gets a row that has a gradient here. A copy has no
    gradients and no optimizer, but waits for one if this one does. Threads may run backwards at
    once, in no order; whoever drops, replaces or applies gradients waits until they have ended.

    Memory: the sums, and before they are added up as much again, or twice `most_bytes`, and a
    backward: all are joined in one matrix, so that half of the sums stand for three of it.
    """

    most_bytes = 1 << 25
    """Of gradients that are not added up yet."""

    def __init__(
        self,
        table: Table | None = None,
        *,
        is_fused: bool = False,
        waits: bool = False,
        is_told: bool = False,
        accumulate_steps: int = 1,
    ) -> None:
        self.table = table
        self._is_told = is_told
        self._default: Optimizer | None = None
        self.loaded: LoadedState | None = None
        """What was loaded before anybody said how to train, for the optimizer that comes; it holds
        that memory until then."""
        self._loaded_into: tuple[int, tuple[tuple[str, int], ...]] | None = None
        """Update count and state fields of the table when it got its state from a state_dict."""
        self._accumulate_steps = accumulate_steps
        self.accumulation: Accumulation[Any] | None = None
        """Where gradients of a fused optimizer wait for `accumulate_steps` backwards."""
        self._noted = torch.empty(0, dtype=torch.int64, device="cpu")  # room for keys of a batch
        self._num_noted = self._num_distinct = 0
        self._has_noted = False
        self._is_batch_over = True
        self.forget()
        self.is_fused = is_fused
        """Whether the module was given an optimizer of its own."""
        self.waits = waits
        """Whether backwards leave gradients here, in place of updating the rows themselves."""
        self.updated_in: int | None = None
        """torch's number of the backward pass that last updated rows of a fused optimizer."""
        self.owner: object | None = None
        """What the optimizer that applies them holds too."""
        self.agreed: tuple[dict[str, Any], Optimizer] | None = None
        """Options of a group, and the table's optimizer, which does what they ask for."""
        self._sums: _Part | None = None
        self._parts: list[_Part] = []  # came after the sums
        self._waiting_bytes = 0  # of the parts
        self._lock = threading.RLock()
        self._leases: list[Lease] = []
        self._shared_leases: list[Lease] = []  # shared with graphs: each ends with its last user
        self.is_applied = False
        """Whether a step has applied all that is here."""

    def __reduce__(self) -> tuple[Any, ...]:
        steps = self._accumulate_steps
        loaded = (self.loaded, self._loaded_into)
        return _copy_of, (self.is_fused, self.waits, self.is_told, steps, *loaded)

    def note_keys(self, keys: torch.Tensor, trains: bool) -> None:
        """Notes keys (N,) of a forward in training mode, for penalties.

        Forwards are one batch until a backward or a penalty has followed. One that no backward can
        follow, since it does not train, begins no batch that others join.
        """
        with self._lock:
            self._note(keys, trains)

    def _note(self, keys: torch.Tensor, trains: bool) -> None:
        if self._is_batch_over:
            self._num_noted = self._num_distinct = 0
        self._is_batch_over, self._has_noted = self._is_batch_over and not trains, True
        begin, end = self._num_noted, self._num_noted + keys.numel()
        if end > self._noted.numel():
            noted = self._noted.new_empty(max(end, 2 * begin))
            noted[:begin] = self._noted[:begin]
            self._noted = noted
        self._noted[begin:end].copy_(keys)  # the caller may reuse their memory
        self._num_noted = end
        if end > _MOST_KEYS + 2 * self._num_distinct:  # nobody may ever ask for them
            self._noted = torch.unique(self._noted[:end])
            self._num_noted = self._num_distinct = len(self._noted)

    def end_batch(self) -> None:
        """The next forward begins another batch of keys."""
        self._is_batch_over = True

    def keys_of_last_batch(self) -> torch.Tensor:
        """Those noted, (n,); raises RuntimeError if there was no such forward."""
        if not self._has_noted:
            name = "" if self.table is None else self.table.name
            raise RuntimeError(
                f"table {name!r} had no forward in training mode, so it has no last batch; call "
                "the module first, or pass last_batch=False for all rows"
            )
        self.end_batch()
        return self._noted[: self._num_noted].clone()

    def forget(self) -> None:
        """Drops what a fused optimizer has accumulated, since other rows come."""
        if self.accumulation is not None:
            self.accumulation.drop()
        if self._accumulate_steps > 1:
            self.accumulation = Accumulation(self._accumulate_steps)

    def attach(self, table: Table) -> None:
        """Takes a table, whose optimizer is nobody's choice so far unless `is_told`."""
        if table is not self.table:  # a shallow copy of a module has this one's
            self._default = table.optimizer
        self.table = table

    def apply(self, optimizer: Optimizer) -> None:
        """Lets the optimizer update rows in backward from now on."""
        self.check_loaded(optimizer)
        self.set_optimizer(optimizer)
        self.is_fused = True

    def check_table(self, table: Table) -> None:
        """Raises ValueError for another table than the one that gets the gradients."""
        if table is not self.table and self.table is not None:
            raise ValueError(
                f"table {table.name!r} was put into a module that was made with table "
                f"{self.table.name!r}, which would get its gradients: use the module of the table "
                "itself in both places, or load_state_dict its rows"
            )

    @property
    def is_told(self) -> bool:
        """Whether somebody said how the table is trained; a learning rate that is set says it."""
        if self.waits or self.is_fused or self._is_told or self.table is None:
            return True
        return self.table.optimizer is not self._default  # one that was set is another object

    def check_trained(self) -> None:
        """Raises RuntimeError unless somebody said how the table is trained."""
        if self.is_told:
            return
        assert self.table is not None
        raise RuntimeError(
            f"table {self.table.name!r}: nobody said how to train it: pass optimizer= to its "
            "module, which then updates rows in backward, or make a RowOptimizer over the model, "
            "whose step the loop calls; requires_grad_(False) freezes it"
        )

    def check_looked_up_once(self) -> None:
        """Raises RuntimeError if the running backward pass has updated rows of the table.

        A lookup in backward is a checkpoint's, which makes again what its forward made. Passes
        inside this one have larger numbers.
        """
        if self.updated_in is None:
            return
        running = torch._C._current_graph_task_id()
        if 0 <= running <= self.updated_in and self.table is not None:
            raise RuntimeError(
                f"table {self.table.name!r}: a checkpoint looks it up again, and this backward has "
                "updated its rows since: look it up outside of torch.utils.checkpoint, or inside "
                "of one checkpoint only, or train it by a RowOptimizer"
            )

    def check_owner(self) -> None:
        """Raises RuntimeError in a copy, which no optimizer would train."""
        if self.owner is None and self.table is not None:
            raise RuntimeError(
                f"table {self.table.name!r} is a copy of one that a RowOptimizer trains, and has "
                "no optimizer itself: make a RowOptimizer for the copy, or freeze it with "
                "requires_grad_(False)"
            )

    def check_penalized(self) -> None:
        """Raises unless gradients of a penalty wait here for a `RowOptimizer`."""
        self.check_trained()
        if not self.waits:
            name = "" if self.table is None else self.table.name
            raise ValueError(
                f"table {name!r}: l2 would be an update of its own, since its module's optimizer "
                "updates rows in backward: give that optimizer weight_decay, or train the module "
                "by a RowOptimizer"
            )
        self.check_owner()

    def why_not_replaced(self) -> str | None:
        """Why other rows cannot be loaded now; None: they can."""
        if self.is_empty or self.is_applied or self.table is None:
            return None
        return (
            f"gradients of rows of table {self.table.name!r} wait for a RowOptimizer, and would be "
            "lost with these rows: call its step or zero_grad before other rows come"
        )

    def note_loaded(self, waiting: LoadedState | None, has_state: bool) -> None:
        """Notes that the table got other rows, with state that waits, or that it has, or none."""
        assert self.table is not None
        self.loaded = waiting
        self._loaded_into = self._now if has_state else None
        self.forget()

    @property
    def _now(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        assert self.table is not None
        return self.table.update_count, tuple(self.table.state_fields)

    @property
    def _has_loaded(self) -> bool:
        """Whether the table's state is the loaded one: no update has changed it since."""
        return self._loaded_into is not None and self._loaded_into == self._now

    def check_loaded(self, optimizer: Optimizer) -> None:
        """Raises ValueError if state was loaded that is not of this optimizer."""
        if self.table is None or (self.loaded is None and not self._has_loaded):
            return
        came = [dict(self.table.state_fields)] if self.loaded is None else self.loaded.widths
        wanted = dict(self.table.empty_copy(optimizer=optimizer).state_fields)
        others = [each for each in came if each != wanted]
        if others:
            raise ValueError(
                f"table {self.table.name!r}: state {others[0]} was loaded before its optimizer was "
                f"made, which has {wanted}: make the optimizer that was saved, or leave that "
                "state's entries out of load_state_dict(..., strict=False)"
            )

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Gives the table this optimizer, which `check_loaded` has passed.

        Rows keep state that was loaded, if no update has changed it since; else it is fresh, and
        counts updates from 0, as a new optimizer of torch does.
        """
        assert self.table is not None
        is_fresh = self.loaded is None and not self._has_loaded
        self.table._replace_optimizer(optimizer, drop_state=not self._has_loaded)
        if is_fresh and self.table.state_fields:  # without state a count changes nothing
            self.table.update_count, self._loaded_into = 0, None
        self._restore_loaded()

    def settle(self) -> None:
        """Gives state that waits to a table that was given its optimizer by itself.

        Raises ValueError if that has no such state.
        """
        if self.loaded is not None and self.is_told and self.table is not None:
            self.check_loaded(self.table.optimizer)
            self._restore_loaded()

    def _restore_loaded(self) -> None:
        """Gives rows the state that was loaded, if they are still there, once the table has room.

        Cost: one upsert of these rows; with eviction or admission, of which an upsert would be a
        step, or rows that keys without one share, a copy of all rows.
        """
        if self.loaded is None or self.table is None:
            return
        keys, state = self.loaded.keys, self.loaded.state
        if self.table._has_more:
            shared = (self.loaded.shared_keys.numpy(), _arrays(self.loaded.shared_state))
            give_state(self.table, keys.numpy(), _arrays(state), shared if shared[1] else None)
        else:
            self._give(keys, state)
        self.loaded, self._loaded_into = None, self._now

    def _give(self, keys: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        assert self.table is not None
        weights, outcomes = self.table.lookup(keys, return_outcomes=True)
        is_there = outcomes == Outcome.FOUND
        found = {name: each[is_there].contiguous() for name, each in state.items()}
        self.table.upsert(keys[is_there], weights[is_there], found)

    def keep(self, lease: Lease | None, is_shared: bool) -> None:
        """Keeps a batch's lease until `drop`, which ends it unless it `is_shared` with a graph."""
        if lease is not None:
            with self._lock:
                (self._shared_leases if is_shared else self._leases).append(lease)

    def add(
        self, feature: FeatureBags, weights: torch.Tensor | None, grad_BD: torch.Tensor
    ) -> None:
        """Adds the gradients of a feature's bags, with its keys' weights (N,).

        Nobody may write to `weights` and `grad_BD` afterwards.
        """
        offsets = feature.offsets
        part = _Part(
            rows=feature.rows,
            outcomes=feature.outcomes,
            offsets=None if offsets is None else offsets.clone(),  # it may be the caller's buffer
            weights=weights,
            pooling=feature.pooling,
            grad_BD=grad_BD,
        )
        with self._lock:
            self._parts.append(part)
            self.is_applied = False
            self._waiting_bytes += part.num_bytes
            sums = 0 if self._sums is None else self._sums.num_bytes
            if len(self._parts) > 1 and self._waiting_bytes > max(self.most_bytes, sums // 2):
                self._add_up()

    @property
    def is_empty(self) -> bool:
        """Whether no backward has left gradients."""
        return self._sums is None and not self._parts

    @property
    def values(self) -> torch.Tensor | None:
        """float32 (U, D), what is `weight.grad`; None: no backward has left any.

        A row of zeros if backwards touched no row: some functions of torch refuse to look at
        nothing, as the largest number of it.
        """
        with self._lock:
            self._add_up()
            sums = self._sums
        if sums is None:
            return None
        sums_UD = sums.grad_BD
        return sums_UD if len(sums_UD) else sums_UD.new_zeros(1, sums_UD.shape[1])

    @property
    def _shares_rows(self) -> bool:
        """Whether keys without a row share some, which are trained."""
        return self.table is not None and self.table.default.kind == "shared_rows"

    def _add_up(self) -> None:
        """Makes one sum for each row. Gradients are added in the order in which they came."""
        # Sums are bags of one key, so they have the same mean as sum.
        while self._parts:
            _, group = next(itertools.groupby(self._parts, lambda part: part.pooling))
            alike = list(group)
            joined = _joined([*([] if self._sums is None else [self._sums]), *alike])
            # `joined` takes the place of its parts, so that their memory is free before sums need
            # some. If these find none, no gradient is lost.
            self._sums, self._parts = None, [joined, *self._parts[len(alike) :]]
            del alike, group
            self._sums = _sums_of(joined, self._shares_rows)
            del self._parts[0]
        self._waiting_bytes = 0

    def replace(self, values: torch.Tensor) -> None:
        """Sets the gradients of the same rows; raises ValueError for another shape or dtype."""
        own = self.values
        if own is None and self.table is not None and values.shape == (0, self.table.dim):
            return  # zeros_like of the parameter: torch steps a new optimizer with it to save it
        shape = None if own is None else own.shape
        if (
            self._sums is None
            or values.shape != shape
            or values.dtype != torch.float32
            or values.is_sparse
        ):
            raise ValueError(
                f"weight.grad of a table takes None, or float32 of the shape that it has, {shape}; "
                f"got {values.dtype} {tuple(values.shape)}"
            )
        if len(self._sums.rows):
            self._sums = replace(self._sums, grad_BD=values.detach().contiguous())

    def blocks(self) -> list[tuple[Bags, torch.Tensor, int]]:
        """All gradients, as `update_tables` takes them."""
        parts = self._parts if self._sums is None else [self._sums, *self._parts]
        return [(part.bags(part.rows), part.grad_BD, 0) for part in parts]

    def drop(self) -> None:
        """Forgets the gradients and releases the leases."""
        with self._lock:
            release_leases(self._leases)  # first, so that who is interrupted can drop them again
            self._leases, self._shared_leases = [], []
            self._sums, self._parts, self._waiting_bytes = None, [], 0

    def drop_applied(self) -> None:
        """As `drop`, if a step has applied all that is here."""
        if self.is_applied:
            self.drop()


def _arrays(state: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.float32]]:
    return {name: each.numpy() for name, each in state.items()}


def _part_of_sums(rows: torch.Tensor, sums_UD: torch.Tensor) -> _Part:
    """`rows`: -1 - s for a row s that keys without one share."""
    outcomes = np.where(rows.numpy() < 0, int(Outcome.MISSING), int(Outcome.FOUND))
    return _Part(
        rows=torch.from_numpy(np.where(rows.numpy() < 0, -1 - rows.numpy(), rows.numpy())),
        outcomes=torch.from_numpy(outcomes.astype(np.uint8)),
        grad_BD=sums_UD,
    )


def _with_shared(part: _Part) -> _Part:
    """The same, as if rows that keys without one share were rows -1, -2, ... of keys."""
    has_row = part.outcomes.numpy() <= int(Outcome.INSERTED)
    rows = np.where(has_row, part.rows.numpy(), -1 - part.rows.numpy())
    return replace(part, rows=torch.from_numpy(rows), outcomes=torch.zeros_like(part.outcomes))


def _sums_of(part: _Part, shares_rows: bool) -> _Part:
    """One gradient for each row, in order of first occurrence."""
    if shares_rows:
        part = _with_shared(part)
    # By numpy: torch spreads these over threads, which cost more than they save.
    has_row = part.outcomes.numpy() <= int(Outcome.INSERTED)
    has_all = bool(has_row.all())
    rows, which = distinct_keys(part.rows if has_all else part.rows[torch.from_numpy(has_row)])
    width = part.grad_BD.shape[1]
    sums_UD = part.grad_BD.new_empty(len(rows), width, dtype=torch.float32)
    if len(rows):
        which_N = which if has_all else torch.zeros_like(part.rows)
        if not has_all:
            which_N[torch.from_numpy(has_row)] = which
        bags = part.bags(which_N)
        block = CombineBlock(bags=bags, column=0, width=width, start=0, num_sums=len(rows))
        combine_gradients([block], part.grad_BD, sums_UD.view(-1))
    return _part_of_sums(rows, sums_UD)


def _joined(parts: Sequence[_Part]) -> _Part:
    """The bags of all parts, one after the other; their pooling is that of the last."""
    if len(parts) == 1:
        return parts[0]
    weights = None
    if any(part.weights is not None for part in parts):
        ones = [torch.ones_like(part.rows, dtype=torch.float32) for part in parts]
        given = [part.weights for part in parts]
        weights = torch.cat([one if w is None else w for one, w in zip(ones, given, strict=True)])
    starts = itertools.accumulate((len(part.rows) for part in parts), initial=0)
    ends = [_ends_of_bags(part) + start for part, start in zip(parts, starts)]  # noqa: B905
    return _Part(
        rows=torch.cat([part.rows for part in parts]),
        outcomes=torch.cat([part.outcomes for part in parts]),
        offsets=torch.cat([ends[0].new_zeros(1), *ends]),
        weights=weights,
        pooling=parts[-1].pooling,
        grad_BD=torch.cat([part.grad_BD for part in parts]),
    )


def _ends_of_bags(part: _Part) -> torch.Tensor:
    if part.offsets is None:
        return torch.arange(1, len(part.rows) + 1, device="cpu")
    return part.offsets[1:].to(torch.int64)


def _copy_of(
    is_fused: bool,
    waits: bool,
    is_told: bool,
    accumulate_steps: int,
    loaded: LoadedState | None,
    loaded_into: tuple[int, tuple[tuple[str, int], ...]] | None,
) -> RowGradients:
    made = RowGradients(
        is_fused=is_fused, waits=waits, is_told=is_told, accumulate_steps=accumulate_steps
    )
    made.loaded, made._loaded_into = loaded, loaded_into
    return made
