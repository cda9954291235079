"""Odd values for every argument of every public callable, and what a refusal must be like.

A `Surface` says with what a package's callables are called; `faults_of` gives one of them an odd
value and says what is wrong with how it takes it. The callables are found by looking into the
public modules, so a new one fails the tests until the surface has values for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import itertools
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from reference_page import MODULES

__all__ = [
    "ODD",
    "Call",
    "Case",
    "Public",
    "Surface",
    "cases_of",
    "fault_of_refusal",
    "faults_of",
    "folder",
    "good_call",
    "new_place",
]

_numbers = itertools.count()


@functools.cache
def _written() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def folder() -> str:
    """Where calls may write."""
    return _written().name


def new_place() -> str:
    """A path there at which nothing is yet."""
    return str(Path(folder(), str(next(_numbers))))


class Raised(Exception):
    """What a value of ours raises when it is looked at; it may pass through."""


class _BadIndex:
    def __index__(self) -> int:
        raise Raised


class _Text(str):
    """A subclass of str."""


def _raising() -> Iterator[int]:
    yield 1
    raise Raised


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _sparse() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ones(3, 2).to_sparse_csr()


ODD: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1j": lambda: 1j,
    "Fraction": lambda: Fraction(1, 10**400),
    "Decimal": lambda: Decimal("0.5"),
    "no text": str,
    "text": lambda: "odd",
    "subclass of str": lambda: _Text("odd"),
    "surrogate": lambda: "\udc80",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"odd",
    "Path": lambda: Path("/dev/null/odd"),
    "object": object,
    "class": lambda: int,
    "list": list,
    "list of all sorts": lambda: [1, "a", None],
    "tuple": tuple,
    "dict": lambda: {"odd": 1},
    "set": lambda: {1},
    "range": lambda: range(3),
    "generator that raises": _raising,
    "index that raises": _BadIndex,
    "numpy int64": lambda: np.int64(3),
    "numpy float32": lambda: np.float32(0.5),
    "numpy bool": lambda: np.bool_(True),
    "0-d array": lambda: np.array(3),
    "no numbers": lambda: np.zeros(0, np.int64),
    "strided array": lambda: np.arange(6)[::2],
    "big-endian array": lambda: np.arange(3).astype(">i8"),
    "float64 matrix": lambda: np.ones((3, 2)),
    "3-d array": lambda: np.ones((3, 2, 1), np.float32),
    "array of text": lambda: np.array(["a", "b", "c"]),
    "array of objects": lambda: np.array([None, 1, 2]),
    "nan matrix": lambda: np.full((3, 2), np.nan, np.float32),
    "0-d tensor": lambda: torch.tensor(0.5),
    "tensor of ints": lambda: torch.tensor([1, 2, 3]),
    "tensor with gradient": lambda: torch.ones(3, 2, requires_grad=True),
    "meta tensor": lambda: torch.ones(3, 2, device="meta"),
    "bfloat16 tensor": lambda: torch.ones(3, 2, dtype=torch.bfloat16),
    "strided tensor": lambda: torch.arange(6)[::2],
    "sparse tensor": _sparse,
    "nested tensor": _nested,
}
"""Makers of odd values: some are used up by a call."""

_SENSELESS = ("object",)
"""What nobody can have meant: to take it is to ignore it."""

_INTERNAL = re.compile(
    r"incompatible function arguments|nanobind|std::|bad_cast|Invoked with|has no attribute|"
    r"not subscriptable|not iterable|unsupported operand|positional argument|ambiguous|unhashable|"
    r"must be real number, not|iteration over a|scalar index|converted to an index|"
    r"(?<!_)indices must be|cannot be interpreted as an integer|is not callable|not supported "
    r"between|has no len|Internal error|can't call|embedded null",
    re.IGNORECASE,
)
"""Of messages that tell of our code, not of what was given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surface:
    """What the callables of a package are called with."""

    package: str
    receivers: Mapping[str, Callable[[], Any]]
    """Makes what methods of a class, or one of them, are called on."""
    values: Mapping[str, Callable[[], Any]]
    """Makes a good value of a parameter: of all that have its name, or of "callable.parameter"."""
    state: Callable[[Any], Any]
    """What a receiver or an argument holds; a refused call leaves it."""
    signatures: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Parameters of compiled callables, which do not tell them."""
    together: Mapping[str, Callable[[], dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """What the number "callable.parameter" is given with where the good call has none: arguments by
    name, itself among them, and as "self" the receiver."""
    taken: frozenset[str] = frozenset()
    """Parameters that take any object, or keep it unread: "parameter" or "callable.parameter"."""
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What messages call a parameter, as a pattern, where that is not its name."""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is not called, and why: a pattern of callables or of "callable(parameter=odd)"."""
    errors: tuple[type[Exception], ...] = (TypeError, ValueError)
    """What a refusal is."""
    finished: Callable[[Any], Any] = lambda result: result
    """What a call's result comes to, once work that it has begun is done."""

    @functools.cached_property
    def callables(self) -> dict[str, Public]:
        """The functions, constructors, methods and setters of the public modules, by name."""
        return _public_callables(self)


@dataclasses.dataclass(frozen=True)
class Case:
    """One odd value of one parameter."""

    name: str
    parameter: str
    odd: str


@dataclasses.dataclass(frozen=True)
class Public:
    """A callable that users may call."""

    name: str
    function: Callable[..., Any]
    receiver: str | None
    """The class whose method it is."""

    def parameters(self, surface: Surface) -> dict[str, inspect.Parameter]:
        """Its parameters by name, without self."""
        if self.name in surface.signatures:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            return {each: inspect.Parameter(each, kind) for each in surface.signatures[self.name]}
        found = dict(inspect.signature(self.function).parameters)
        if self.receiver is not None:
            del found[next(iter(found))]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return {each: value for each, value in found.items() if value.kind not in variadic}


def _public_callables(surface: Surface) -> dict[str, Public]:
    found: dict[str, Public] = {}
    for module_name in MODULES:
        if f"{module_name}.".startswith(f"{surface.package}."):
            module = importlib.import_module(module_name)
            prefix = module_name[len(surface.package) + 1 :]
            for name in module.__all__:
                label = f"{prefix}.{name}" if prefix else name
                for each in _callables_of(label, getattr(module, name), surface.package):
                    found[each.name] = each
    return {
        name: each
        for name, each in found.items()
        if not _is_left_out(surface, name) and each.parameters(surface)
    }


def _is_left_out(surface: Surface, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in surface.left_out)


def _callables_of(name: str, value: Any, package: str) -> Iterator[Public]:
    if inspect.isclass(value):
        yield from _of_class(name, value, package)
    elif inspect.isroutine(value):
        yield Public(name, value, None)


def _of_class(name: str, kind: type, package: str) -> Iterator[Public]:
    if issubclass(kind, (BaseException, enum.Enum)) or getattr(kind, "_is_protocol", False):
        return
    is_record = dataclasses.is_dataclass(kind) and not hasattr(kind, "__post_init__")
    if not is_record and not issubclass(kind, tuple) and not inspect.isabstract(kind):
        yield Public(name, kind, None)
    for attribute in dir(kind):
        if attribute.startswith("_"):
            continue
        value = inspect.getattr_static(kind, attribute)
        if not _is_defined_in(package, kind, attribute):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield Public(f"{name}.{attribute}", getattr(kind, attribute), None)
        elif isinstance(value, FunctionType):
            yield Public(f"{name}.{attribute}", value, name)
        elif isinstance(value, property) and value.fset is not None:
            yield Public(f"{name}.{attribute}", value.fset, name)


def _is_defined_in(package: str, kind: type, attribute: str) -> bool:
    home = next(base for base in kind.__mro__ if attribute in vars(base))
    return home.__module__.split(".")[0] == package


def cases_of(surface: Surface) -> list[Case]:
    """Each odd value of each parameter of each callable."""
    return [
        Case(name, parameter, odd)
        for name, each in sorted(surface.callables.items())
        for parameter in each.parameters(surface)
        for odd in ODD
        if not _is_left_out(surface, f"{name}({parameter}={odd})")
    ]


@dataclasses.dataclass
class Call:
    """A callable with what it is called with."""

    function: Callable[..., Any]
    receiver: list[Any]
    arguments: dict[str, Any]
    finished: Callable[[Any], Any]

    def __call__(self) -> Any:
        """Its result; of an iterator all that it gives."""
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            result = self.finished(self.function(*self.receiver, **self.arguments))
            return list(result) if isinstance(result, Iterator) else result


def good_call(surface: Surface, each: Public) -> Call:
    """A call that is taken."""
    receiver = []
    if each.receiver is not None:
        made = surface.receivers.get(each.name, surface.receivers.get(each.receiver))
        if made is None:
            raise AssertionError(f"{each.name}: give its surface a receiver")
        receiver = [made()]
    arguments: dict[str, Any] = {}
    for parameter, told in each.parameters(surface).items():
        make = surface.values.get(f"{each.name}.{parameter}", surface.values.get(parameter))
        if make is None and told.default is inspect.Parameter.empty:
            raise AssertionError(f"{each.name}: give its surface a value of {parameter!r}")
        arguments[parameter] = told.default if make is None else _made(make, receiver)
    return Call(each.function, receiver, arguments, surface.finished)


def _made(make: Callable[..., Any], receiver: list[Any]) -> Any:
    """Values that belong to a receiver are made of it."""
    return make(*receiver) if inspect.signature(make).parameters else make()


def faults_of(surface: Surface, case: Case) -> str | None:
    """What is wrong with how a callable takes an odd value; None if nothing is."""
    full_name = f"{case.name}.{case.parameter}"
    call = good_call(surface, surface.callables[case.name])
    fault = fault_of_refusal(surface, case, call, ODD[case.odd]())
    if fault != _IS_TAKEN:
        return fault
    is_taken = full_name in surface.taken or case.parameter in surface.taken
    return "is ignored" if case.odd in _SENSELESS and not is_taken else None


_IS_TAKEN = "is taken"


def fault_of_refusal(surface: Surface, case: Case, call: Call, odd: Any) -> str | None:
    """What is wrong with how a callable refuses a value; None if nothing is."""
    call.arguments[case.parameter] = odd
    held = [*call.receiver, *call.arguments.values()]
    before = [surface.state(each) for each in held]
    try:
        call()
    except Raised:
        fault = None
    except surface.errors as error:
        fault = _fault_of_message(surface, case, error)
    except Exception as error:
        fault = f"{type(error).__module__}.{type(error).__name__}: {error}"
    else:
        return _IS_TAKEN
    if fault is None and [surface.state(each) for each in held] != before:
        return "was refused, and has changed what it was given"
    return fault


def _fault_of_message(surface: Surface, case: Case, error: Exception) -> str | None:
    message = f"{type(error).__name__}: {error}"
    if _INTERNAL.search(message):
        return message
    is_setter = case.parameter == "value" and "." in case.name
    parameter = case.name.split(".")[-1] if is_setter else case.parameter
    names = [case.parameter, parameter, parameter.replace("_", " ")]
    pattern = surface.called.get(f"{case.name}.{case.parameter}")
    pattern = pattern or surface.called.get(case.parameter)
    is_named = any(re.search(rf"\b{re.escape(name)}\b", message) for name in names)
    if is_named or (pattern is not None and re.search(pattern, message)):
        return None
    return f"does not name the argument: {message}"
