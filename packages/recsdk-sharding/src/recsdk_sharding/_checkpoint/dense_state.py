"""What torchrec saves of dense tables: weights, optimizer state and learning rates by name.

Shape letters: N rows, D row width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from recsdk_core import optim
from recsdk_sharding._checkpoint.tensor_parts import Layout, TensorParts
from recsdk_sharding._rows.row_state import fields_of

__all__ = ["Agreed", "DenseTable", "Description", "agree", "read_dense_table"]

T = TypeVar("T", int, float)

_FUSED_NAME = "momentum1"
"""torchrec's name of the first field of state of its fused optimizers."""
_ELSEWHERE = (
    "if torchrec has the table as data_parallel, the optimizer of the dense parameters has its "
    "state: pass that of the CombinedOptimizer"
)
_FUSED = (
    optim.Adagrad,
    optim.RowwiseAdagrad,
    optim.Adam,
    optim.AdamW,
    optim.PartialRowwiseAdam,
    optim.LAMB,
)


@dataclass(frozen=True)
class Description:
    """What a rank tells the others of its pieces of a table."""

    weight: Layout | None
    state: dict[str, Layout]
    has_optimizer: bool
    num_updates: frozenset[int]
    learning_rates: frozenset[float]


@dataclass(frozen=True)
class DenseTable:
    """What this rank has of a table; nothing of what only other ranks have."""

    weight: TensorParts | None
    state: dict[str, TensorParts]
    """Optimizer state, by the dense optimizer's names."""
    has_optimizer: bool
    """Whether an optimizer's state was given; it may have no entry of the table."""
    num_updates: frozenset[int]
    """The optimizer's steps so far, if it counts them."""
    learning_rates: frozenset[float]
    """The learning rate of each parameter group that has the table, if groups were saved."""

    @property
    def description(self) -> Description:
        """What other ranks are told."""
        state = {name: value.layout for name, value in self.state.items()}
        weight = None if self.weight is None else self.weight.layout
        return Description(weight, state, self.has_optimizer, self.num_updates, self.learning_rates)


@dataclass(frozen=True)
class Agreed:
    """What all ranks together have of a table."""

    state: dict[str, str]
    """The dense optimizer's name for each field of a hash table's state."""
    is_everywhere: bool
    """Whether each rank alone has all of it."""
    num_updates: int | None
    """None: not saved."""
    learning_rate: float | None
    """None: not saved."""


def read_dense_table(
    table: str, state_dict: Mapping[str, Any], optimizer: Mapping[str, Any] | None
) -> DenseTable:
    """Reads what this rank has, without waiting for others.

    Raises KeyError, TypeError or ValueError, naming the table, for what cannot be read.
    """
    weights = [
        TensorParts.of(name, value) for name, value in _entries(state_dict, table, "entry").items()
    ]
    weight = weights[0] if weights else None
    if optimizer is None:
        return DenseTable(weight, {}, False, frozenset(), frozenset())
    rates = frozenset(float(group["lr"]) for group in _groups(optimizer, table))
    state, steps = {}, []
    for found in _entries(optimizer["state"], table, "optimizer state").values():
        for name, value in found.items():
            if name == "step":
                steps.append(int(value))
            else:
                short = name.removeprefix(f"{table}.")
                state[short] = TensorParts.of(f"{_of(table)}: {short!r}", value)
    return DenseTable(weight, state, True, frozenset(steps), rates)


def agree(
    table: str,
    shape: tuple[int, int],
    settings: optim.Optimizer | None,
    told: Sequence[Description],
) -> Agreed:
    """What all ranks have of a table (N, D) for a hash table with an optimizer.

    It uses what all ranks told, so all ranks find the same. Raises KeyError or ValueError, which
    names what is missing or does not fit.
    """
    weights = [each.weight for each in told if each.weight is not None]
    if not weights:
        raise KeyError(f"one entry must end in '{table}.weight', there is none")
    _check_layouts(f"the weights of {table!r}, a row per id,", weights, [shape])
    names: dict[str, str] = {}
    if any(each.has_optimizer for each in told):
        found = sorted({name for each in told for name in each.state})
        names = _names(table, settings, found)
    for field, name in names.items():
        is_narrow = fields_of(settings)[field] == 1
        layouts = [each.state[name] for each in told if name in each.state]
        what = f"{_of(table)}: {name!r}, {field!r} of {type(settings).__name__},"
        _check_layouts(what, layouts, [shape[:1], (shape[0], 1)] if is_narrow else [shape])
    num_updates = _only(f"{_of(table)}: 'step'", (each.num_updates for each in told))
    if num_updates is None and "exp_avg" in names:
        raise KeyError(
            f"{_of(table)}: lacks 'step', the number of its updates, which torchrec's fused "
            "kernels keep elsewhere: put it into the table's entry"
        )
    rate = _only(f"the learning rate of table {table!r}", (each.learning_rates for each in told))
    if settings is not None and rate is not None:
        replace(settings, lr=rate)  # raises ValueError for what is no learning rate
    is_everywhere = all(
        layout is not None and layout.is_whole
        for each in told
        for layout in (each.weight, *(each.state.get(name) for name in names.values()))
    )
    return Agreed(names, is_everywhere, num_updates, rate)


def _of(table: str) -> str:
    return f"optimizer state of table {table!r}"


def _names(table: str, settings: optim.Optimizer | None, found: Sequence[str]) -> dict[str, str]:
    """The dense name of each field of a hash table's state; raises unless just these were found."""
    if settings is None:
        raise ValueError(
            f"table {table!r} has no optimizer, so it takes no optimizer state; give it one first, "
            "or leave out its state"
        )
    names = {field: field for field in fields_of(settings)}
    first = next(iter(names), None)
    if isinstance(settings, _FUSED) and first not in found and _FUSED_NAME in found:
        names[str(first)] = _FUSED_NAME
    kind = type(settings).__name__
    if lacks := sorted(field for field, name in names.items() if name not in found):
        where = "" if found else f"; {_ELSEWHERE}"
        raise KeyError(f"{_of(table)}: {kind} needs {lacks}, there is {list(found)}{where}")
    if more := sorted(set(found) - set(names.values())):
        raise ValueError(f"{_of(table)}: {kind} has {sorted(names)}, got {more} as well")
    return names


def _check_layouts(what: str, layouts: Sequence[Layout], sizes: Sequence[tuple[int, ...]]) -> None:
    """Raises ValueError unless the ranks together have a whole tensor of one of these sizes."""
    for layout in layouts:
        if layout.size not in sizes:
            more = "; state of rows for each range of columns is not taken" * (len(sizes) > 1)
            raise ValueError(
                f"{what} must be a tensor of floats {sizes[0]}, got {layout.size}{more}"
            )
    found = Layout(layouts[0].size, frozenset().union(*(each.places for each in layouts)))
    if not found.is_whole:
        raise ValueError(
            f"{what} {found.size} has {found.num_found} numbers on the ranks of the model: call it "
            "on all ranks over which the tensor is spread, of a model that is sharded over them"
        )


def _only(what: str, told: Iterable[frozenset[T]]) -> T | None:
    """The value that ranks told, if any did. Raises ValueError if they differ."""
    found = sorted(frozenset().union(*told))
    if len(found) > 1:
        raise ValueError(f"{what} must be one for the table, got {found}")
    return found[0] if found else None


def _groups(state_dict: Mapping[str, Any], table: str) -> list[Mapping[str, Any]]:
    """The parameter groups of a table: none if they were not saved."""
    groups = state_dict.get("param_groups", [])
    names = [*state_dict.get("state", [0]), *(name for group in groups for name in group["params"])]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            "optimizer must be the state_dict() of a torchrec optimizer, which has the names of "
            "parameters: model.fused_optimizer, or one in KeyedOptimizerWrapper"
        )
    return [group for group in groups if any(_is_of(table, name) for name in group["params"])]


def _entries(state_dict: Mapping[str, Any], table: str, what: str) -> dict[str, Any]:
    """The entry of a table, if there is one. Raises KeyError for more."""
    found = {name: value for name, value in state_dict.items() if _is_of(table, name)}
    if len(found) > 1:
        raise KeyError(f"one {what} must end in '{table}.weight', there are {sorted(found)}")
    return found


def _is_of(table: str, name: str) -> bool:
    return f".{name}".endswith(f".{table}.weight")
