"""The rows of one table that one process owns, and how they enter and leave a `state_dict`.

Shape letters: n rows, D row width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import recsdk_core
from recsdk_core import optim
from recsdk_sharding.configs import HashEmbeddingBagConfig
from recsdk_sharding.optimizers import optimizer_of_parameter
from recsdk_sharding.ranks import RankMap

__all__ = ["TableRows", "anchor_of"]

_UINT64 = 2**64
_ATTACHED = ("_optimizer_classes", "_optimizer_kwargs")


class TableRows(nn.Module):
    """One rank's part of a table: an engine table behind a (0, D) parameter.

    The parameter `weight` carries the optimizer and `requires_grad`; it has no elements and never
    gets a `.grad`. The engine table is made at its first use, when the optimizer is known.

    In a `state_dict` the part of rank r is, under `rank_<r>.`: `keys` int64 (n,), `weight` float32
    (n, D), `state.<field>` float32 (n, width) per field of optimizer state, and the scalars
    `update_count` and `seed` int64. Loading takes the parts of any ranks, keeps the keys that this
    rank owns and replaces what the table had.
    """

    def __init__(
        self, config: HashEmbeddingBagConfig, ranks: RankMap | None = None, rank: int = 0
    ) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(0, config.embedding_dim))
        self._ranks = ranks or RankMap(1)
        self._rank = rank
        self._table: recsdk_core.Table | None = None
        self._optimizer: optim.Optimizer | None = None

    @property
    def table(self) -> recsdk_core.Table:
        """The engine's table, made on first use."""
        if self._table is None:
            self._table = self._make_table()
        return self._table

    @property
    def optimizer(self) -> optim.Optimizer | None:
        """The optimizer that was applied to the parameter before the table was made."""
        if self._table is None:
            self._table = self._make_table()
        return self._optimizer

    def _make_table(self) -> recsdk_core.Table:
        self._optimizer = optimizer_of_parameter(self.weight, self.config.name)
        return self.config.make_table(self._optimizer or optim.SGD(), self._share_of_max_rows())

    def _share_of_max_rows(self) -> int | None:
        total, count = self.config.max_rows, self._ranks.world_size
        return None if total is None else total // count + int(self._rank < total % count)

    def check_trainable(self) -> None:
        """Raises RuntimeError if the parameter requires a gradient but has no optimizer."""
        if self.optimizer is None and self.weight.requires_grad:
            raise RuntimeError(
                f"table {self.config.name!r} has no optimizer: call torchrec's "
                "apply_optimizer_in_backward(optimizer_class, module.parameters(), {...}) before "
                "its first use, or freeze it with requires_grad_(False)"
            )

    def adopt_optimizer(self) -> None:
        """Takes an optimizer that was applied after the table was made, if it has no rows yet."""
        if self._table is not None and self._optimizer is None and len(self._table) == 0:
            self._table = None

    def take_rows_of(self, other: TableRows) -> None:
        """Copies optimizer, `requires_grad` and the rows that this rank owns from another part."""
        self.weight.requires_grad_(other.weight.requires_grad)
        self._attach(other._attached())
        if other._table is not None:
            self._replace_rows([_Part.of_table(other._table)])

    def _attached(self) -> dict[str, Any]:
        """What `apply_optimizer_in_backward` left on the parameter.

        torchrec's own sharders add an entry "optimizer" to the caller's dict of arguments, which
        several parameters may share; it is no argument of the class.
        """
        arguments = [
            {name: value for name, value in given.items() if name != "optimizer"}
            for given in getattr(self.weight, "_optimizer_kwargs", [])
        ]
        classes = list(getattr(self.weight, "_optimizer_classes", []))
        return dict(zip(_ATTACHED, (classes, arguments), strict=True))

    def _attach(self, attached: dict[str, Any]) -> None:
        # Not by applying again: that would keep the parameter alive for ever, through its hook.
        classes, arguments = attached.values()
        if classes:
            self.weight.__dict__.update(attached)
            self.weight.__dict__["_in_backward_optimizers"] = [
                make([self.weight], **given) for make, given in zip(classes, arguments, strict=True)
            ]

    def __getstate__(self) -> dict[str, Any]:
        # Copies of a parameter lose its attributes, so they travel beside it.
        return {**self.__dict__, "_attached_to_weight": self._attached()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attached = state.pop("_attached_to_weight")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach(attached)

    def extra_repr(self) -> str:
        rows = 0 if self._table is None else len(self._table)
        return f"name={self.config.name!r}, dim={self.config.embedding_dim}, rows={rows}"

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        part = _Part.of_table(self.table)
        for name, tensor in part.tensors().items():
            destination[f"{prefix}rank_{self._rank}.{name}"] = tensor

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
        groups = _entries_by_rank(state_dict, prefix)
        if not groups:
            missing_keys.append(f"{prefix}rank_{self._rank}.keys")
            return
        try:
            self._replace_rows([_Part.of_entries(entries) for entries in groups])
        except (ValueError, TypeError, KeyError, recsdk_core.RecsdkError) as error:
            name = f"table {self.config.name!r}: "
            error_msgs.append(name + str(error).removeprefix(name))  # the engine names it too

    def _replace_rows(self, parts: list[_Part]) -> None:
        table = self.table
        fields = dict(table.state_fields) if self.optimizer is not None else {}
        for part in parts:
            part.check(self.config, fields)
        owned = [part.select(self._ranks.owned_by(self._rank, part.keys)) for part in parts]
        num_rows = sum(len(part.keys) for part in owned)
        if len(np.unique(np.concatenate([part.keys for part in owned]))) < num_rows:
            raise ValueError("a key occurs more than once; load the parts of one save only")
        if table.max_rows is not None and num_rows > table.max_rows:
            raise ValueError(
                f"{num_rows} rows to load do not fit into this rank's share of max_rows, "
                f"{table.max_rows}; raise max_rows"
            )
        table.clear()
        for part in owned:
            table.upsert(part.keys, part.weight, part.state if fields else None)
        table.update_count = max(part.update_count for part in parts)


def anchor_of(rows: Sequence[TableRows]) -> torch.Tensor:
    """The parameter that connects the tables of one autograd node to the graph.

    Raises ValueError if some tables are frozen and others not: a node trains all of its tables.
    """
    frozen = [part.config.name for part in rows if not part.weight.requires_grad]
    if 0 < len(frozen) < len(rows):
        raise ValueError(
            f"tables {frozen} are frozen (requires_grad_(False)) and others of the same collection "
            "are not: freeze all tables of a collection or none; put them in two collections"
        )
    return rows[0].weight


def _entries_by_rank(state_dict: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The entries of each rank's part, names without prefix and rank."""
    groups: dict[str, dict[str, Any]] = {}
    start = f"{prefix}rank_"
    for key, value in state_dict.items():
        if key.startswith(start):
            rank, _, name = key[len(start) :].partition(".")
            groups.setdefault(rank, {})[name] = value
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Rows as they lie in a `state_dict`."""

    keys: NDArray[np.int64]
    weight: NDArray[np.float32]
    state: dict[str, NDArray[np.float32]]
    update_count: int
    seed: int

    @staticmethod
    def of_table(table: recsdk_core.Table) -> _Part:
        batches = list(table.export())
        return _Part(
            keys=_joined([b.keys for b in batches], np.zeros(0, np.int64)),
            weight=_joined([b.weights for b in batches], np.zeros((0, table.dim), np.float32)),
            state={
                name: _joined([b.state[name] for b in batches], np.zeros((0, width), np.float32))
                for name, width in table.state_fields
            },
            update_count=table.update_count,
            seed=table.seed,
        )

    @staticmethod
    def of_entries(entries: Mapping[str, Any]) -> _Part:
        start = "state."
        return _Part(
            keys=_array(entries["keys"], np.int64),
            weight=_array(entries["weight"], np.float32),
            state={
                name[len(start) :]: _array(value, np.float32)
                for name, value in entries.items()
                if name.startswith(start)
            },
            update_count=_array(entries["update_count"], np.int64).item(),
            seed=int(entries["seed"]) % _UINT64,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The entries of a `state_dict`."""
        return {
            "keys": torch.from_numpy(self.keys),
            "weight": torch.from_numpy(self.weight),
            **{f"state.{name}": torch.from_numpy(value) for name, value in self.state.items()},
            "update_count": torch.tensor(self.update_count),
            "seed": torch.from_numpy(np.array(self.seed, dtype=np.uint64).view(np.int64)),
        }

    def check(self, config: HashEmbeddingBagConfig, fields: Mapping[str, int]) -> None:
        """Raises ValueError if the rows do not fit the table."""
        if self.keys.ndim != 1:
            raise ValueError(f"keys must have shape (n,), got {self.keys.shape}")
        if self.update_count < 0:
            raise ValueError(f"update_count must not be negative, got {self.update_count}")
        num_rows = len(self.keys)
        shapes = {"weight": (self.weight, config.embedding_dim)}
        for name, width in fields.items():
            if name not in self.state:
                raise ValueError(
                    f"optimizer state {name!r} is missing; it was saved with {sorted(self.state)}"
                )
            shapes[f"state.{name}"] = (self.state[name], width)
        for name, (array, width) in shapes.items():
            if array.shape != (num_rows, width):
                raise ValueError(f"{name} must have shape {(num_rows, width)}, got {array.shape}")
        if self.seed != config.seed:
            raise ValueError(
                f"it was saved with seed {self.seed} but is configured with {config.seed}; new "
                f"rows would not be those of the saved table; configure seed={self.seed}"
            )

    def select(self, is_wanted: NDArray[np.bool_]) -> _Part:
        """The rows of a mask (n,)."""
        if is_wanted.all():
            return self
        return replace(
            self,
            keys=self.keys[is_wanted],
            weight=self.weight[is_wanted],
            state={name: value[is_wanted] for name, value in self.state.items()},
        )


def _joined(arrays: list[NDArray[Any]], empty: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else empty


def _array(value: torch.Tensor, dtype: Any) -> NDArray[Any]:
    array = value.detach().cpu().numpy()
    if array.dtype != dtype:
        raise TypeError(f"entries must be {np.dtype(dtype)}, got {array.dtype}")
    return np.ascontiguousarray(array)
