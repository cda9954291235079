"""Clicks streamed from Parquet files, each rank its own row groups; a tenth of them held out.

Shapes: B examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_pipeline.data import BadLine, BadLines, ClickBatch, ParquetData, Share
from recsdk_pipeline.data.text import needing_pyarrow
from recsdk_pipeline.demo.settings import Settings

_LABEL = "label"


class ParquetClicks:
    """What training needs of `ParquetData`; every rank gets the same number of batches.

    A step's examples depend on the number of ranks. Where a rank has no more rows than another has,
    its batches are empty.
    """

    def __init__(self, data: ParquetData, bad: BadRows, *, most: int | None, seed: int) -> None:
        sizes = data.row_groups
        chosen = _first(sizes, np.random.default_rng(seed).permutation(len(sizes)).tolist(), most)
        tenth = max(1, sum(sizes[each] for each in chosen) // 10)
        held_out = _first(sizes, chosen, tenth, fewest=1)
        if len(held_out) == len(chosen):
            raise ValueError(
                f"{len(sizes)} row groups are too few to hold out a tenth; write the files with "
                "more, ten a rank say (recsdk data convert --rows-a-group)"
            )
        self._held_out = data.part(held_out)
        self._train = data.part(chosen[len(held_out) :])
        self.features, self.bad = data.features, bad
        self.num_dense = max(1, data.num_dense)
        self.num_train, self.num_held_out = self._train.num_rows, self._held_out.num_rows

    def num_steps(self, epoch: int, batch_size: int) -> int:
        """Steps of an epoch."""
        return _most_batches(self._train, epoch, batch_size)

    def train(self, *, epoch: int, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's batches of an epoch, of `batch_size` examples over all ranks."""
        return self._batches(self._train, epoch, batch_size, share)

    def held_out(self, *, batch_size: int, share: Share) -> Iterator[ClickBatch]:
        """Yield the rank's batches of what is held out."""
        return self._batches(self._held_out, 0, batch_size, share)

    def _batches(
        self, data: ParquetData, epoch: int, batch_size: int, share: Share
    ) -> Iterator[ClickBatch]:
        num_batches = _most_batches(data, epoch, batch_size)
        data.set_epoch(epoch)
        data.batch_size = _of_a_rank(batch_size, share.world_size)
        batches = iter(data)  # reading begins here
        found = (next(batches, None) for _ in range(num_batches))
        return (self._empty() if batch is None else _checked(batch) for batch in found)

    def _empty(self) -> ClickBatch:
        return ClickBatch(
            dense=torch.zeros(0, self.num_dense),
            sparse=KeyedJaggedTensor(
                keys=list(self.features),
                values=torch.zeros(0, dtype=torch.int64),
                lengths=torch.zeros(0, dtype=torch.int64),
            ),
            labels=torch.zeros(0),
        )


def parquet_clicks(settings: Settings) -> ParquetClicks:
    """Return the clicks of `--parquet`; malformed rows are counted as they are met."""
    assert settings.parquet is not None
    columns = _Columns.of(settings)
    bad = BadRows(limit=settings.max_bad_lines)
    data = ParquetData(
        settings.parquet,
        ids=columns.ids,
        dense=columns.dense,
        missing_dense=0.0,
        labels=columns.label,
        batch_size=1,
        seed=settings.seed,
        bad=bad,
    )
    return ParquetClicks(data, bad, most=settings.recipe().examples, seed=settings.seed)


class NotAClick(ValueError):
    """A label that is neither 0 nor 1."""


@dataclass(kw_only=True)
class BadRows(BadLines):
    """Counts a row once, however often it is read: in each epoch, at each evaluation."""

    seen: dict[tuple[str, int], str] = field(default_factory=dict)
    """The messages by file and row."""

    def add(self, error: BadLine) -> None:
        """Count `error` if it is a new one."""
        place = (str(error.path), error.line)
        if place not in self.seen:
            self.seen[place] = str(error)
            super().add(error)


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Which columns are what."""

    label: str
    dense: list[str]
    ids: list[str]

    @classmethod
    def of(cls, settings: Settings) -> _Columns:
        """What the options say, and the schema of the files where they say nothing."""
        try:
            from recsdk_pipeline._internal.parquet_types import holds_floats, holds_ids
            from recsdk_pipeline.data.parquet_files import find_files
        except ImportError as error:
            raise needing_pyarrow("--parquet") from error
        assert settings.parquet is not None
        schema = find_files(settings.parquet, (), None, {}).schema
        label = settings.label or _LABEL
        ids, dense = _listed(settings.ids), _listed(settings.dense)
        named = {label, *(ids or ()), *(dense or ())}
        rest = [each for each in schema if each.name not in named]
        if dense is None:
            dense = [each.name for each in rest if holds_floats(each.type)]
        if ids is None:
            ids = [each.name for each in rest if holds_ids(each.type)]
        if not ids:
            raise ValueError(f"{settings.parquet}: no column holds ids; name some with --ids")
        if label not in schema.names:
            raise ValueError(
                f"{settings.parquet}: there is no column {label!r}; name the label with --label, "
                f"one of {', '.join(schema.names)}"
            )
        return cls(label=label, dense=dense, ids=ids)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [each.strip() for each in text.split(",") if each.strip()]


def _first(
    sizes: Sequence[int], groups: Sequence[int], most: int | None, *, fewest: int = 2
) -> list[int]:
    """The first groups that have `most` rows together, `fewest` at least; None: all."""
    if most is None:
        return list(groups)
    rows, chosen = 0, list[int]()
    for group in groups:
        if rows >= most and len(chosen) >= fewest:
            break
        chosen.append(group)
        rows += sizes[group]
    return chosen


def _of_a_rank(batch_size: int, world_size: int) -> int:
    return max(1, batch_size // world_size)


def _most_batches(data: ParquetData, epoch: int, batch_size: int) -> int:
    """Batches of the rank that has the most rows."""
    rows = data.rows_of_ranks(epoch)
    return -(-max(rows) // _of_a_rank(batch_size, len(rows)))


def _checked(batch: ClickBatch) -> ClickBatch:
    """The batch, with a column of zeros if it has no dense one."""
    is_click = (batch.labels == 0) | (batch.labels == 1)
    if not is_click.all():
        wrong = batch.labels[~is_click][0].item()
        raise NotAClick(f"a label is {wrong:g}; labels are 0 or 1 (name their column with --label)")
    if not batch.dense.shape[1]:
        batch.dense = torch.zeros(len(batch), 1)
    return batch
