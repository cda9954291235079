"""What the user sees: a progress bar, a table at the end, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

_FILE = "summary.json"
PICTURES = ("loss_and_auc.png", "tables.png", "time.png")
"""What is drawn beside it."""
_UNDEFINED = "undefined: held-out labels are all equal"


@dataclass(frozen=True, kw_only=True)
class State:
    """How far the training is."""

    steps: int
    loss: float
    """Mean over the examples of all ranks since the last report."""
    auc: float | None
    """AUC on some of the held-out examples; None: undefined."""
    examples_per_second: float
    """Over all ranks, while training."""
    rows: Mapping[str, int]

    def figures(self) -> str:
        """Return loss, AUC and speed as text."""
        auc = "undefined" if self.auc is None else f"{self.auc:.4f}"
        return f"loss {self.loss:.4f}  AUC {auc}  {self.examples_per_second:,.0f} ex/s"

    def row_counts(self) -> str:
        """Return the rows of each table as text."""
        return "rows: " + "  ".join(f"{name} {count:,}" for name, count in self.rows.items())


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome; the fields of summary.json."""

    auc: float | None
    """AUC of the model on all held-out examples; None: undefined, since their labels are all
    equal."""
    auc_generator: float | None
    """AUC of the probabilities by which the synthetic labels were drawn."""
    auc_without_ids: float | None
    """AUC of the same model with every id replaced by one constant."""
    examples_per_second: float
    """Over all ranks, while training."""
    stall_share: float
    """Part of the training that went into waiting for data, 0 to 1; mean over ranks."""
    rows: Mapping[str, int]
    """Rows of each table over all ranks."""
    world_size: int
    steps: int
    """Batches trained."""
    bad_lines: int
    """Malformed lines skipped."""
    first_bad_line: str | None
    """File, line and column of the first of them, and what is wrong."""
    seconds: float
    """From the command to the end of the evaluation, imports included."""

    def gap_closed(self) -> float | None:
        """How far the ids bring the model from auc_without_ids (0) to auc_generator (1)."""
        if self.auc is None or self.auc_generator is None or self.auc_without_ids is None:
            return None
        return (self.auc - self.auc_without_ids) / (self.auc_generator - self.auc_without_ids)

    def write(self, folder: Path) -> Path:
        """Write summary.json into `folder`; it is complete or not there."""
        path = folder / _FILE
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        part.replace(path)
        return path


def prepare_folder(folder: Path) -> None:
    """Make `folder`, and remove old results from it; raise OSError if it takes no new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE
    for name in (_FILE, *PICTURES):
        (folder / name).unlink(missing_ok=True)
    part = path.with_suffix(".part")
    part.touch()
    part.unlink(missing_ok=True)


class Screen:
    """The terminal of the first rank; other ranks print nothing."""

    def __init__(self, *, num_steps: int, is_shown: bool) -> None:
        self._console = Console(quiet=not is_shown, highlight=False)
        self._progress = Progress(
            BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}")
        )
        self._task = self._progress.add_task("starting", total=num_steps)
        self._live = Live(self._progress, console=self._console)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def advance(self, steps: int) -> None:
        """Move the bar to `steps`."""
        self._progress.update(self._task, completed=steps)

    def show(self, state: State) -> None:
        """Show the state beside and below the bar; off a terminal, as a line of its own."""
        self._progress.update(self._task, completed=state.steps, description=state.figures())
        self._live.update(Group(self._progress, Text(state.row_counts())))
        if not self._console.is_terminal:
            line = f"step {state.steps}: {state.figures()}  {state.row_counts()}"
            self._console.print(line, soft_wrap=True)

    def show_summary(self, summary: Summary) -> None:
        """Print the closing table."""
        table = Table(title="recsdk demo", show_header=False)
        for name, value in _lines(summary):
            table.add_row(name, _printable(value))
        self._console.print(table)

    def show_path(self, path: Path) -> None:
        """Say where something was written."""
        self.say(f"written to {path}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(Text(_printable(text)), soft_wrap=True)


def _printable(text: str) -> str:
    """The text; bytes of file names that are no UTF-8 are escaped as in Python."""
    return text.encode(errors="backslashreplace").decode()


def _lines(summary: Summary) -> list[tuple[str, str]]:
    gap_closed = summary.gap_closed()
    auc = _UNDEFINED if summary.auc is None else f"{summary.auc:.4f}"
    lines = [("AUC on held-out examples", auc)]
    if gap_closed is not None:
        lines += [
            ("AUC of the same model without ids", f"{summary.auc_without_ids:.4f}"),
            ("AUC of the generator's own probabilities", f"{summary.auc_generator:.4f}"),
            ("part of that gap closed", f"{gap_closed:.0%}"),
        ]
    lines += [
        ("examples per second", f"{summary.examples_per_second:,.0f}"),
        ("waiting for data", f"{summary.stall_share:.1%}"),
        ("ranks", str(summary.world_size)),
        ("steps", f"{summary.steps:,}"),
        ("malformed lines skipped", f"{summary.bad_lines:,}"),
        *(
            [("the first of them", escape(summary.first_bad_line))]
            if summary.first_bad_line
            else []
        ),
        ("seconds, imports included", f"{summary.seconds:.1f}"),
    ]
    return lines + [(f"rows of {name}", f"{count:,}") for name, count in summary.rows.items()]
