"""The parameter that stands for a table's rows, and refuses what only rows could answer."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from recsdk_core.nn.handle_uses import COPIES, is_permitted, name_of
from recsdk_core.nn.row_gradients import RowGradients

__all__ = ["Handle", "RowsParameter", "answering", "facts_of"]

_INIT = "torch.nn.init"
_torch_data: Any = torch.Tensor.data
_torch_grad: Any = torch.Tensor.grad
_OWN = {"requires_grad_", "detach_", "share_memory_", "rename_"}
_WRITES = [
    *(n for n in dir(torch.Tensor) if n.endswith("_") and n[0] != "_" and n not in _OWN),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"),
]
_OF_COMPILERS = (types.MethodWrapperType, torch._ops.OperatorBase, torch._ops.OpOverloadPacket)
"""Calls that compilers make themselves: of attributes and operators."""
_OF_GRADIENTS = {"grad", "register_hook", "register_post_accumulate_grad_hook"}
_OF_RANKS = {"broadcast", "chunk", "flatten"}
"""By which FSDP and torch.distributed.tensor begin."""
_thread = threading.local()


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Lets this thread's calls of torch use handles as the empty tensors that they are."""
    before = getattr(_thread, "answers", False)
    _thread.answers = True
    try:
        yield
    finally:
        _thread.answers = before


class Handle(torch.Tensor):
    """A copy or a view of a plain module's `weight`, which refuses what the parameter refuses."""

    table_name: str = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            plain = self.as_subclass(torch.Tensor)
            memo[id(self)] = _handle_of(copy.deepcopy(plain), self.table_name)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class RowsParameter(nn.Parameter):
    """Carries a table's optimizer and `requires_grad`; its numbers are the table's own.

    On the cpu it has no numbers, so functions of `torch.nn.init` would do nothing to it; on a
    device they would overwrite rows of ids. So they raise ValueError, as do methods that write in
    place, and for a plain module whatever is not known to need no row (`handle_uses`): sums, norms,
    products, views, comparisons, F.embedding, hooks. Its copies and `detach` refuse likewise. What
    loops do with any parameter (copies, moves, optimizers) goes on. A copy has no
    name, and pickling gives a plain parameter, so a copied module wraps its parameter again.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls the function as for any parameter; refuses what needs rows."""
        return _call(func, args, kwargs or {})

    table_name: str = ""
    """The table, in messages."""
    gradients: RowGradients | None = None
    """Of a plain module: where gradients wait for a `RowOptimizer`."""
    num_taken: int = 0
    """Of a plain module: optimizers of `apply_optimizer_in_backward` that its table has taken."""

    @classmethod
    def of_table(cls, name: str, store: torch.Tensor, requires_grad: bool = True) -> RowsParameter:
        """Wraps what a table called `name` keeps of its rows in torch; shares its memory."""
        made = cls(store.detach(), requires_grad)
        made.table_name = name
        return made

    @property
    def data(self) -> torch.Tensor:
        """The parameter's memory; of a plain module it refuses what the parameter refuses."""
        own: torch.Tensor = _torch_data.__get__(self)
        if self.gradients is None or torch.compiler.is_compiling():
            return own
        return _handle_of(own, self.table_name)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.gradients is not None and len(value):
            raise ValueError(
                f"table {self.table_name!r}: `weight.data` takes no rows, got "
                f"{tuple(value.shape)}: from_pretrained(keys, weights) makes a module with given "
                "rows, and table.upsert(keys, weights) writes them"
            )
        _torch_data.__set__(self, value.as_subclass(torch.Tensor))

    @property
    def grad(self) -> torch.Tensor | None:
        """With a `RowOptimizer` the gradients (U, D) of the touched rows, else torch's own."""
        if self.gradients is None or not self.gradients.waits:
            own: torch.Tensor | None = _torch_grad.__get__(self)
            return own
        if _calling_module(2) == "torch._subclasses.meta_utils":
            return None  # a compiler copies the parameter, and a gradient must have its shape
        return self.gradients.values

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.gradients is None or not self.gradients.waits:
            _torch_grad.__set__(self, value)
        elif value is None:
            self.gradients.drop()
        else:
            self.gradients.replace(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            own = _torch_data.__get__(self).as_subclass(torch.Tensor).clone()
            memo[id(self)] = type(self)(own, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles its own numbers, though it may be a part of a larger store."""
        make, (data, *rest), *more = super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        data = data.as_subclass(torch.Tensor)
        if data.untyped_storage().nbytes() > data.nbytes:
            data = data.clone()
        return make, (data, *rest), *more

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The shape; raises ValueError for functions of `torch.nn.init` (kaiming_normal_)."""
        _refuse_to_initialize(self)
        size: torch.Size = self.size()
        return size

    def share_memory_(self) -> RowsParameter:
        """Refused with RuntimeError: keys, and rows of the engine, are this process's own."""
        raise RuntimeError(
            f"table {self.table_name!r}: its rows are in this process's memory, and share_memory "
            "cannot share them; send the model's state_dict to the other process, or shard the "
            "table over processes with recsdk-sharding"
        )

    def numel(self) -> int:
        """The count; raises ValueError for functions of `torch.nn.init` (orthogonal_)."""
        _refuse_to_initialize(self)
        return super().numel()


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's result, unless it asks a handle for what only rows could answer."""
    is_compiled = torch.compiler.is_compiling()
    # A compiler cannot trace more questions to what gets an attribute, nor what is a thread's own.
    is_free = isinstance(func, _OF_COMPILERS) if is_compiled else getattr(_thread, "answers", False)
    if not is_free and not is_permitted(func, args):
        handle = _first_handle((*args, *kwargs.values()))
        if handle is not None:
            raise _refusal(handle, func, args)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
    if is_free or is_compiled or type(result) is not torch.Tensor or name_of(func) not in COPIES:
        return result
    handle = _first_handle([*args, *kwargs.values()][:1])  # not what others are made like
    return result if handle is None else _handle_of(result, handle.table_name)


def facts_of(weight: torch.Tensor) -> tuple[bool, torch.dtype]:
    """Whether it requires a gradient, and its dtype, without the cost of asking a handle."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.requires_grad, weight.dtype


def _handle_of(tensor: torch.Tensor, table_name: str) -> Handle:
    tensor.__class__ = Handle  # unlike as_subclass, it keeps the tensor's place in a graph
    assert isinstance(tensor, Handle)
    tensor.table_name = table_name
    return tensor


def _first_handle(values: Iterable[Any]) -> RowsParameter | Handle | None:
    """The first plain module's `weight`, or copy of one, among values and lists of them."""
    for each in values:
        found = _first_handle(each) if isinstance(each, (list, tuple)) else each
        if isinstance(found, Handle):
            return found
        if isinstance(found, RowsParameter) and found.gradients is not None:
            return found
    return None


def _refusal(handle: RowsParameter | Handle, func: Any, args: tuple[Any, ...]) -> ValueError:
    name = name_of(func)
    if getattr(func, "__module__", None) == _INIT:
        return _error(handle, f"{_INIT}.{name}")
    if name in _WRITES and args and args[0] is handle:
        return _error(handle, f"{name} of its parameter")
    if name in _OF_GRADIENTS:
        return ValueError(
            f"table {handle.table_name!r}: {name} would see no gradient of `weight` of its module, "
            "which has no row in it: backward leaves those of the touched rows in weight.grad, for "
            "a RowOptimizer, until its step; leave this parameter out"
        )
    over_ranks = (
        "; to spread it over ranks, as FSDP does, shard its table with recsdk-sharding: "
        "docs/howto/spread_plain_modules.md has the lines"
    )
    return ValueError(
        f"table {handle.table_name!r}: {name} cannot use `weight` of its module, which has no row "
        "in it: call the module for the vectors of ids, add recsdk_core.nn.l2(module) to the loss "
        "for a penalty, give initializer= for first values, read rows by "
        "module.table.lookup(ids), or leave this parameter out"
        f"{over_ranks if name in _OF_RANKS else ''}"
    )


def _refuse_to_initialize(parameter: RowsParameter) -> None:
    if _calling_module(3) == _INIT:
        raise _error(parameter, f"a function of {_INIT}")


def _calling_module(depth: int) -> Any:
    """The module whose code runs `depth` frames above."""
    return sys._getframe(depth).f_globals.get("__name__")


def _error(parameter: RowsParameter | Handle, what: str) -> ValueError:
    return ValueError(
        f"table {parameter.table_name!r}: {what} cannot set its rows, which come as their ids "
        "show up; give the config init_fn or initializer, or the module an initializer, write rows "
        "with the table's upsert, or leave this parameter out"
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: RowsParameter, *args: Any, **kwargs: Any) -> Any:
        raise _error(self, f"{name} of its parameter")

    return refuse


for _name in _WRITES:
    setattr(RowsParameter, _name, _refusing(_name))
