"""What `recsdk data describe --json` writes, as those read it who have no data at hand."""

from __future__ import annotations

import json
from typing import Any

from recsdk_core.files import file_to_read

__all__ = ["DESCRIPTION_FORMAT", "read_description"]

DESCRIPTION_FORMAT = "recsdk.data.describe/1"
"""Its `format`."""


def read_description(path: str) -> dict[str, Any]:
    """Return what `recsdk data describe --json` wrote to the file `path`.

    Raises FileNotFoundError, or ValueError for a file of another kind.
    """
    try:
        described = json.loads(file_to_read(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(described, dict) or described.get("format") != DESCRIPTION_FORMAT:
        raise ValueError(
            f"{path}: is not of the format {DESCRIPTION_FORMAT}, which recsdk data describe writes"
        )
    return described
