"""Translates a config's `init_fn` into an initializer of new rows.

Shape letters: N keys, D row width.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from recsdk_core import Table, init
from recsdk_sharding._configs.private_random import PrivateRandom, refuse_other_sources
from recsdk_sharding.placement.ranks import mix64

__all__ = ["InitFunction", "column_initializer", "native_initializer", "per_key_initializer"]

InitFunction: TypeAlias = Callable[[torch.Tensor], Any]

_MANY_ROWS = 1000

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

    It knows uniform_, normal_, trunc_normal_, constant_, zeros_ and ones_, alone or in a `partial`
    with keyword arguments, and returns None for anything else. The numbers are the engine's, not
    torch's: the same distribution, drawn per (seed, table, key, column).
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

    What `init_fn` draws with torch is a function of (seed, table, key) alone. torch's global
    generator is neither read nor moved; `torch.manual_seed` acts until the row's end, and only
    inside the function. A function that draws nothing, or seeds torch first, is called once for all
    new keys of a batch. It may be called on any thread.

    Raises ValueError if the function calls functions of `numpy.random` that share the process's
    state. At the first new key it also raises if the function draws from Python's `random`, uses
    `torch.default_generator` directly, or gives two rows for one key. Warns once if the function
    seeds torch, and once after 1000 rows that were made one by one.

    Cost: a Python call and some seedings per new key.
    """
    return init.Custom(fn=_PerKey(init_fn, seed, table))


def column_initializer(
    initializer: init.Initializer, seed: int, table: str, dim: int, columns: tuple[int, int]
) -> init.Initializer:
    """Makes some columns of the rows that `initializer` makes for a table of `dim` columns.

    Cost: a Python call for each batch that has new keys, and memory for the whole rows meanwhile.
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
        self._table = table
        digest = hashlib.blake2b(table.encode(), digest_size=8).digest()
        salted = np.array([int.from_bytes(digest, "little") ^ seed], dtype=np.uint64)
        self._salt = mix64(salted)
        self._is_checked = False
        self._num_made = 0

    def __call__(self, keys: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        seeds = mix64(mix64(keys.view(np.uint64)) ^ self._salt).tolist()
        if not self._is_checked:
            self._check(seeds[0], values.shape[1])
            self._is_checked = True
        rows_ND = torch.from_numpy(values)
        private = PrivateRandom()
        with torch.no_grad(), private.in_place():
            for number, seed in enumerate(seeds):
                self._fill(rows_ND[number : number + 1], private, seed)
                if number == 0 and not private.has_drawn:
                    rows_ND[1:] = rows_ND[0]  # nothing was drawn: all rows are alike
                    return
        before = self._num_made
        self._num_made += len(keys)
        if before < _MANY_ROWS <= self._num_made:
            self._warn(
                f"init_fn is run for each new id by itself, {self._num_made} so far, which is "
                "slow; quick are an initializer=recsdk_core.init.Uniform(...), Normal, "
                "TruncatedNormal or Constant, and as init_fn torch.nn.init's uniform_, normal_, "
                "trunc_normal_, constant_, zeros_ or ones_, or functools.partial of them with "
                "keyword arguments"
            )

    def _fill(self, row_1D: torch.Tensor, private: PrivateRandom, seed: int) -> None:
        private.start(seed)
        self._init_fn(row_1D)

    def _check(self, seed: int, dim: int) -> None:
        """Raises ValueError if a row depends on more than the key and torch's random numbers."""
        rows_2D = torch.from_numpy(np.zeros((2, dim), np.float32))
        private = PrivateRandom()

        def twice() -> None:
            with torch.no_grad(), private.in_place():
                self._fill(rows_2D[:1], private, seed)
                self._fill(rows_2D[1:], private, seed)

        refuse_other_sources(twice, self._table)
        first, second = rows_2D.numpy()
        if first.tobytes() != second.tobytes():
            raise ValueError(
                f"table {self._table!r}: init_fn gave two rows for one id, so it depends on more "
                "than the id: on a generator made outside, or on calls before; draw with torch, "
                "whose random numbers are those of the id while it runs"
            )
        if private.is_seeded and not private.has_drawn:
            self._warn(
                "init_fn seeds torch itself, so all new ids get the same row; leave "
                "torch.manual_seed out, and each id has random numbers of its own, the same in "
                "every run"
            )

    def _warn(self, text: str) -> None:
        warnings.warn(f"table {self._table!r}: {text}", stacklevel=4)
