"""Reports for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recsdk_core.files import local_path
from recsdk_pipeline.telemetry.metrics import Labels, Report, metric_of
from recsdk_pipeline.telemetry.sink import check_report, needing, rank_of

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes scalars for TensorBoard, by step: `recsdk_table_rows/user`.

    A counter is written as its growth a step since the report before: `recsdk_step_seconds/forward`
    is how long forward takes. So the first report has none: a run that goes on from a checkpoint
    does not begin at step 0. With ranks="each", rank r writes into the folder's `rank_<r>`. Needs
    tensorboard, or raises ImportError.
    """

    def __init__(self, folder: Any) -> None:
        """`folder`: local; it is made if it is not there."""
        try:
            from tensorboard.compat.proto.summary_pb2 import Summary
            from torch.utils.tensorboard import FileWriter
        except ImportError as error:
            raise needing("TensorBoard", "tensorboard", "tensorboard") from error
        self._make, self._summary = FileWriter, Summary
        self._folder = Path(local_path(folder))
        self._writer: Any = None
        self._last: dict[tuple[str, Labels], float] = {}
        self._step: int | None = None

    def open(self, rank: int | None) -> None:
        """Opens the file of events. Raises OSError."""
        number = rank_of(rank)
        folder = self._folder if number is None else self._folder / f"rank_{number}"
        self._writer = self._make(str(folder))

    def write(self, report: Report) -> None:
        """Writes the scalars of a report, in one event: by one each they take ten times as long."""
        check_report("TensorBoard", report, is_open=self._writer is not None)
        scalars: list[Any] = []
        steps = 1 if self._step is None else max(1, report.step - self._step)
        for name, values in report.values.items():
            is_counter = metric_of(name).kind == "counter"
            for labels, number in values.items():
                shown = number
                if is_counter:
                    shown = (number - self._last.get((name, labels), 0.0)) / steps
                    self._last[name, labels] = number
                    if self._step is None:
                        continue
                tag = "/".join((name.removesuffix("_total"), *labels))
                scalars.append(self._summary.Value(tag=tag, simple_value=shown))
        self._step = report.step
        self._writer.add_summary(self._summary(value=scalars), report.step, report.time)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file of events."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
