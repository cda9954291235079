"""The cells in which torchrec's own test models run with our modules and with torchrec's.

A cell is one model, way of sharding, kind of batch, codec and number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

POOLED_TYPES = (
    "row_wise",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
SEQUENCE_TYPES = ("row_wise", "table_wise", "column_wise", "data_parallel")
WORLDS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 5}
"""Ranks, and how many of them are on a node."""
CODECS = ("", "FP16", "BF16", "INT8")


@dataclass(frozen=True)
class Model:
    """One of torchrec's test models and the batches it trains on."""

    kind: str
    """"bags" or "bags and weighted bags" (its TestSparseNN), or "sequences" (its
    TestMixedEmbeddingSparseArch, of sequences only)."""
    pooling: str
    """"sum", "mean", or "" for sequences. Weighted bags are always summed."""
    batches: str
    """"equal", "per rank" (every rank has another size) or "per feature" (VBE)."""

    @property
    def is_sequence(self) -> bool:
        return self.kind == "sequences"

    @property
    def sharding_types(self) -> tuple[str, ...]:
        return SEQUENCE_TYPES if self.is_sequence else POOLED_TYPES


@dataclass(frozen=True)
class Cell:
    """One run."""

    model: Model
    sharding_type: str
    codec: str
    """How vectors and gradients travel; "" as float32."""
    world_size: int


MODELS = (
    *(
        Model(*each)
        for each in product(
            ("bags", "bags and weighted bags"),
            ("sum", "mean"),
            ("equal", "per rank", "per feature"),
        )
    ),
    # torchrec's model of sequences has no place for fewer ids than samples
    *(Model("sequences", "", batches) for batches in ("equal", "per feature")),
)

CELLS = tuple(
    Cell(model, sharding_type, codec, world_size)
    for world_size in WORLDS
    for model in MODELS
    for sharding_type in model.sharding_types
    for codec in CODECS
)
