"""What HashEmbedding and HashEmbeddingBag have in common: a torch module over one table.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from recsdk_core._internal.checks import require_bool
from recsdk_core._internal.interruptions import held_back
from recsdk_core._internal.keyed import NO_TIME
from recsdk_core.admission import Admit
from recsdk_core.combine import distinct_keys
from recsdk_core.eviction import Evict
from recsdk_core.init import Initializer, Uniform
from recsdk_core.nn._state import (
    brings_state,
    forget_rows,
    load_table,
    save_table,
    take_state,
)
from recsdk_core.nn.bag_arguments import require_tensor
from recsdk_core.nn.drawn_names import DRAWN_NAME, draw_name, is_drawn, name_of, named_since
from recsdk_core.nn.embedding_arguments import (
    NO_MARKS,
    Marks,
    accumulation_of,
    check_default,
    check_norms,
    map_without,
    padding_among,
    padding_of,
    refuse_others,
    sizes_of,
)
from recsdk_core.nn.function import FeatureBags, Node, TableBags, gathering, pooling
from recsdk_core.nn.lookup_options import LookupOptions, node_of_lookup, squares_of
from recsdk_core.nn.operators import not_compiled, number_of
from recsdk_core.nn.row_entries import ENTRIES, AnyName
from recsdk_core.nn.row_gradients import RowGradients
from recsdk_core.nn.rows_parameter import Handle, RowsParameter
from recsdk_core.optim import SGD, Optimizer, from_torch
from recsdk_core.outcome import Default, Outcome
from recsdk_core.table import DType, OnFull, Rounding, Table

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TableModule"]

_OVER_RANKS = (
    "shard its table with recsdk-sharding instead: docs/howto/spread_plain_modules.md has the lines"
)


class TableModule(nn.Module):
    """A module over one table; its parameter `weight` is only a handle.

    Rows, optimizer and optimizer state belong to the table. `weight` is an empty (0, D) parameter
    that makes outputs require gradients. With an `optimizer` each backward through a forward
    applies one update, and `weight.grad` stays None. After a `RowOptimizer` has taken the table,
    backward updates nothing, and `weight.grad` has the gradients of the touched rows until its
    `step` applies them.
    `weight.requires_grad_(False)` freezes the table. Functions of torch.nn.init and other writes in
    place to it raise ValueError: `initializer` makes new rows, `table.upsert` writes rows.
    """

    mode: str = "sum"
    """How vectors of a bag become one."""

    def __init__(
        self,
        *sizes: int,
        num_embeddings: int | None = None,
        embedding_dim: int | None = None,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        name: str | None = None,
        optimizer: Optimizer | type | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        accumulate_steps: int = 1,
        initializer: Initializer = Uniform(low=-0.01, high=0.01),
        seed: int = 0,
        max_rows: int | None = None,
        eviction_groups: int | None = None,
        on_full: OnFull = "refuse",
        eviction: Evict | None = None,
        admission: Admit | None = None,
        default: Default = Default(),
        on_nonfinite: Literal["apply", "raise", "skip"] = "apply",
        dtype: DType = "float32",
        rounding: Rounding = "stochastic",
        num_threads: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        refuse_others(kind, others)
        self.num_embeddings, self.embedding_dim = sizes_of(
            kind, sizes, num_embeddings, embedding_dim
        )
        self.padding_idx, self._padding = padding_of(kind, padding_idx)
        check_norms(kind, max_norm, norm_type)
        self.max_norm = None if max_norm is None else float(max_norm)
        self.norm_type = float(norm_type)
        # A text, since compilers take numbers with a point for what changes from call to call.
        self._norms = None if max_norm is None else f"{self.max_norm}, {self.norm_type}"
        require_bool(kind, scale_grad_by_freq=scale_grad_by_freq)
        self.scale_grad_by_freq = scale_grad_by_freq
        self.accumulate_steps = accumulation_of(kind, accumulate_steps, optimizer is not None)
        check_default(kind, default, padding_idx, max_norm)
        self._drawn_name: int | None = None
        if name is None:
            self._drawn_name = draw_name()
            name = name_of(self._drawn_name)
        self.table = Table(
            self.embedding_dim,
            name=name,
            optimizer=_optimizer(SGD() if optimizer is None else optimizer, optimizer_kwargs),
            initializer=initializer,
            seed=seed,
            max_rows=max_rows,
            eviction_groups=eviction_groups,
            on_full=on_full,
            eviction=eviction,
            admission=admission,
            default=default,
            on_nonfinite=on_nonfinite,
            dtype=dtype,
            rounding=rounding,
            num_threads=num_threads,
        )
        self.weight = RowsParameter.of_table(
            self.table.name, torch.empty(0, self.embedding_dim, dtype=torch.float32)
        )
        self._gradients = RowGradients(
            is_fused=optimizer is not None, accumulate_steps=self.accumulate_steps
        )
        self._attach()

    @classmethod
    def from_pretrained(
        cls, keys: torch.Tensor, weights: torch.Tensor, freeze: bool = True, **options: Any
    ) -> Self:
        """A module with rows `weights`, float32 (N, D), of keys (N,); unless `freeze` it trains.

        `options` are those of the constructor. New keys still get rows of their own in training
        mode. Raises ValueError for keys that repeat, are `padding_idx` or exceed `max_rows`.
        """
        require_tensor("keys", keys)
        require_tensor("weights", weights)
        require_bool(cls.__name__, freeze=freeze)
        if weights.dim() != 2 or len(weights) != keys.numel():
            raise ValueError(
                f"{cls.__name__}: weights must be a matrix with a row for each of "
                f"{keys.numel()} keys, got {tuple(weights.shape)}"
            )
        made = cls(weights.shape[1], **options)
        made._write(keys.reshape(-1).contiguous(), weights.detach().float().contiguous())
        made.weight.requires_grad_(not freeze)
        return made

    def _write(self, keys: torch.Tensor, weights: torch.Tensor) -> None:
        is_padding = padding_among(keys, self._padding)
        if is_padding is not None and bool(is_padding.any()):
            raise ValueError(
                f"{type(self).__name__}: padding_idx {self.padding_idx} has no row; leave it out "
                "of keys"
            )
        rule = self.table.eviction
        times = NO_TIME if rule is not None and rule.by == "time" else None
        outcomes = self.table.upsert(keys, weights, times=times, return_outcomes=True)
        if bool((outcomes != int(Outcome.INSERTED)).any()):
            raise ValueError(
                f"{type(self).__name__}: {len(keys)} keys made {len(self.table)} rows; pass keys "
                "that do not repeat, and max_rows that holds them"
            )

    def reset_parameters(self) -> None:
        """Forgets all ids, whose rows begin anew when they show up, as nn.Embedding draws anew.

        A table without a name draws another, so they get other first rows; one with a name the same
        again. Optimizer state of rows goes with them, the count of updates stays. Raises
        RuntimeError while gradients wait for a `RowOptimizer`, BusyError while outputs of earlier
        forwards live, or a save is under way. Gradients of `accumulate_steps` that wait for an
        update are dropped.
        """
        why_not = self._gradients.why_not_replaced()
        if why_not is not None:
            raise RuntimeError(why_not)
        self._gradients.drop_applied()
        with held_back():
            forget_rows(self.table, self._gradients.forget)
            self._gradients.note_loaded(None, False)
            if self._drawn_name is not None:
                self._take_name(draw_name())

    def _take_name(self, drawn: int) -> None:
        """Takes a drawn name, so that new keys get its first rows."""
        self.table.rename(name_of(drawn))
        self._drawn_name = drawn
        self.weight.table_name = self.table.name

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._wrap_weight()
        self._attach()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._wrap_weight()  # to_empty, and torch.__future__'s ways of conversion, make another
        return self

    def _wrap_weight(self) -> None:
        # A pickled or converted one is plain; optimizers may have it too.
        self.weight.__class__ = RowsParameter
        self.weight.table_name = self.table.name
        self.weight.gradients = self._gradients

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__.get("_parameters", {}).get("weight") if name == "weight" else None
        if own is not None and value is not own:
            raise ValueError(
                f"table {self.table.name!r}: `weight` of {type(self).__name__} cannot be replaced, "
                "since it has no row in it: from_pretrained(keys, weights) makes a module with "
                "given rows, table.upsert(keys, weights) writes them, and to share rows use one "
                "module in both places"
            )
        super().__setattr__(name, value)

    @property
    def kind(self) -> str:
        """What it makes of a table's rows, in programs for other processes."""
        asked = ", ".join(f"{name}={value!r}" for name, value in self._asked_for().items())
        return f"{type(self).__name__}({asked})" if asked else type(self).__name__

    def _asked_for(self) -> dict[str, Any]:
        """The arguments by which lookups of one table differ."""
        given = {
            "padding_idx": self._padding,
            "scale_grad_by_freq": self.scale_grad_by_freq or None,
            "max_norm": self._norms,
        }
        return {name: value for name, value in given.items() if value is not None}

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script asks for."""
        raise not_compiled(self, "torch.jit.script")

    def _attach(self) -> None:
        """Ties table and parameter to where gradients wait, in a copy too."""
        self._gradients.attach(self.table)
        self.weight.gradients = self._gradients
        self.number = number_of(self)
        # What compiled code takes.
        self.number_1 = torch.tensor([self.number], device="cpu")
        self.anchor = torch.empty(
            0, self.embedding_dim, dtype=torch.float32, requires_grad=True, device="cpu"
        )

    def _begin(
        self,
        keys: torch.Tensor,
        ends: torch.Tensor | None,
        weights: torch.Tensor | None,
        insert: bool,
        trains: bool,
        marks: Marks = NO_MARKS,
    ) -> Node:
        """The node over keys (N,), mapped under a lease; `trains`: a backward may follow."""
        self._check_begin(insert, trains)
        # A checkpoint looks up again in backward; that is no step of the table.
        is_again = self.table._has_clock and torch._C._current_graph_task_id() >= 0
        lease = self.table.lease()
        try:
            sees = insert and not is_again
            given = marks if sees else NO_MARKS
            rows, outcomes = map_without(self.table, keys, self._padding, sees, lease, given)
            if insert and is_again and self.table.eviction is not None:
                self._check_still_there(keys, outcomes)
            if insert and torch._C._current_graph_task_id() < 0:  # else a checkpoint's again
                self._gradients.note_keys(keys, trains)
            mapped = TableBags(
                table=self.table,
                features=[FeatureBags(rows=rows, outcomes=outcomes)],
                lease=lease,
                accumulation=self._gradients.accumulation,
                gradients=None if self._gradients.is_fused else self._gradients,
            )
            node = self._node(mapped, keys, ends, weights, insert)
        except BaseException:
            lease.release()  # the error's traceback would hold it
            raise
        node.noted = self._gradients
        return node

    def _check_still_there(self, keys: torch.Tensor, outcomes: torch.Tensor) -> None:
        is_gone = outcomes == int(Outcome.MISSING)
        is_padding = padding_among(keys, self._padding)
        if bool((is_gone if is_padding is None else is_gone & ~is_padding).any()):
            raise RuntimeError(
                f"table {self.table.name!r}: a checkpoint looks it up again in backward, and keys "
                "of its forward have no row now: others took their room, or they got none; "
                "look the table up outside of torch.utils.checkpoint"
            )

    def _marks(self, keys: torch.Tensor, marks: Marks) -> Marks:
        """What came with keys, checked and flat."""
        if not marks.are_given:
            return NO_MARKS
        require_tensor("keys", keys)
        marks.check(type(self).__name__, keys)
        return marks.flat()

    def _refuse_marks(self, marks: Marks) -> None:
        """Raises RuntimeError where a call is recorded, not run."""
        if marks.are_given:
            raise RuntimeError(
                f"{type(self).__name__}: times, scores, counts and clicks cannot be recorded by "
                "torch.compile, torch.export or torch.fx; look up outside of what is compiled "
                "(torch.compiler.disable), or set table.time before the call"
            )

    def _check_begin(self, insert: bool, trains: bool) -> None:
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            is_onnx = torch.onnx.is_in_onnx_export()
            raise not_compiled(
                self, "torch.onnx.export(dynamo=False)" if is_onnx else "torch.jit.trace"
            )
        _refuse_ranks(self)
        self.take_applied_optimizer()
        self._gradients.check_table(self.table)
        if trains:
            self._gradients.check_looked_up_once()
            self._gradients.settle()
            if insert and self._gradients.waits:
                self._gradients.check_owner()

    def _node(
        self,
        mapped: TableBags,
        keys: torch.Tensor,
        ends: torch.Tensor | None,
        weights: torch.Tensor | None,
        insert: bool,
    ) -> Node:
        if self.max_norm is not None or self.scale_grad_by_freq or self.mode == "max":
            options = LookupOptions(
                mode=self.mode,
                by_frequency=self.scale_grad_by_freq,
                max_norm=self.max_norm,
                norm_type=self.norm_type,
            )
            return node_of_lookup(mapped, keys, ends, weights, options, writes=insert)
        if ends is None:
            return gathering([mapped])
        [feature] = mapped.features
        feature.offsets, feature.pooling, feature.weights = ends, self.mode, weights
        return pooling([mapped], len(ends) - 1, self.table.dim)

    def begin_squares(self, last_batch: bool, *, trains: bool) -> Node:
        """The node of the sum of squares of rows: of the last batch, or all; raises as `l2`."""
        gradients, table = self._gradients, self.table
        if trains:
            gradients.check_penalized()
        keys = gradients.keys_of_last_batch() if last_batch else _all_keys(table)
        lease = table.lease()
        try:
            rows_N, outcomes_N = table.map(keys, insert=False, lease=lease)
            rows_U, _ = distinct_keys(rows_N[outcomes_N <= int(Outcome.INSERTED)])
            found = torch.full_like(rows_U, int(Outcome.FOUND), dtype=torch.uint8)
            return squares_of(
                TableBags(
                    table=table,
                    features=[FeatureBags(rows=rows_U, outcomes=found)],
                    lease=lease,
                    gradients=None if gradients.is_fused else gradients,
                )
            )
        except BaseException:
            lease.release()  # the error's traceback would hold it
            raise

    def take_applied_optimizer(self) -> None:
        """Takes the optimizer that `apply_optimizer_in_backward` gave to `weight`, if it did.

        Raises ValueError if somebody else said how the table is trained, or another one follows.
        """
        weight = self.weight
        if not isinstance(weight, RowsParameter) or weight.gradients is not self._gradients:
            self._refuse_trained_copy(weight)
            return
        classes = vars(weight).get("_optimizer_classes", ())
        if len(classes) == weight.num_taken:
            return
        if len(classes) > 1 or self._gradients.is_told:
            raise ValueError(
                f"table {self.table.name!r}: apply_optimizer_in_backward gave "
                f"{[each.__name__ for each in classes]} to `weight` of {type(self).__name__}, "
                f"which trains by {self.table.optimizer} already: say it once, there, or by "
                "optimizer= where the module is made"
            )
        [options] = vars(self.weight)["_optimizer_kwargs"]
        with held_back():
            self._gradients.apply(from_torch(classes[0], options))
            self.weight.num_taken = 1

    def _refuse_trained_copy(self, weight: torch.Tensor) -> None:
        """Raises ValueError for what functional_call puts in the place of `weight`.

        But for copies of it that require no gradient: rows are read, and none is trained.
        """
        if isinstance(weight, (RowsParameter, Handle)) and not weight.requires_grad:
            return
        raise ValueError(
            f"table {self.table.name!r}: a call was given another `weight` {tuple(weight.size())} "
            f"for {type(self).__name__}, whose rows it can neither hold nor train: leave `weight` "
            "out of the parameters that functional_call gets, or detach() it to read rows only"
        )

    def check_named(self) -> None:
        """Raises ValueError if the table was given no name, by which others would find it."""
        if self._drawn_name is not None:
            raise ValueError(
                f"table {self.table.name!r} was given no name, and another process may draw "
                f"another one: pass name= where its {type(self).__name__} is made"
            )

    def check_shardable(self) -> None:
        """Raises ValueError for what ranks cannot do, and unless backward updates the rows.

        For what spreads the table over ranks: a `RowOptimizer` cannot reach rows on other ranks.
        """
        self.take_applied_optimizer()
        self._gradients.settle()
        name, remedy = self.table.name, "pass optimizer= where the module is made"
        asked = {
            "padding_idx": self.padding_idx is not None,
            "max_norm": self.max_norm is not None,
            "scale_grad_by_freq": self.scale_grad_by_freq,
        }
        for argument, is_asked in asked.items():
            if is_asked:
                raise ValueError(
                    f"table {name!r}: {argument} is of modules on one process; leave it out to "
                    "spread the table over ranks"
                )
        if self._gradients.waits:
            raise ValueError(
                f"table {name!r}: its RowOptimizer cannot train rows that lie on other ranks: "
                f"leave it out, and {remedy}"
            )
        if self.weight.requires_grad and not self._gradients.is_told:
            raise ValueError(
                f"table {name!r}: nobody said how to train it: {remedy}, or freeze it with "
                "requires_grad_(False)"
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # Importing it takes a second. Several ranks may import the other after this.
        if "torch.distributed.checkpoint" in sys.modules or _has_ranks():
            importlib.import_module("recsdk_core.nn.dcp")
        destination.update(save_table(self.table, prefix))
        if self._drawn_name is not None:
            destination[prefix + DRAWN_NAME] = torch.tensor(self._drawn_name, device="cpu")

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given, known = dict(state_dict), self._drawn_name
        drawn = given.pop(prefix + DRAWN_NAME, None)
        if drawn is not None and known is None:
            unexpected_keys.append(named_since(self.table, prefix))
        elif drawn is not None and not is_drawn(drawn):
            error_msgs.append(f"{prefix}{DRAWN_NAME}: must be an int64 number, got {drawn!r}")
            return
        why_not = self._gradients.why_not_replaced()
        if why_not is not None:
            error_msgs.append(f"{prefix}weight: {why_not}")
            return
        self._gradients.drop_applied()  # they hold rows that are no more
        is_other = not (drawn is None or known is None or known == int(drawn))
        if is_other:
            self.table.check_replaceable("name")
        num_errors = len(error_msgs)
        loaded = None if self._gradients.is_told else take_state(given, prefix)
        with held_back():  # rows, what is noted of them, and the name come together
            is_replaced = load_table(
                self.table,
                given,
                prefix,
                missing_keys,
                unexpected_keys,
                error_msgs,
                self._gradients.forget,
            )
            if len(error_msgs) > num_errors:
                return
            if is_replaced:
                self._gradients.note_loaded(loaded, brings_state(self.table, given, prefix))
            if is_other:
                self._take_name(int(drawn))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Where torch.distributed.checkpoint.state_dict finds what entries are named after."""
        return dict.fromkeys(ENTRIES, "_entries")

    _entries = AnyName()

    def extra_repr(self) -> str:
        return repr(self.table)


def _all_keys(table: Table) -> torch.Tensor:
    batches = [torch.from_numpy(each.keys) for each in table.export(state=False)]
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *batches])


def _optimizer(optimizer: Optimizer | type, kwargs: Mapping[str, Any] | None) -> Optimizer:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"optimizer_kwargs must be a dict, got {kwargs!r}")
    if isinstance(optimizer, type):
        return from_torch(optimizer, kwargs)
    if kwargs:
        raise ValueError(
            "optimizer_kwargs go with an optimizer class; set them on the optimizer instead: "
            f"{optimizer}"
        )
    return optimizer


_HAS_DISTRIBUTED = torch.distributed.is_available()


def _has_ranks() -> bool:
    distributed = torch.distributed
    return _HAS_DISTRIBUTED and distributed.is_initialized() and distributed.get_world_size() > 1


def _refuse_ranks(module: TableModule) -> None:
    """Under DDP each rank would train rows of its own, and none would be averaged; so with FSDP."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(module.weight, tensors.DTensor):
        raise RuntimeError(
            f"table {module.table.name!r}: `weight` of {type(module).__name__} was made a DTensor, "
            f"but its rows are not in it, and each rank would train its own; {_OVER_RANKS}"
        )
    if not _has_ranks():
        return
    # The only way to know the wrapper: it is private, but what torch's own compiler relies on.
    ddp = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is None or ddp.process_group.size() == 1:
        return
    raise RuntimeError(
        f"{type(module).__name__} keeps its rows on one rank and cannot be trained under "
        f"DistributedDataParallel with {ddp.process_group.size()} ranks; {_OVER_RANKS}"
    )
