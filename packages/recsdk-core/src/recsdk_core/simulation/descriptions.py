"""What `recsdk data describe --json` writes, as those read it who have no data at hand."""

from __future__ import annotations

import json
from typing import Any

from recsdk_core.checkpoint._fields import Fields
from recsdk_core.errors import CheckpointError
from recsdk_core.files import file_to_read

__all__ = ["DESCRIPTION_FORMAT", "read_description"]

DESCRIPTION_FORMAT = "recsdk.data.describe/1"
"""The `format` that `recsdk data describe --json` writes."""

_MOST_COLUMNS = 1 << 20
_MOST = 1 << 53
"""Of rows and ids: a float holds as many."""


def read_description(path: str) -> dict[str, Any]:
    """Return what `recsdk data describe --json` wrote to the file `path`.

    Its `rows` and `columns` are there, and of a column with ids `num_ids`, `num_distinct` and
    `zipf`. Raises FileNotFoundError, or ValueError for a file of another kind, or that was changed
    so that these are missing or can be no such numbers.
    """
    try:
        described = json.loads(file_to_read(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: is no JSON, which recsdk data describe --json writes: {error}"
        ) from error
    if not isinstance(described, dict) or described.get("format") != DESCRIPTION_FORMAT:
        raise ValueError(
            f"{path}: is not of the format {DESCRIPTION_FORMAT}, which recsdk data describe writes"
        )
    try:
        _check(Fields(described, path))
    except CheckpointError as error:
        raise ValueError(f"{error}; describe the data again") from error
    return described


def _check(described: Fields) -> None:
    described.integer("rows", 0, _MOST)
    for column in described.children("columns", 0, _MOST_COLUMNS):
        column.text("name")
        if column.take("ids") is not None:
            _check_ids(column.child("ids"))


def _check_ids(ids: Fields) -> None:
    num_ids = ids.integer("num_ids", 0, _MOST)
    ids.integer("num_distinct", min(num_ids, 1), _MOST)
    if ids.take("zipf") is not None:
        ids.child("zipf").real("exponent", 0, _MOST)
