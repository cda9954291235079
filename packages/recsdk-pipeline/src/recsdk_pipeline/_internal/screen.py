"""What commands print tables on."""

from __future__ import annotations

import os
import sys
from io import StringIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn

_MOST_COLUMNS = 10_000


def screen() -> Console:
    """As wide as the terminal; without one, as a table needs: rich would take 80 columns."""
    if sys.stdout is None:  # it was closed: a Console would look for it
        return Console(quiet=True, file=StringIO())
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if has_width else _MOST_COLUMNS)


def progress(*columns: ProgressColumn) -> Progress:
    """A bar on a terminal's standard error; nothing elsewhere, where rich would print a line."""
    is_shown = sys.stderr is not None and sys.stderr.isatty()
    console = Console(stderr=True) if is_shown else Console(quiet=True, file=StringIO())
    return Progress(*columns, console=console, transient=True, disable=not is_shown)
