"""What `recsdk demo` was asked to do, and what suits each kind of data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Training that suits one kind of data."""

    epochs: int
    examples: int | None
    """Examples to train on in an epoch; for files, examples to read. None: all."""
    batch_size: int
    """Examples a step, over all ranks."""
    learning_rate: float
    """Learning rate of the rows, by Adagrad."""
    weight_decay: float
    """Weight decay of the rows that a step touches."""
    dense_learning_rate: float = 1e-3
    """Learning rate of the dense layers, by Adam."""


RECIPES = {
    "synthetic": Recipe(
        epochs=1, examples=2_000_000, batch_size=2048, learning_rate=0.1, weight_decay=0.0
    ),
    "movielens": Recipe(
        epochs=5, examples=None, batch_size=512, learning_rate=0.05, weight_decay=1e-4
    ),
    "criteo": Recipe(
        epochs=1, examples=1_000_000, batch_size=2048, learning_rate=0.05, weight_decay=0.0
    ),
    "parquet": Recipe(
        epochs=1, examples=1_000_000, batch_size=2048, learning_rate=0.05, weight_decay=0.0
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `recsdk demo`; None: what the recipe of the data says."""

    world_size: int = 2
    seed: int = 0
    output: str = "build/demo"
    movielens: str | None = None
    criteo: str | None = None
    parquet: str | None = None
    label: str | None = None
    ids: str | None = None
    dense: str | None = None
    max_bad_lines: int = 0
    epochs: int | None = None
    examples: int | None = None
    batch_size: int | None = None
    started_at: float = 0.0
    """Seconds since the epoch at which the command was given."""

    @property
    def kind(self) -> str:
        """Which recipe applies."""
        if self.movielens is not None:
            return "movielens"
        if self.parquet is not None:
            return "parquet"
        return "synthetic" if self.criteo is None else "criteo"

    def recipe(self) -> Recipe:
        """Return the recipe, with the options in place of its defaults."""
        chosen = {k: getattr(self, k) for k in ("epochs", "examples", "batch_size")}
        given: dict[str, Any] = {k: v for k, v in chosen.items() if v is not None}
        return Recipe(**{**asdict(RECIPES[self.kind]), **given})

    def to_json(self) -> str:
        """Return the settings as text that `of_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        return Settings(**json.loads(text))
