"""Translates a config's `init_fn` into an initializer of new rows.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from recsdk_core import Table, init
from recsdk_sharding.ranks import mix64

__all__ = ["InitFunction", "column_initializer", "native_initializer", "per_key_initializer"]

InitFunction: TypeAlias = Callable[[torch.Tensor], Any]

_NATIVE: Mapping[Any, Callable[..., init.Initializer]] = {
    torch.nn.init.uniform_: lambda a=0.0, b=1.0: init.Uniform(low=a, high=b),
    torch.nn.init.normal_: lambda mean=0.0, std=1.0: init.Normal(mean=mean, stddev=std),
    torch.nn.init.trunc_normal_: lambda mean=0.0, std=1.0, a=-2.0, b=2.0: init.TruncatedNormal(
        mean=mean, stddev=std, low=a, high=b
    ),
    torch.nn.init.constant_: lambda val: init.Constant(value=val),
    torch.nn.init.zeros_: lambda: init.Constant(value=0.0),
    torch.nn.init.ones_: lambda: init.Constant(value=1.0),
}


def native_initializer(init_fn: InitFunction) -> init.Initializer | None:
    """The engine's initializer that does what a function of `torch.nn.init` does.

    Known are uniform_, normal_, trunc_normal_, constant_, zeros_ and ones_, alone or in a `partial`
    with keyword arguments. None for anything else. The numbers are the engine's, not torch's: the
    same distribution, drawn per (seed, table, key, column).
    """
    function, arguments = init_fn, {}
    if isinstance(init_fn, partial):
        if init_fn.args:
            return None
        function, arguments = init_fn.func, init_fn.keywords
    make = _NATIVE.get(function)
    if make is None or set(arguments) - set(inspect.signature(make).parameters):
        return None
    return make(**arguments)


def per_key_initializer(init_fn: InitFunction, seed: int, table: str) -> init.Custom:
    """Runs `init_fn` for each new key on a (1, D) tensor, its random numbers seeded by the key.

    What it draws with torch is a function of (seed, table, key) alone; torch's global generator is
    neither read nor moved. It may be called on any thread. It must not draw from other sources of
    random numbers. Cost: a Python call and a generator per new key.
    """
    return init.Custom(fn=_PerKey(init_fn, seed, table))


def column_initializer(
    initializer: init.Initializer, seed: int, table: str, dim: int, columns: tuple[int, int]
) -> init.Initializer:
    """Makes some columns of the rows that `initializer` makes for a table of `dim` columns.

    Cost: a Python call for each batch that has new keys, and the whole rows for a moment.
    """
    if isinstance(initializer, init.Constant):
        return initializer
    return init.Custom(fn=_Columns(initializer, seed, table, dim, columns))


class _Columns:
    """Fills some columns of new rows. A class, so that tables with it can be pickled."""

    def __init__(
        self,
        initializer: init.Initializer,
        seed: int,
        table: str,
        dim: int,
        columns: tuple[int, int],
    ) -> None:
        self._columns = slice(*columns)
        self._maker = Table(dim, name=table, initializer=initializer, seed=seed, num_threads=1)

    def __call__(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        try:
            values[:] = self._maker.find_or_insert(keys)[:, self._columns]
        finally:
            self._maker.clear()


class _PerKey:
    """Fills new rows one by one. A class, so that tables with it can be pickled."""

    def __init__(self, init_fn: InitFunction, seed: int, table: str) -> None:
        self._init_fn = init_fn
        digest = hashlib.blake2b(table.encode(), digest_size=8).digest()
        salted = np.array([int.from_bytes(digest, "little") ^ seed], dtype=np.uint64)
        self._salt = mix64(salted)

    def __call__(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        seeds = mix64(mix64(keys.view(np.uint64)) ^ self._salt)
        rows_ND = torch.from_numpy(values)
        generator = torch.Generator()
        with torch.no_grad(), _DrawFrom(generator):
            for index, key_seed in enumerate(seeds.tolist()):
                generator.manual_seed(key_seed)
                self._init_fn(rows_ND[index : index + 1])


class _DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes this thread's torch operators draw their random numbers from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator"):
            return func(*args, **kwargs)
        return _with_generator(func)(*args, **kwargs, generator=self._generator)


def _with_generator(func: Any) -> Any:
    """The overload of a random operator that takes a generator."""
    if _takes_generator(func):
        return func
    name = "generator" if func._overloadname == "default" else f"{func._overloadname}_generator"
    overload = getattr(func.overloadpacket, name, None)
    if overload is None:
        raise ValueError(
            f"init_fn draws random numbers with {func}, which takes no generator, so rows could "
            "not be a function of the key; use in-place operators such as tensor.normal_()"
        )
    return overload


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)
