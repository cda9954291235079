"""The parameter that stands for a table's rows, and refuses writes in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from recsdk_core.nn.computing import computes
from recsdk_core.nn.row_gradients import RowGradients

__all__ = ["RowsParameter"]

_INIT = "a function of torch.nn.init"
_torch_data: Any = torch.Tensor.data
_torch_grad: Any = torch.Tensor.grad
_OWN = {"requires_grad_", "detach_", "share_memory_", "rename_"}
_WRITES = [
    *(n for n in dir(torch.Tensor) if n.endswith("_") and n[0] != "_" and n not in _OWN),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"),
]


class _RowsData(torch.Tensor):
    """`weight.data` of a plain module, which refuses what the parameter refuses."""

    table_name: str = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        values = (*args, *(kwargs or {}).values())
        if computes(func):
            _refuse_to_compute(_name_of(func), values)
        name = func.__name__
        if name in _WRITES and args and isinstance(args[0], _RowsData):
            raise _error(args[0], f"{name} of its parameter")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class RowsParameter(nn.Parameter):
    """Carries a table's optimizer and `requires_grad`; its numbers are the table's own.

    On the cpu it has no numbers, so functions of `torch.nn.init` would do nothing to it; on a
    device they would overwrite rows of ids. So they raise ValueError, as do methods that write in
    place, and for a plain module whatever computes with it: a sum, a norm, a product, F.embedding.
    What loops do with any parameter (copies, moves, comparisons, optimizers) goes on. A copy has no
    name, and pickling gives a plain parameter, so a copied module wraps its parameter again.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls the function as for any parameter; refuses, unless compiled, to compute with it."""
        if not torch.compiler.is_compiling() and computes(func):
            _refuse_to_compute(_name_of(func), (*args, *(kwargs or {}).values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

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
        made = own.as_subclass(_RowsData)
        made.table_name = self.table_name
        return made

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


def _name_of(func: Any) -> str:
    is_init = getattr(func, "__module__", None) == "torch.nn.init"
    name: str = _INIT if is_init else func.__name__
    return name


def _refuse_to_compute(what: str, values: Iterable[Any]) -> None:
    for each in values:
        if isinstance(each, (list, tuple)):
            _refuse_to_compute(what, each)
        elif isinstance(each, _RowsData) or (
            isinstance(each, RowsParameter) and each.gradients is not None
        ):
            if what == _INIT:
                raise _error(each, _INIT)
            raise ValueError(
                f"table {each.table_name!r}: {what} cannot compute with `weight` of its "
                "module, which has no row in it: call the module for the vectors of ids, add "
                "recsdk_core.nn.l2(module) to the loss for a penalty, give initializer= for first "
                "values, or read rows by module.table.lookup(ids)"
            )


def _refuse_to_initialize(parameter: RowsParameter) -> None:
    if _calling_module(3) == "torch.nn.init":
        raise _error(parameter, _INIT)


def _calling_module(depth: int) -> Any:
    """The module whose code runs `depth` frames above."""
    return sys._getframe(depth).f_globals.get("__name__")


def _error(parameter: RowsParameter | _RowsData, what: str) -> ValueError:
    return ValueError(
        f"table {parameter.table_name!r}: {what} cannot set its rows, which come as their ids "
        "show up; give the config init_fn or initializer, or the module an initializer, write rows "
        "with the table's upsert, or leave this parameter out"
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: RowsParameter, *args: Any, **kwargs: Any) -> Any:
        raise _error(self, f"{name} of its parameter")

    return refuse


def _refusing_part(name: str) -> property:
    own = getattr(torch.Tensor, name)

    def read(self: RowsParameter) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_to_compute(name, (self,))
        return own.__get__(self)

    return property(read)


for _name in ("T", "mT", "H", "mH"):
    setattr(RowsParameter, _name, _refusing_part(_name))
for _name in _WRITES:
    setattr(RowsParameter, _name, _refusing(_name))
