"""Averages rows for `torch.optim.swa_utils.AveragedModel`, which knows parameters only.

Its copy of a model has tables of its own, and a table's parameter has no numbers. So this module
replaces `AveragedModel.update_parameters` by a method that does the same and also averages the rows
of plain modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

from recsdk_core.nn.rows_parameter import RowsParameter, answering
from recsdk_core.outcome import Default, Outcome
from recsdk_core.table import Table

__all__: list[str] = []


def _tables_of(model: nn.Module) -> list[Table]:
    """The tables of a model's plain modules; raises RuntimeError for others that are trained."""
    found = []
    for each in model.parameters():
        if not isinstance(each, RowsParameter):
            continue
        if each.gradients is not None and each.gradients.table is not None:
            found.append(each.gradients.table)
        elif each.requires_grad:
            raise RuntimeError(
                f"table {each.table_name!r}: AveragedModel averages rows of HashEmbedding and "
                "HashEmbeddingBag, not of collections; leave the collection out of the model that "
                "it averages, or freeze it with requires_grad_(False)"
            )
    return found


def _average_tables(averaged: AveragedModel, mine: list[Table], theirs: list[Table]) -> None:
    number = averaged.n_averaged.clone().cpu()
    for own, trained in zip(mine, theirs, strict=True):
        _refuse_shared(own)
        # Then all keys of the other find room and none leaves, and the rule has no time yet.
        _forget(own, trained)
        is_timed = own.eviction is not None and own.eviction.by == "time"
        times = 0 if is_timed else None
        for batch in trained.export(state=False):
            keys, rows = torch.from_numpy(batch.keys), torch.from_numpy(batch.weights)
            # An unseen key gets its first row: so far the average of a row that was not trained.
            _insert_first_rows(own, keys, times)
            own_rows = own.lookup(keys)
            own.upsert(keys, _averaged(averaged, own_rows, rows, number), times=times)


def _refuse_shared(own: Table) -> None:
    if own.default.kind == "shared_rows":
        raise ValueError(
            f"table {own.name!r}: rows that keys without one share are not averaged; take another "
            "default in models that an AveragedModel averages"
        )


def _insert_first_rows(own: Table, keys: torch.Tensor, times: int | None) -> None:
    """Gives keys without a row the one that they begin with, also where a rule keeps keys out."""
    if own.admission is None:
        needs_clicks = own.eviction is not None and own.eviction.needs_clicks
        own.map(keys, insert=True, times=times, clicks=0 if needs_clicks else None)
        return
    _, outcomes = own.lookup(keys, return_outcomes=True)
    unseen = keys[outcomes == int(Outcome.MISSING)]
    if len(unseen):
        maker = own.empty_copy(
            max_rows=None,
            eviction_groups=None,
            owned_groups=None,
            eviction=None,
            admission=None,
            default=Default.zeros(),
        )
        own.upsert(unseen, maker.find_or_insert(unseen), times=times)


def _forget(own: Table, trained: Table) -> None:
    """Takes out the keys that the trained table no longer has."""
    for batch in own.export(state=False):
        keys = torch.from_numpy(batch.keys)
        _, outcomes = trained.lookup(keys, return_outcomes=True)
        own.erase(keys[outcomes == int(Outcome.MISSING)])


def _averaged(
    averaged: AveragedModel, own: torch.Tensor, rows: torch.Tensor, number: torch.Tensor
) -> torch.Tensor:
    """What the model's functions make of its own rows and the trained ones."""
    if number == 0:
        return rows
    if averaged.multi_avg_fn is None and averaged.avg_fn is not None:
        made: torch.Tensor = averaged.avg_fn(own, rows, number)
        return made.float().contiguous()
    average: Any = averaged.multi_avg_fn or get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
    average([own], [rows], number)
    return own


def _with_rows(update: Callable[[Any, nn.Module], None]) -> Callable[[Any, nn.Module], None]:
    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        mine, theirs = _tables_of(self.module), _tables_of(model)
        with torch.no_grad():
            _average_tables(self, mine, theirs)
        with answering():
            update(self, model)

    return update_parameters


AveragedModel.update_parameters = _with_rows(AveragedModel.update_parameters)  # type: ignore[method-assign, assignment]
