"""What commands print tables on."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_MOST_COLUMNS = 10_000


def screen() -> Console:
    """As wide as the terminal; without one, as a table needs: rich would take 80 columns."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if has_width else _MOST_COLUMNS)
