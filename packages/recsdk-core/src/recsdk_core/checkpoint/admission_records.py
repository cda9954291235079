"""How often keys without a row were seen: the files of a checkpoint that have these counts.

They are row files of their own, one beside each file of rows, whose "weight" is the count. Every
checkpoint has all counts, a delta too.

Shape letter: N keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsdk_core import _ext
from recsdk_core.admission import RECORDS, TERM_SETTINGS, Admit
from recsdk_core.checkpoint.manifest import RECORD_FIELDS, AdmissionEntry, Described
from recsdk_core.checkpoint.owners import Owner
from recsdk_core.checkpoint.stores import Target

if TYPE_CHECKING:
    from recsdk_core.checkpoint.model.shards import ShardCut
    from recsdk_core.checkpoint.reading import Checkpoint
    from recsdk_core.table import Table

__all__ = ["Records", "admission_entry", "read_records"]
_NAMES = ("keys", "counts", "steps", "clicks")


@dataclass(frozen=True)
class Records:
    """Keys without a row, and how often they were seen."""

    keys: NDArray[np.int64]
    """int64 (N,), distinct."""
    counts: NDArray[np.int64]
    """int64 (N,), 1 or more."""
    steps: NDArray[np.int64]
    """int64 (N,), the step that saw the key last, as the table counts."""
    clicks: NDArray[np.int64] | None = None
    """int64 (N,), 0 or more; None: the rule keeps none."""

    @staticmethod
    def of_rule(rule: Admit, parts: Sequence[NDArray[np.int64]]) -> Records:
        """What the engine says of a table with this rule: all four parts."""
        keys, counts, steps, clicks = parts
        return Records(keys, counts, steps, clicks if rule.keeps_clicks else None)

    @property
    def by_name(self) -> dict[str, NDArray[np.int64]]:
        """The parts by their names of `RECORDS`, without clicks if there are none."""
        parts = zip(RECORDS, (getattr(self, name) for name in _NAMES), strict=True)
        return {name: part for name, part in parts if part is not None}

    def select(self, is_wanted: NDArray[np.bool_] | NDArray[np.int64]) -> Records:
        """Those of a mask (N,), or with these numbers."""
        return Records(*(part[is_wanted] for part in self.by_name.values()))

    def equals(self, other: Records) -> bool:
        """Whether both are the same, in the same order."""
        return self.by_name.keys() == other.by_name.keys() and all(
            np.array_equal(part, other.by_name[name]) for name, part in self.by_name.items()
        )

    def write(self, target: Target, token: bytes, codec: Any) -> _ext.RowFileSummary:
        """Writes a file."""
        parts = list(self.by_name.values())[1:]
        fields = {
            field.name: part.reshape(-1, 1)
            for field, part in zip(RECORD_FIELDS, parts, strict=False)
        }
        kept = RECORD_FIELDS[: len(parts)]
        return _ext.write_row_file(
            target.write,
            kind="snapshot",
            dim=1,
            fields=[(field.name, field.dtype, field.width) for field in kept],
            blocks=[_ext.RowBlock.rows(self.keys, fields)] if len(self.keys) else [],
            token=token,
            codec=codec,
            name=target.name,
        )

    @staticmethod
    def joined(parts: Sequence[Records]) -> Records:
        """All of some, ascending by key; with clicks only if all have them."""
        none = np.empty(0, np.int64)
        has_clicks = bool(parts) and all(part.clicks is not None for part in parts)
        joined = Records(
            *(
                np.concatenate([none, *(getattr(part, name) for part in parts)])
                for name in (_NAMES if has_clicks else _NAMES[:3])
            )
        )
        return joined.select(np.argsort(joined.keys))


def admission_entry(table: Table, cut: _ext.Cut | ShardCut | None) -> AdmissionEntry | None:
    """What a manifest says of a table's admission, as of a cut, without files."""
    state = None if cut is None else cut.eviction
    if table.admission is None or state is None:
        return None
    rule = [
        {name: v for name in ("kind", *TERM_SETTINGS) if (v := getattr(term, name)) is not None}
        for term in table.admission.terms()
    ]
    arguments = {"rule": rule, "max_records": table.admission.max_records}
    if table.admission.max_bytes is not None:
        arguments["max_bytes"] = table.admission.max_bytes
    return AdmissionEntry(
        rule=Described(kind="Admit", arguments=arguments),
        step=state.step if state.is_begun else None,
        files=(),
    )


def read_records(checkpoint: Checkpoint, name: str, owner: Owner) -> Iterator[Records]:
    """The counts that a checkpoint has of a table's keys, those of an owner, file by file.

    The first are of no key: whoever joins all has the parts that the rule keeps, whatever comes.
    """
    index, entry = checkpoint.table(name)
    if entry.admission is None:
        return
    yield Records(*(np.empty(0, np.int64) for _ in ("keys", *entry.admission.fields)))
    for rank in range(len(entry.admission.files)):
        if not owner.may_share_keys(Owner(rank, len(entry.files), entry.sharding)):
            continue
        for block in checkpoint.record_blocks(index, rank):
            kept = [field.name for field in RECORD_FIELDS if field.name in block.fields]
            parts = (block.fields[name].reshape(-1) for name in kept)
            yield Records(block.keys, *parts).select(owner.owns(block.keys))
