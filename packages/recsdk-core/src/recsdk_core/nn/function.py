"""The autograd functions that pool and gather rows of many tables in one node.

Modules and frameworks build on them. Map the keys with `map_tables` first. Then the forward reads
the rows, and the backward gives each table exactly one optimizer update with the gradients of all
its features.

Shape letters: N keys, B bags, C columns of the output, D row width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from recsdk_core import _ext
from recsdk_core._internal.interruptions import held_back
from recsdk_core.combine import CombineBlock, combine_gradients
from recsdk_core.nn.accumulation import Accumulation
from recsdk_core.nn.row_gradients import RowGradients
from recsdk_core.nn.rows_parameter import facts_of
from recsdk_core.nn.scaled_losses import refuse_scaled_loss
from recsdk_core.table import Lease, Table
from recsdk_core.tables import Bags, pool_tables, release_leases, update_tables
from recsdk_core.vectors import in_huge_pages

__all__ = [
    "FeatureBags",
    "SharedTraining",
    "TableBags",
    "gather_features",
    "pack_features",
    "pool_features",
]

_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_unpack_dual: Callable[[torch.Tensor], Any] = forward_ad.unpack_dual
# Of torch 2.5 and later; before, no graph is seen to be kept.
_keeps_graph: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False
)
Guard: TypeAlias = Callable[[], AbstractContextManager[None]]
Anchor: TypeAlias = torch.Tensor | Callable[[], torch.Tensor]
_Part: TypeAlias = tuple[Bags, torch.Tensor, int, torch.Tensor | None]
"""Bags, the matrix with their gradients, its first column, and the array for their weights'."""


@dataclass(kw_only=True, slots=True)
class FeatureBags:
    """The bags of one feature, mapped to rows of its table."""

    rows: torch.Tensor
    """Row numbers, int64 (N,), as `map` gave them."""
    outcomes: torch.Tensor
    """Outcomes, uint8 (N,), as `map` gave them."""
    offsets: torch.Tensor | None = None
    """int64 or int32 (B + 1,), ascending from 0 to N; None: each key is a bag."""
    weights: torch.Tensor | None = None
    """float32 (N,); gets a gradient if it requires one."""
    pooling: str = "sum"
    """"sum" or "mean"."""
    column: int = 0
    """First column of the output that the feature's vectors go to; for `pack_features` the first
    number; `gather_features` ignores it."""


@dataclass(kw_only=True, slots=True)
class TableBags:
    """All features of one table in one forward."""

    table: Table
    """The table."""
    features: list[FeatureBags]
    """Its features; gradients of a key are added in this order."""
    lease: Lease | None = None
    """The batch that the rows were mapped under; released after backward or with the graph, and
    under `accumulation` after the update."""
    accumulation: Accumulation[Any] | None = None
    """Collects the gradients of several backwards; None: each backward is an update."""
    gradients: RowGradients | None = None
    """Of a module without an optimizer of its own: where gradients wait for a `RowOptimizer`, if
    there is one. None: backward makes the update."""


@dataclass(frozen=True, kw_only=True)
class SharedTraining:
    """Trains tables that are equal on several processes with the gradients of all of them.

    Each process makes its own gradient from that of the pooled output: one sum for each of its
    keys, or bags of keys, one after the other. The processes exchange these, and each trains with
    all of them.
    """

    sums: Sequence[CombineBlock]
    """Makes this process's gradient."""
    sizes: Sequence[int]
    """How many numbers each process's gradient has."""
    process: int
    """This process's index among them."""
    swap: Callable[[torch.Tensor, Sequence[int]], Sequence[torch.Tensor]]
    """Returns all processes' gradients, given this one's and `sizes`; nobody may write to them
    afterwards."""
    bags: Sequence[Sequence[FeatureBags]]
    """For each table, what to train: feature by feature, and within a feature process by process.
    `column` is the first number in that process's gradient."""

    def gradients(self, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        """The gradients of all processes; `grad` is that of this one's pooled output."""
        own = in_huge_pages(grad.new_empty(self.sizes[self.process], dtype=torch.float32))
        combine_gradients(self.sums, grad, own)
        return self.swap(own, self.sizes)


class Reduction(Protocol):
    """What a node makes of its vectors before it gives them, and of that one's gradient."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor: ...

    def backward(self, grad: torch.Tensor) -> torch.Tensor: ...


@dataclass
class Block:
    """Where the bags of one feature lie in the output, or in one of the gradients."""

    feature: FeatureBags
    first_bag: int
    column: int
    gradient: int = 0
    weights: torch.Tensor | None = field(init=False)
    bags: Bags = field(init=False)

    def __post_init__(self) -> None:
        # Backward reads the weights again, and by then the caller may have reused their memory.
        given = self.feature.weights
        self.weights = None if given is None else given.detach().clone()
        of = self.feature
        self.bags = Bags(of.rows, of.outcomes, of.offsets, self.weights, of.pooling)

    def place_in(self, matrix: torch.Tensor, width: int) -> tuple[torch.Tensor, int]:
        """The matrix that begins with the block's first bag, and the block's first column."""
        if matrix.dim() == 1:
            return matrix.narrow(0, self.column, self.bags.num_bags * width).view(-1, width), 0
        return (matrix[self.first_bag :] if self.first_bag else matrix), self.column


class Node:
    """What one autograd node owns from its forward to its backward."""

    def __init__(
        self,
        shape: tuple[int, ...],
        tables: Sequence[TableBags],
        pooled: list[list[Block]],
        shared: SharedTraining | None = None,
        guard: Guard = nullcontext,
    ) -> None:
        self.shape = shape
        self.shared = shared
        self.guard = guard
        self.tables = [entry.table for entry in tables]
        self.leases = [entry.lease for entry in tables]
        self.accumulations = [entry.accumulation for entry in tables]
        self.waiting = [entry.gradients for entry in tables]
        # Its requires_grad decides in backward whether rows train.
        self.anchor: Callable[[], torch.Tensor] | None = None
        self.pooled = pooled  # of each table
        self.trained = pooled if shared is None else _blocks(shared.bags, len(shared.sizes))
        self.reduction: Reduction | None = None
        self.before_training: Callable[[], Any] | None = None
        self.noted: RowGradients | None = None  # is told in which pass its rows were updated
        self.is_spent = False
        self.is_kept = False  # retain_graph=True: for another backward
        self.update_counts: list[int] | None = None  # of its tables, when the graph was first kept

    def vectors(self) -> torch.Tensor:
        """The vectors of all bags: float32 of the shape, zero where no feature fills it."""
        filled = sum(
            block.bags.num_bags * table.dim
            for table, part in zip(self.tables, self.pooled, strict=True)
            for block in part
        )
        out = in_huge_pages(torch.empty(self.shape, dtype=torch.float32, device="cpu"))
        if filled < math.prod(self.shape):
            out.zero_()
        calls = [
            (table, [(block.bags, *block.place_in(out, table.dim)) for block in part])
            for table, part in zip(self.tables, self.pooled, strict=True)
        ]
        pool_tables(calls)
        return out

    def update(
        self, given: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """One update per table; returns the gradients of the weights that want one."""
        return _update(self, given, wanted)

    def end(self) -> None:
        """Releases the leases and drops what the backward needed."""
        release_leases(self.leases)
        self.tables, self.leases, self.accumulations, self.waiting = [], [], [], []
        self.pooled, self.trained, self.shared = [], [], None
        self.reduction = self.before_training = self.noted = self.anchor = None
        self.is_spent = True


def pool_features(
    tables: Sequence[TableBags],
    num_bags: int,
    num_columns: int,
    anchor: Anchor,
    shared: SharedTraining | None = None,
    guard: Guard = nullcontext,
) -> torch.Tensor:
    """Pools the features of many tables into one matrix, as one autograd node.

    Returns float32 (num_bags, num_columns): bag b of a feature fills columns [column, column + D),
    which no other feature may fill; what no feature fills is zero. A key without a row contributes
    the table's default value and gets no gradient; an empty bag pools to zeros.

    The backward applies exactly one update per table (a table may occur once in `tables`), gives
    gradients to the `weights` that require them, then releases the leases. A second backward raises
    RuntimeError, unless the first has kept the graph and no table updates its rows in backward.
    Without a backward the leases end when the graph is dropped. If gradients are off,
    or neither `anchor` nor any weights require one, the leases are released at once. If only
    weights require one (the table is frozen), the backward updates no table.

    `anchor` is a (0, D) parameter that makes the output require a gradient; it gets no `.grad`. If
    it is frozen by the time of backward, no table is updated. It may be a function that gives one:
    backward calls it again, and what it raises there leaves all tables as they are.

    `shared`, if given, says what to train and with which gradients, in place of what was pooled.
    The backward runs inside the context that `guard` makes.
    """
    pooled = _blocks([entry.features for entry in tables])
    return run(Node((num_bags, num_columns), tables, pooled, shared, guard), anchor)


def gather_features(tables: Sequence[TableBags], anchor: Anchor) -> torch.Tensor:
    """The vectors of all bags of all features, one after the other, as one autograd node.

    Returns float32 (sum of B, D), in the order of `tables` and their features; without offsets each
    key is a bag, which gives the sequence of its rows. All tables have equal D. Otherwise as
    `pool_features`.
    """
    return run(gathering(tables), anchor)


def gathering(tables: Sequence[TableBags]) -> Node:
    """The node of `gather_features`, before it is read."""
    widths = {entry.table.dim for entry in tables}
    if len(widths) != 1:
        raise ValueError(f"gather_features: all tables need one width, got {sorted(widths)}")
    blocks: list[list[Block]] = []
    total = 0
    for entry in tables:
        blocks.append([])
        for feature in entry.features:
            blocks[-1].append(Block(feature, total, 0))
            total += blocks[-1][-1].bags.num_bags
    return Node((total, widths.pop()), tables, blocks)


def pooling(tables: Sequence[TableBags], num_bags: int, num_columns: int) -> Node:
    """The node of `pool_features`, before it is read."""
    return Node((num_bags, num_columns), tables, _blocks([entry.features for entry in tables]))


def pack_features(
    tables: Sequence[TableBags],
    num_values: int,
    anchor: Anchor,
    guard: Guard = nullcontext,
    pooled: range | None = None,
) -> torch.Tensor:
    """The vectors of all bags of all features in one dimension, as one autograd node.

    Returns float32 (num_values,): the B vectors of a feature lie one after the other from `column`
    on. No other feature may fill these B * D numbers; what no feature fills is zero. `tables` may
    be empty. Otherwise as `pool_features`.

    `pooled`: the numbers to fill; None: all. Features that begin elsewhere are trained, but leave
    zeros.
    """
    blocks = _blocks([entry.features for entry in tables])
    node = Node((num_values,), tables, blocks, guard=guard)
    if pooled is not None:
        node.pooled = [[block for block in part if block.column in pooled] for part in node.pooled]
    return run(node, anchor)


def _blocks(features: Sequence[Sequence[FeatureBags]], num_gradients: int = 1) -> list[list[Block]]:
    """Of each table the features' blocks, each of which begins at the feature's column."""
    return [
        [Block(f, 0, f.column, i % num_gradients) for i, f in enumerate(of_table)]
        for of_table in features
    ]


def run(node: Node, anchor: Anchor) -> torch.Tensor:
    """Reads the node's vectors, as one autograd node if a backward may follow; else it ends."""
    own = anchor if isinstance(anchor, torch.Tensor) else anchor()
    weights = [block.feature.weights for part in node.trained for block in part]
    given = [w for w in weights if w is not None]
    if given and any(_unpack_dual(w).tangent is not None for w in given):
        raise RuntimeError(
            "forward-mode differentiation does not reach a lookup's weights; use backward"
        )
    wants_grad = facts_of(own)[0] or any(w.requires_grad for w in given)
    if torch.is_grad_enabled() and wants_grad:
        node.anchor = (lambda: own) if isinstance(anchor, torch.Tensor) else anchor
        out: torch.Tensor = _PoolFeatures.apply(node, own, *weights)  # type: ignore[no-untyped-call]
        return out
    out = read(node)
    node.end()
    return out


def read(node: Node) -> torch.Tensor:
    """What the node gives: float32 of its shape, where what no feature fills is zero, reduced.

    The node ends if this raises.
    """
    try:
        return _read(node)
    except BaseException:
        node.end()
        raise


def _read(node: Node) -> torch.Tensor:
    _check_runs()
    out = node.vectors()
    return out if node.reduction is None else node.reduction.forward(out)


def _check_runs() -> None:
    """Raises RuntimeError where torch only records: it would see memory, but not who fills it."""
    is_traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if is_traced or (torch._C._len_torch_dispatch_stack() and get_proxy_mode() is not None):
        raise RuntimeError(
            "a tracer cannot record a lookup of rows that were mapped before, since they are found "
            "by key while it runs; give HashEmbedding or HashEmbeddingBag to torch.export"
        )


class _PoolFeatures(torch.autograd.Function):
    """Inputs of forward: the node, the anchor, the features' weights."""

    @staticmethod
    def forward(
        ctx: Any, node: Node, anchor: torch.Tensor, *weights: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.node = node
        ctx.is_watched = _saved_tensors_hooks(True) is not None
        if ctx.is_watched:
            ctx.save_for_backward(anchor.new_empty(0))
        return read(node)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        try:
            _, trains, *wanted = ctx.needs_input_grad
            if ctx.is_watched:
                # A checkpoint looks up again when the first of its saved tensors is asked for: do
                # so before this update, since what is looked up again must be as it was.
                _ = ctx.saved_tensors
            return (None, None, *train(ctx.node, grad, trains, wanted))
        except BaseException:
            ctx.node.end()  # if it was interrupted elsewhere, or as it ended
            raise


def train(
    node: Node, grad: torch.Tensor, trains: bool, wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The node's backward; returns the gradients of the features' weights that are `wanted`.

    `grad` is that of what `read` gave. It updates rows only if it `trains`, and the anchor of `run`
    is not frozen since. It is the only one unless the pass keeps its graph and gradients wait for a
    `RowOptimizer`, or nothing trains.
    """
    with node.guard():
        if node.is_spent:
            raise RuntimeError(
                "this forward's backward has run already, whether it ended or raised: each forward "
                "takes one backward, or one more after each with retain_graph=True if a "
                "RowOptimizer trains its tables; run forward again"
            )
        is_done = False
        try:
            if trains and node.anchor is not None and not torch.compiler.is_compiling():
                trains = facts_of(node.anchor())[0]  # compiled autograd cannot ask
            node.is_kept = _is_kept(node, trains)
            if trains:
                _check_trained(node)
            if node.is_kept or node.update_counts is not None:
                _check_unchanged(node, wanted)
            if node.noted is not None:
                node.noted.end_batch()
            if node.before_training is not None:
                node.before_training()
            vectors = grad if node.reduction is None else node.reduction.backward(grad)
            is_whole = vectors.shape == node.shape and vectors.is_contiguous()
            own = vectors if is_whole else vectors.reshape(node.shape).contiguous()
            grads = [own] if node.shared is None else node.shared.gradients(own)
            made = node.update(grads, wanted) if trains else _weights_grads(node, grads, wanted)
            is_done = True
            return made
        finally:
            if not (node.is_kept and is_done):
                node.end()


def end_failed_backward() -> None:
    """Lets go of what is left of a backward that raised on this thread.

    torch keeps the nodes that would have come next, and so the leases of their batches, until the
    thread's next backward on the cpu, which this is. torch.func allows none inside: they stay.
    """
    if torch._C._are_functorch_transforms_active():
        return
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


_ext.set_drop_abandoned(end_failed_backward)


def _is_kept(node: Node, trains: bool) -> bool:
    """Whether another backward may follow: this pass keeps its graph, and changes no row."""
    if torch._C._current_graph_task_id() < 0 or node.shared is not None or not _keeps_graph():
        return False
    return not trains or all(each is not None and each.waits for each in node.waiting)


def _check_unchanged(node: Node, wanted: Sequence[bool]) -> None:
    counts = [table.update_count for table in node.tables]
    if node.update_counts is None:
        node.update_counts = counts
    elif any(wanted) and node.update_counts != counts:
        raise RuntimeError(
            f"tables {[table.name for table in node.tables]}: rows were updated between two "
            "backwards of one forward, and gradients of its weights need them as they were: run "
            "forward again"
        )


def _check_trained(node: Node) -> None:
    for waiting in filter(None, node.waiting):
        waiting.check_trained()
        if waiting.waits:
            waiting.check_owner()
    refuse_scaled_loss(
        table.name
        for table, waiting in zip(node.tables, node.waiting, strict=True)
        if waiting is None or not waiting.waits
    )


def _update(
    node: Node, given: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    waits = [*node.accumulations, *(each for each in node.waiting if each and each.waits)]
    if any(each is not None for each in waits) and node.shared is None:
        given = [grad.clone() for grad in given]  # the caller may reuse its own meanwhile
    is_wanted = iter(wanted)
    grads: list[torch.Tensor | None] = []
    calls = []
    ended = []
    for index, table in enumerate(node.tables):
        accumulation, waiting = node.accumulations[index], node.waiting[index]
        if waiting is not None and not waiting.waits:
            waiting = None  # the table was given an optimizer after its module was made
        is_early = accumulation is not None or waiting is not None
        made = [
            _part(table, block, given[block.gradient], next(is_wanted), is_early)
            for block in node.trained[index]
        ]
        grads += [of_weights for _, of_weights in made]
        if waiting is not None:
            _wait(node, index, waiting, given)
            continue
        parts = [part for part, _ in made]
        if accumulation is not None:
            due = _accumulated(node, index, accumulation, parts)
            if due is None:
                continue
            parts = due
            ended.append(accumulation)
        calls.append((table, parts))
    try:
        update_tables(calls)
    finally:
        for accumulation in ended:
            accumulation.drop()
    if calls and node.noted is not None:
        node.noted.updated_in = torch._C._current_graph_task_id()
    return grads


def _wait(node: Node, index: int, waiting: RowGradients, given: Sequence[torch.Tensor]) -> None:
    """Leaves a table's gradients, and its lease, to its RowOptimizer."""
    dim = node.tables[index].dim
    for block in node.trained[index]:
        matrix, column = block.place_in(given[block.gradient], dim)
        own = matrix[: block.bags.num_bags, column : column + dim]
        waiting.add(block.feature, block.weights, own)
    waiting.keep(node.leases[index], node.is_kept)
    if not node.is_kept:
        node.leases[index] = None


def _accumulated(
    node: Node, index: int, accumulation: Accumulation[Any], parts: list[_Part]
) -> list[_Part] | None:
    """Adds a table's gradients, and its lease; returns all of them if they are to be applied."""
    number = torch._C._current_graph_task_id()
    due = None
    with held_back():  # else the lease could end while its gradients wait
        if node.noted is None or number < 0:  # compiled autograd has no passes
            due = accumulation.add(parts, node.leases[index])
        else:
            update = functools.partial(_update_later, node.tables[index], node.noted, number)
            accumulation.add_in_pass(number, parts, node.leases[index], update)
        node.leases[index] = None
    return due


def _update_later(table: Table, noted: RowGradients, number: int, parts: list[_Part]) -> None:
    update_tables([(table, parts)])
    noted.updated_in = number


def _part(
    table: Table, block: Block, grad: torch.Tensor, wants_weights: bool, is_early: bool
) -> tuple[_Part, torch.Tensor | None]:
    """A block's part of an update, and the gradient of its weights, if wanted.

    The update fills that, unless it `is_early`: needed before the update.
    """
    place, weights = block.place_in(grad, table.dim), block.feature.weights
    if weights is None or not wants_weights:
        return (block.bags, *place, None), None
    if is_early:
        return (block.bags, *place, None), _weights_grad(table, block, grad)
    of_weights = torch.empty_like(weights)
    return (block.bags, *place, of_weights), of_weights


def _weights_grads(
    node: Node, given: Sequence[torch.Tensor], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of the weights that want one, for frozen tables."""
    is_wanted = iter(wanted)
    return [
        _weights_grad(table, block, given[block.gradient]) if next(is_wanted) else None
        for table, part in zip(node.tables, node.trained, strict=True)
        for block in part
    ]


def _weights_grad(table: Table, block: Block, grad: torch.Tensor) -> torch.Tensor:
    """d(sum(grad * pooled)) / d(weights), (N,): <grad of the bag, row>, less the mean's part."""
    feature = block.feature
    assert feature.weights is not None
    matrix, column = block.place_in(grad, table.dim)
    grad_BD = matrix[: block.bags.num_bags, column : column + table.dim]
    bag_N = _bag_of_key(feature)
    rows_ND = table.pool_rows(Bags(feature.rows, feature.outcomes))
    if feature.pooling == "sum":
        dot_N: torch.Tensor = (rows_ND * grad_BD[bag_N]).sum(1)
        return dot_N
    pooled_BD = table.pool_rows(block.bags)
    weights_N = feature.weights.detach()
    total_B = weights_N.new_zeros(len(grad_BD)).index_add_(0, bag_N, weights_N)
    dot_N = ((rows_ND - pooled_BD[bag_N]) * grad_BD[bag_N]).sum(1)
    return torch.where(total_B[bag_N] == 0, 0.0, dot_N / total_B[bag_N])


def _bag_of_key(feature: FeatureBags) -> torch.Tensor:
    if feature.offsets is None:
        return torch.arange(len(feature.rows), device="cpu")
    return torch.repeat_interleave(feature.offsets.long().diff())
