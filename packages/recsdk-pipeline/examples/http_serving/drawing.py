"""What happened, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from train_and_serve import Record


def draw(record: Record, path: Path) -> None:
    """Draw the AUC of each model, how many steps the server is behind, and how long deltas took."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    auc, behind, seconds = figure.subplots(1, 3)
    for name, curve in record.aucs().items():
        auc.plot(*np.array(curve).T, label=name, linestyle="--" if name == "served" else "-")
    auc.set(title="AUC on batches before they are trained on", xlabel="step", ylabel="AUC")
    auc.legend(fontsize="small")
    times, steps = np.array(record.trained).T
    served = np.array(record.served)
    places = np.searchsorted(served[:, 0], times, side="right") - 1
    is_known = places >= 0
    lag = steps[is_known] - served[places[is_known], 1]
    behind.plot(times[is_known], lag, drawstyle="steps-post")
    behind.set(title="Freshness of the server", xlabel="seconds", ylabel="steps behind the trainer")
    behind.set_ylim(bottom=0)
    seconds.plot(*np.array(record.seconds_to_serve()).T, marker=".")
    seconds.set(title="From saved to served", xlabel="step of the delta", ylabel="seconds")
    seconds.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)
