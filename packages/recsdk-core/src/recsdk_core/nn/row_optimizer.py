"""A torch optimizer over the tables of a model, for loops that call `step` themselves."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, get_args

import torch
from torch import nn

from recsdk_core._internal.interruptions import held_back
from recsdk_core.errors import BusyError, NonFiniteError
from recsdk_core.nn.row_gradients import RowGradients
from recsdk_core.nn.rows_parameter import RowsParameter
from recsdk_core.optim import Optimizer, from_torch
from recsdk_core.tables import update_tables

__all__ = ["RowOptimizer"]

_OWN_KINDS = get_args(Optimizer)
_UNCHANGING = (int, float, str, tuple, type(None))


class RowOptimizer(torch.optim.Optimizer):
    """Trains tables of plain modules, and dense parameters, by the loop's own `step`.

    `params`: a model, or parameters or groups of them as every torch optimizer takes; at least one
    is `weight` of a `HashEmbedding` or `HashEmbeddingBag`, and the others are dense parameters,
    which an `optimizer_class` of its own inside trains. `optimizer_class` is one that
    `recsdk_core.optim.from_torch` takes, with its arguments as `kwargs`; or, for tables alone, a
    class of `recsdk_core.optim` (FTRL, or SGD with `clip_norm`) with its.

    From then on a backward through these modules updates no row. It adds its gradients up per row
    in `weight.grad`: float32 (U, D), of the U rows touched since the last `zero_grad`. GradScaler,
    clip_grad_norm_ and clip_grad_value_ read and scale it as they do others. `step` updates each
    table that has gradients once, in the engine, and then the dense parameters. A scheduler may
    change `lr`; another option that changes for a group with a table makes `step` raise ValueError.
    Rows and their optimizer state are in the model's `state_dict`, the dense parameters' state is
    in this one's.

    Making it gives each table this optimizer, whatever trained it before. Its state is fresh, and
    counts updates from 0; but if `load_state_dict` of the model brought state, and no step has
    trained the table since, that is its state. Gradients that a step has applied are dropped.
    Raises ValueError without a table, for a module that was given an `optimizer` of its own, for
    such state of another optimizer, and an argument that the engine does not know; BusyError while
    outputs of earlier forwards live, or gradients of another RowOptimizer wait. Cost of a backward:
    a copy of its gradients; they are added up once, in `step` or when `weight.grad` is read.
    Memory: the sums of the touched rows, as much again or 64 MiB, and the gradients of one
    backward. Threads may run backwards of one model at once; call `step` and `zero_grad` after
    them.

    >>> import torch
    >>> from recsdk_core.nn import HashEmbedding, RowOptimizer
    >>> embedding = HashEmbedding(4, name="item")
    >>> optimizer = RowOptimizer(embedding, torch.optim.Adagrad, lr=0.1)
    >>> embedding(torch.tensor([7, 7, -1])).sum().backward()
    >>> embedding.weight.grad.tolist()
    [[2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]]
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    """

    def __init__(self, params: nn.Module | Iterable[Any], optimizer_class: type, **kwargs: Any):
        self._kind = optimizer_class
        self._given = dict(kwargs)
        self._mark = object()
        defaults = _defaults_of(optimizer_class, kwargs)
        self._options = list(defaults)
        self._dense: torch.optim.Optimizer | None = None
        self._num_loaded: dict[RowGradients, int] = {}  # updates, says a state_dict, until a step
        self._is_made = False
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)
        if not any(_tables_of(group) for group in self.param_groups):
            raise ValueError(
                f"RowOptimizer found no table of a HashEmbedding or HashEmbeddingBag in what it "
                f"was given, {_shown(params)}; give it a model that has one, or use "
                f"{optimizer_class.__name__} itself"
            )
        self._adopt(self.param_groups)
        self._is_made = True

    def _adopt(self, groups: Sequence[dict[str, Any]]) -> None:
        """Takes tables and dense parameters of groups; changes nothing if it raises."""
        taken = [(each, group) for group in groups for each in _tables_of(group)]
        for each, group in taken:
            each.check_loaded(self._settings(group))
        _check_idle([each for each, _ in taken])
        fresh = self._optimizer_of_dense(groups if self._dense is not None else self.param_groups)
        with held_back():
            if self._dense is None:
                self._dense = fresh
                if fresh is not None:
                    self.state = fresh.state
            else:
                for group in groups:
                    options = self._options_of(group)
                    self._dense.add_param_group({"params": _dense_of(group), **options})
                self.state.update({} if fresh is None else fresh.state)
            for each, group in taken:
                self._take(each, group)

    def _optimizer_of_dense(
        self, of_groups: Sequence[dict[str, Any]]
    ) -> torch.optim.Optimizer | None:
        """Trains the dense parameters, in a group for each of ours; None: there are none."""
        dense = [_dense_of(group) for group in of_groups]
        if not any(dense):
            return None
        groups = [
            {"params": params, **self._options_of(group)}
            for params, group in zip(dense, of_groups, strict=True)
        ]
        # Some fill their first state from what they are made with, not from groups.
        made: torch.optim.Optimizer = self._kind(groups, **self._given)
        return made

    def _take(self, gradients: RowGradients, group: dict[str, Any]) -> None:
        gradients.drop()
        gradients.set_optimizer(self._settings(group))
        gradients.waits, gradients.owner = True, self._mark

    def _options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        return {name: group[name] for name in self._options}

    def _settings(self, group: dict[str, Any]) -> Optimizer:
        return _settings(self._kind, self._options_of(group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Takes further parameters, dense or tables; raises as the constructor does for these."""
        super().add_param_group(param_group)
        try:
            for each in self.param_groups[-1]["params"]:
                self._check(each)
            if self._is_made:
                self._adopt(self.param_groups[-1:])
        except BaseException:
            del self.param_groups[-1]
            raise

    def _check(self, parameter: torch.Tensor) -> None:
        if isinstance(parameter, RowsParameter):
            _check_table(parameter)
        elif self._kind in _OWN_KINDS:
            raise ValueError(
                f"recsdk_core.optim.{self._kind.__name__} trains tables only, and got a dense "
                f"parameter {tuple(parameter.shape)}: give it `weight` of the modules alone, and "
                "the dense parameters to an optimizer of torch"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused with TypeError, as copy.deepcopy is: a copy would train no table."""
        raise TypeError(
            "RowOptimizer cannot be copied or pickled, since it trains tables of this process: "
            "make a RowOptimizer over the copy of the model, and load_state_dict the state_dict of "
            "the model, which has the state of rows, and of this one"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients; those of rows with `set_to_none=False` too: they take memory."""
        for group in self.param_groups:
            for each in _tables_of(group):
                each.drop()
        if self._dense is not None:
            self._dense.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Options of groups, state of dense parameters, and how many updates tables have had.

        The state of rows is in the model's.
        """
        made: dict[str, Any] = super().state_dict()
        if self._dense is not None and not made["state"]:
            return made  # torch's checkpoints ask for the state of all parameters, or of none
        numbers = itertools.count()
        for group in self.param_groups:
            for each in group["params"]:
                number = next(numbers)
                if isinstance(each, RowsParameter):
                    made["state"][number] = _num_updates(each.gradients)
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; load the model's too, before or after.

        A step raises RuntimeError if rows of it have had updates there and have fresh state here.
        """
        super().load_state_dict(state_dict)
        self._num_loaded = {
            each.gradients: self.state.pop(each, {}).get("num_updates", 0)
            for group in self.param_groups
            for each in group["params"]
            if isinstance(each, RowsParameter) and each.gradients is not None
        }

    # A compiler takes the tables' parameters for plain ones, and would leave their rows out.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of what has gradients; calls `closure` first, returns its result.

        Raises ValueError for an option of a table's that changed, other than lr, RuntimeError if
        another RowOptimizer has taken a table or as `load_state_dict` says, and NonFiniteError for
        a gradient that is not finite where `on_nonfinite` of its table says "raise"; then nothing
        has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        asked = [
            (each, self._check_group(each, group), group)
            for group in self.param_groups
            for each in _tables_of(group)
        ]
        tables = [each for each, _, _ in asked]
        self._check_state_came(tables)
        _raise_nonfinite(tables)
        calls = [(_table(each), each.blocks()) for each in tables if not each.is_empty]
        with held_back():  # else what is applied would be applied again
            for each, settings, group in asked:
                self._agree(each, settings, group)
            update_tables(calls)
            for each in tables:
                each.is_applied = True
            self._num_loaded = {}
            self._step_dense()
        return loss

    def _check_state_came(self, tables: Sequence[RowGradients]) -> None:
        """Raises RuntimeError if a state_dict was loaded, and that of its model was not."""
        for each in tables:
            table, number = _table(each), self._num_loaded.get(each, 0)
            if number and table.state_fields and not table.update_count:
                raise RuntimeError(
                    f"table {table.name!r}: the state_dict that its RowOptimizer has loaded is of "
                    f"one after {number} updates, and its rows have fresh state: load_state_dict "
                    "the model's too, which has theirs (dcp.load reads it if the RowOptimizer was "
                    "there when the model's was taken), or make a new RowOptimizer to begin anew"
                )

    def _agree(self, each: RowGradients, settings: Optimizer, group: dict[str, Any]) -> None:
        """Sets the rate that a group asks for, and notes that the table has what it asks for."""
        table = _table(each)
        if table.optimizer.lr != settings.lr:
            table.learning_rate = settings.lr
        options = self._options_of(group)
        if all(isinstance(value, _UNCHANGING) for value in options.values()):
            each.agreed = (options, table.optimizer)

    def _step_dense(self) -> None:
        if self._dense is None:
            return
        self._dense.state = self.state  # load_state_dict may have made another
        for own, group in zip(self._dense.param_groups, self.param_groups, strict=True):
            own.update(self._options_of(group))
        step: Any = type(self._dense).step
        if hasattr(step, "hooked"):  # hooks of all optimizers see ours already
            step = step.__wrapped__
        step(self._dense)

    def _check_group(self, each: RowGradients, group: dict[str, Any]) -> Optimizer:
        """What the group asks for; raises unless the table has it but for the learning rate."""
        table = _table(each)
        if each.owner is not self._mark:
            raise RuntimeError(
                f"table {table.name!r}: another RowOptimizer trains it since; step that one"
            )
        if each.agreed is not None:
            options, settings = each.agreed
            if id(settings) == id(table.optimizer) and options == self._options_of(group):
                return settings
        asked = self._settings(group)
        changed = _changed(table.optimizer, asked)
        if changed:
            raise ValueError(
                f"table {table.name!r}: of a group's options only lr may change once its optimizer "
                f"is made, and {changed}; a scheduler that moves betas or momentum takes "
                "cycle_momentum=False"
            )
        return asked


def _changed(had: Optimizer, asked: Optimizer) -> str:
    """What other options than lr differ, in words."""
    if type(had) is not type(asked):
        return f"{had} is now {asked}"
    names = [each.name for each in fields(asked) if each.name != "lr"]
    pairs = [(name, getattr(had, name), getattr(asked, name)) for name in names]
    return ", ".join(f"{name} {old!r} is now {new!r}" for name, old, new in pairs if old != new)


def _raise_nonfinite(tables: Sequence[RowGradients]) -> None:
    """Raises where a table would, before any is updated."""
    for each in tables:
        table = _table(each)
        if table.on_nonfinite != "raise" or each.is_empty:
            continue
        values = each.values
        num_bad = 0 if values is None else int((~torch.isfinite(values)).any(1).sum())
        if num_bad:
            raise NonFiniteError(
                f"table {table.name!r}: the gradient of {num_bad} rows is infinite or not a "
                'number; lower the learning rate, clip gradients, or set on_nonfinite="skip"'
            )


def _settings(kind: type, options: dict[str, Any]) -> Optimizer:
    if kind not in _OWN_KINDS:
        return from_torch(kind, options)
    made: Optimizer = kind(**{**options, **_plain_rate(options)})
    return made


def _plain_rate(options: dict[str, Any]) -> dict[str, float]:
    """The rate as a number: torch takes tensors of one too, which schedulers fill in place."""
    rate = options.get("lr")
    if isinstance(rate, torch.Tensor) and rate.numel() == 1:
        return {"lr": float(rate)}
    return {}


def _defaults_of(kind: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All options of an optimizer class, so that a group may set each; checks `kwargs`."""
    if isinstance(kind, _OWN_KINDS):
        name = type(kind).__name__
        raise TypeError(
            f"RowOptimizer takes a class and its arguments, got {kind}: write "
            f"RowOptimizer(params, {name}, lr={kind.lr})"
        )
    if not isinstance(kind, type):
        raise TypeError(
            f"RowOptimizer: optimizer_class must be a class of optimizers, got {kind!r}"
        )
    rate = _settings(kind, kwargs).lr
    given = inspect.signature(kind).parameters.values()
    defaults = {each.name: each.default for each in given if each.default is not each.empty}
    return {"lr": rate, **defaults, **kwargs}


def _tables_of(group: dict[str, Any]) -> list[RowGradients]:
    return [each.gradients for each in group["params"] if isinstance(each, RowsParameter)]  # type: ignore[misc]


def _dense_of(group: dict[str, Any]) -> list[torch.Tensor]:
    return [each for each in group["params"] if not isinstance(each, RowsParameter)]


def _table(gradients: RowGradients) -> Any:
    assert gradients.table is not None
    return gradients.table


def _num_updates(gradients: RowGradients | None) -> dict[str, int]:
    table = None if gradients is None else gradients.table
    return {} if table is None else {"num_updates": table.update_count}


def _check_idle(tables: Sequence[RowGradients]) -> None:
    """Raises BusyError for tables that wait for a step or a backward; drops what was applied."""
    # Tables whose gradients no step has applied come first: if they raise, nothing was dropped.
    for each in sorted(tables, key=lambda each: each.is_applied):
        each.drop_applied()
        try:
            _table(each).check_idle()
        except BusyError as error:
            raise BusyError(
                f"{error}: call step() or zero_grad() of the optimizer that it had, and drop what "
                "forwards without a backward returned"
            ) from None


def _shown(params: Any) -> str:
    return type(params).__name__


def _check_table(parameter: RowsParameter) -> None:
    if parameter.gradients is None:
        raise ValueError(
            f"table {parameter.table_name!r} is not of a HashEmbedding or HashEmbeddingBag; "
            "RowOptimizer trains these only: give it apply_optimizer_in_backward"
        )
    if parameter.gradients.is_fused:
        raise ValueError(
            f"table {parameter.table_name!r} was given an optimizer where its module is made, "
            "which updates rows in backward; leave that out, or the RowOptimizer"
        )
