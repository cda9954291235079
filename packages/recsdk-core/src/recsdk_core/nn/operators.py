"""Lookup, pooling and their backward as torch operators, for compilers, exporters and tracers.

Eager calls do not come here: an operator written in Python costs tens of microseconds. Both ways
run the same code of the module and of `recsdk_core.nn.function`.

An operator names its module by a number of this process, which is a tensor, so that one compiled
function serves many modules. In an exported program it names the table too, by which another
process finds its own.

A forward gives a *ticket* beside its vectors. This tensor's memory owns the node, which so ends
with the last reference to it, as it does with a graph that nobody runs backward through.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import itertools
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.utils.checkpoint
from torch import nn
from torch._C import _functorch

from recsdk_core.nn.function import Node, read, train
from recsdk_core.nn.rows_parameter import RowsParameter

__all__ = [
    "is_recorded",
    "leaf",
    "lookup",
    "not_compiled",
    "number_of",
    "pool",
    "seen_by_compilers",
    "squares",
]

_torch_library: Any = torch.library
_mark_effects: Any = getattr(torch.library, "_register_effectful_op", None)
CAN_RECORD = _mark_effects is not None
"""Whether torch, 2.11 or later, can be told that an operator's calls keep number and order."""

_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])
_uncompiled: Any = torch.compiler.disable
_PROCESS = uuid.uuid4().hex
"""Tells programs that were exported in this process; its children have the same modules."""
_numbers, _tickets = itertools.count(1), itertools.count(1)
_modules: WeakValueDictionary[int, Any] = WeakValueDictionary()
_memories: WeakValueDictionary[int, _Memory] = WeakValueDictionary()


class _Memory(bytearray):
    """A ticket's memory."""

    node: Node
    weight: torch.Tensor
    """Of the module."""


def seen_by_compilers(function: _Function) -> _Function:
    """An older torch cannot keep the order of calls, so its compiler stops before a lookup."""
    return function if CAN_RECORD else _uncompiled(function)


def number_of(module: nn.Module) -> int:
    """A number that no other module of this process has; finds the module as long as it lives."""
    number = next(_numbers)
    _modules[number] = module
    return number


def is_recorded(keys: Any) -> bool:
    """Whether a call must be an operator, since it does not run here and now on plain tensors."""
    return (
        torch.compiler.is_compiling()
        or type(keys) is not torch.Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def lookup(module: Any, keys: torch.Tensor) -> torch.Tensor:
    """What a `HashEmbedding` gives for keys of any shape: float32 (*shape, D)."""
    trains = _trains(module, None)
    args = (*_place_of(module), module.training, trains)
    vectors, _ = torch.ops.recsdk.lookup(_anchor_of(module), keys, *args)
    return vectors  # type: ignore[no-any-return]


def pool(
    module: Any,
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_bags: int,
) -> torch.Tensor:
    """What a `HashEmbeddingBag` gives for its arguments: float32 (B, D)."""
    trains = _trains(module, weights)
    args = (num_bags, *_place_of(module), module.training, trains)
    pooled, _ = torch.ops.recsdk.pool(_anchor_of(module), keys, offsets, weights, *args)
    return pooled  # type: ignore[no-any-return]


def squares(module: Any, last_batch: bool) -> torch.Tensor:
    """What `l2` gives for a module: float32, a scalar."""
    args = (last_batch, *_place_of(module), _trains(module, None))
    total, _ = torch.ops.recsdk.l2(_anchor_of(module), *args)
    return total  # type: ignore[no-any-return]


def leaf(module: nn.Module, keys: torch.fx.Proxy, *others: Any) -> Any:
    """A call of the module in the graph that torch.fx makes: it stays a module there."""
    tracer: Any = keys.tracer
    path = tracer.path_of_module(module)
    if not path:
        raise TypeError(
            f"torch.fx cannot trace {type(module).__name__} by itself, whose rows are found by key "
            "while it runs; trace the model around it, which keeps it as a module"
        )
    return tracer.create_proxy("call_module", path, (keys, *others), {})


def not_compiled(module: nn.Module, what: str) -> RuntimeError:
    """The error for what would record the rows of one call as constants."""
    return RuntimeError(
        f"{what} cannot record {type(module).__name__}, whose rows are found by key while it runs; "
        "use torch.compile or torch.export"
    )


def _trains(module: Any, weights: torch.Tensor | None) -> bool:
    """Whether a backward would update rows; raises for what no operator can do."""
    if not CAN_RECORD:
        raise RuntimeError(
            f"{type(module).__name__} cannot be compiled, exported or traced with torch "
            f"{torch.__version__}; install torch 2.11 or later"
        )
    trains: bool = torch.is_grad_enabled() and module.weight.requires_grad
    if torch._C._are_functorch_transforms_active():
        if _functorch.peek_interpreter_stack().key() == _functorch.TransformType.Vmap:
            _not_batched(None, None)
        if trains:
            raise RuntimeError(
                "torch.func cannot differentiate a lookup of raw keys, whose backward updates its "
                "table and has no gradient to return; look up outside of the transformed function, "
                "or freeze the table: weight.requires_grad_(False), and leave `weight` out of the "
                "parameters that functional_call gets"
            )
        if weights is not None:
            raise RuntimeError("torch.func does not reach per_sample_weights; use backward")
    return trains


def _anchor_of(module: Any) -> torch.Tensor:
    """What makes the vectors require a gradient, and tells the width; the weight only in exports.

    For a compiler's own operators and tracers refuse to be called with a parameter of our class.
    """
    weight: torch.Tensor = module.weight
    if _is_exporting() or type(weight) is not RowsParameter:
        return weight
    if not torch.compiler.is_compiling():
        return torch.empty(
            0,
            weight.size(1),
            dtype=torch.float32,
            requires_grad=weight.requires_grad,
            device="cpu",
        )
    anchor: torch.Tensor = module.anchor
    return anchor if weight.requires_grad else anchor.detach()


def _is_exporting() -> bool:
    # The public function is True in all that torch 2.11 compiles.
    flag: bool = torch.compiler._is_exporting_flag
    return flag


def _place_of(module: Any) -> tuple[str | None, torch.Tensor | None, str]:
    """What names the table in exported programs, else the module's number; the module's kind."""
    if _is_exporting():
        module.check_named()
        return f"{_PROCESS}/{module.number} {module.table.name}", None, module.kind
    if torch.compiler.is_compiling():
        return None, module.number_1, module.kind
    return None, torch.full((1,), module.number, device="cpu"), module.kind


def _module_of(
    anchor: torch.Tensor, table: str | None, number: torch.Tensor | None, kind: str
) -> Any:
    found = _modules.get(int(number)) if number is not None else _exported(str(table), kind)
    if found is None:
        raise RuntimeError(
            f"the {kind} for which this was compiled is gone; compile again, and keep its module"
        )
    if found.table.dim != anchor.shape[1]:
        raise ValueError(
            f"table {found.table.name!r} has width {found.table.dim}, and the program was compiled "
            f"for {anchor.shape[1]}; make the table with that"
        )
    return found


def _exported(table: str, kind: str) -> Any:
    """The module that was exported, if it lives here; else the only one of its table's name."""
    origin, _, name = table.partition(" ")
    process, _, number = origin.partition("/")
    own = _modules.get(int(number)) if process == _PROCESS else None
    if own is not None:
        return own
    named = [each for each in list(_modules.values()) if each.table.name == name]
    of_kind = [each for each in named if each.kind == kind]
    num_tables = len({id(each.table) for each in of_kind})
    if num_tables == 1:
        return of_kind[0]
    others = sorted({each.kind for each in named})
    got = f"{num_tables} of them" if num_tables else f"only {others}" if others else "none"
    raise RuntimeError(
        f"the exported program reads table {name!r} through {kind}, and this process has {got}: "
        f"keep one {kind} with name={name!r} alive and load its rows before the program runs"
    )


def _ticket(node: Node, module: Any) -> torch.Tensor:
    """A tensor of one number below all normal ones, so that tickets compare as close."""
    number = next(_tickets)
    memory = _Memory(number.to_bytes(8, "little"))
    memory.node, memory.weight = node, module.weight
    _memories[number] = memory
    return torch.frombuffer(memory, dtype=torch.float64)


def _memory_of(ticket: torch.Tensor) -> _Memory:
    memory = _memories.get(int(ticket.view(torch.int64).item()))
    if memory is None:
        raise RuntimeError(
            "the rows of this backward's forward were let go of: what the forward saved was copied "
            "or moved; run forward again, without hooks that copy saved tensors"
        )
    return memory


def _lookup(
    anchor: torch.Tensor,
    keys: torch.Tensor,
    table: str | None,
    number: torch.Tensor | None,
    kind: str,
    insert: bool,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    module = _module_of(anchor, table, number, kind)
    node = module.begin(keys, insert=insert, trains=trains)
    return read(node).view(*keys.shape, anchor.shape[1]), _ticket(node, module)


def _pool(
    anchor: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_bags: int,
    table: str | None,
    number: torch.Tensor | None,
    kind: str,
    insert: bool,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    module = _module_of(anchor, table, number, kind)
    node = module.begin(keys, offsets, weights, insert=insert, trains=trains)
    return read(node), _ticket(node, module)


def _l2(
    anchor: torch.Tensor,
    last_batch: bool,
    table: str | None,
    number: torch.Tensor | None,
    kind: str,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    module = _module_of(anchor, table, number, kind)
    node = module.begin_squares(last_batch, trains=trains)
    return read(node), _ticket(node, module)


def _update(
    grad: torch.Tensor, ticket: torch.Tensor, trains: bool, weights: Sequence[int] | None
) -> torch.Tensor:
    memory = _memory_of(ticket)
    if trains and not memory.weight.requires_grad:
        raise RuntimeError(
            "a table was frozen after its lookup was compiled, which torch 2.11 does not notice: "
            "compile again, or freeze it before"
        )
    try:
        [of_weights] = train(memory.node, grad, trains, [weights is not None])
    except BaseException:
        memory.node.end()  # if it was interrupted elsewhere, or as it ended
        raise
    return grad.new_empty(0) if of_weights is None else of_weights.view(*weights)  # type: ignore[misc]


def _like_keys(
    anchor: torch.Tensor, keys: torch.Tensor, *_others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake(anchor, *keys.shape)


def _like_bags(
    anchor: torch.Tensor,
    keys: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    num_bags: int,
    *_others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake(anchor, num_bags)


def _scalar(anchor: torch.Tensor, *_others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    vectors, ticket = _fake(anchor, 1)
    return vectors.new_empty(()), ticket


def _fake(anchor: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    _mend_compilers()
    vectors = anchor.new_empty((*sizes, anchor.shape[1]), dtype=torch.float32)
    return vectors, anchor.new_empty(1, dtype=torch.float64)


def _mend_compilers() -> None:
    """Has calls kept that torch 2.11 to 2.13 would repeat or drop, though they have effects."""
    # In a compiled checkpoint: it fails when it looks up again in backward.
    torch.fx.traceback.current_meta.pop("recompute", None)
    # Compiled autograd drops calls whose results nobody reads.
    compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None:
        compiled_autograd._impure_targets.add(torch.ops.higher_order.with_effects)


def _like_weights(
    grad: torch.Tensor, ticket: torch.Tensor, trains: bool, weights: Sequence[int] | None
) -> torch.Tensor:
    return grad.new_empty(0 if weights is None else weights)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ticket = output[1]
    ctx.mark_non_differentiable(ticket)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(ticket)
    weights = inputs[3] if len(inputs) == _POOL_ARGS else None
    ctx.weights = None if weights is None else weights.shape
    ctx.num_inputs = len(inputs)


def _backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    [ticket], trains = ctx.saved_tensors, ctx.needs_input_grad[0]
    is_wanted = ctx.weights is not None and ctx.needs_input_grad[3]
    weights = ctx.weights if is_wanted else None
    of_weights = torch.ops.recsdk.update(grad, ticket, trains, weights)
    grads: list[torch.Tensor | None] = [None] * ctx.num_inputs
    if is_wanted:
        grads[3] = of_weights
    return tuple(grads)


def _differentiated_twice(ctx: Any, grad: torch.Tensor) -> None:
    raise RuntimeError(
        "a lookup's backward updates rows and cannot be differentiated; use create_graph=False"
    )


def _not_batched(info: Any, in_dims: Any, *args: Any) -> None:
    raise RuntimeError(
        "torch.vmap cannot map over a lookup of raw keys, which finds or makes the rows of a whole "
        "batch in order; call the module with the whole batch, outside of vmap"
    )


_TABLE = "str? table, Tensor? number, str kind"
_PLACE = f"{_TABLE}, bool insert, bool trains"
_L2 = f"(Tensor anchor, bool last_batch, {_TABLE}, bool trains) -> (Tensor, Tensor)"
_POOL = f"(Tensor anchor, Tensor keys, Tensor? offsets, Tensor? weights, SymInt num_bags, {_PLACE})"
_SCHEMAS: dict[str, tuple[str, Any, Any]] = {
    "lookup": (f"(Tensor anchor, Tensor keys, {_PLACE}) -> (Tensor, Tensor)", _lookup, _like_keys),
    "pool": (f"{_POOL} -> (Tensor, Tensor)", _pool, _like_bags),
    "l2": (_L2, _l2, _scalar),
    "update": (
        "(Tensor grad, Tensor ticket, bool trains, SymInt[]? weights) -> Tensor",
        _update,
        _like_weights,
    ),
}
_POOL_ARGS = 10


def _define() -> None:
    """Registers the operators: calls of all of them keep their number and order."""
    for name, (schema, run, fake) in _SCHEMAS.items():
        full = f"recsdk::{name}"
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, _uncompiled(run), "CompositeExplicitAutograd")
        _torch_library.register_fake(full, fake, lib=_LIBRARY)
        _torch_library.register_vmap(full, _not_batched, lib=_LIBRARY)
        _mark_effects(full, _torch_library.EffectType.ORDERED, lib=_LIBRARY)
        torch.utils.checkpoint.SAC_IGNORED_OPS.add(getattr(torch.ops.recsdk, name).default)
    for name in ("lookup", "pool", "l2"):
        _torch_library.register_autograd(
            f"recsdk::{name}", _backward, setup_context=_keep, lib=_LIBRARY
        )
    _torch_library.register_autograd("recsdk::update", _differentiated_twice, lib=_LIBRARY)


_LIBRARY = _torch_library.Library("recsdk", "DEF")
if CAN_RECORD:
    _define()
