"""torchrec's test models, quantized and sharded for inference, with our modules and its own.

A cell is one model, type of rows, way of sharding and number of ranks, all of which are in this
process. Vectors and predictions must be those of torchrec's unsharded quantized model.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torchrec_material
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.inference.modules import quantize_inference_model, shard_quant_model
from torchrec_cells import Model

from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingCollection

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.qint8,
    "int4": torch.quint4x2,
}
LARGEST_OFF = {"float32": 1e-5, "float16": 1e-5, "int8": 8e-3, "int4": 1e-5}
"""As parts of the largest number. torchrec keeps scale and bias of int8 rows in 16 bits, so a value
may be the next one of 256."""
TYPES = ("unsharded", "table_wise", "row_wise", "column_wise")
WORLDS = (1, 2, 3)
MODELS = (
    Model("bags", "sum", "equal"),
    Model("bags", "mean", "equal"),
    Model("bags and weighted bags", "sum", "equal"),
    Model("bags and weighted bags", "mean", "equal"),
    Model("sequences", "", "equal"),
)


@dataclass(frozen=True)
class QuantizedCell:
    """One run."""

    model: Model
    dtype: str
    sharding_type: str
    world_size: int


CELLS = tuple(
    QuantizedCell(model, dtype, sharding_type, world_size)
    for model in MODELS
    for dtype in DTYPES
    for sharding_type in TYPES
    for world_size in (WORLDS if sharding_type != "unsharded" else (1,))
)


_NO_CUDA = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver on your system",
    "No CUDA GPUs are available",
)
"""What torch says where there is no CUDA device: its builds differ."""


def outcome(side: str, cell: QuantizedCell) -> str:
    """Runs one cell; its error, "" if there is none. `side` is "ours" or "torchrec"."""
    error = torchrec_material.error_of(_run, side, cell)
    return "RuntimeError: no CUDA device" if any(text in error for text in _NO_CUDA) else error


def _run(side: str, cell: QuantizedCell) -> None:
    model, batch = _model_and_batch(cell.model)
    wanted = _answers(_quantized(model, cell), batch)
    if side == "ours":
        model, batch = _hashed(model), torchrec_material.with_ids(batch)
    made = _quantized(model, cell)
    found = _answers(made if cell.sharding_type == "unsharded" else _sharded(made, cell), batch)
    assert found.keys() == wanted.keys()
    for name, whole in wanted.items():
        torchrec_material.check_close(name, found[name], whole, LARGEST_OFF[cell.dtype])


@functools.lru_cache(maxsize=1)
def _model_and_batch(model: Model) -> tuple[Any, Any]:
    made, inputs = torchrec_material.model_and_inputs(model, 1)
    return made.eval(), inputs[0][0]


def _hashed(model: Any) -> Any:
    """Hash tables in the place of torchrec's, with its rows under ids of our own."""
    rows = {
        name.split(".")[-2]: weight.detach() for name, weight in torchrec_material.weights_of(model)
    }
    on_cpu = functools.partial(torchrec_material.hash_collection, device="cpu")
    made = torchrec_material.with_collections(model, on_cpu)
    for module in made.modules():
        if isinstance(module, HashEmbeddingBagCollection | HashEmbeddingCollection):
            for name, table in module.tables().items():
                table.upsert(torchrec_material.ids_of_rows(len(rows[name])), rows[name])
    return made


def _quantized(model: Any, cell: QuantizedCell) -> Any:
    made = copy.deepcopy(model)
    return quantize_inference_model(made, quantization_dtype=DTYPES[cell.dtype])


def _sharded(model: Any, cell: QuantizedCell) -> nn.Module:
    tables = torchrec_material.tables_of(cell.model)
    constraint = ParameterConstraints(
        sharding_types=[cell.sharding_type], compute_kernels=["quant"], min_partition=4
    )
    names = [config.name for configs in tables for config in configs or []]
    sharded, plan = shard_quant_model(
        model,
        world_size=cell.world_size,
        compute_device="cpu",
        sharding_device="cpu",
        constraints=dict.fromkeys(names, constraint),
    )
    planned = [name for module in plan.plan.values() for name in module]
    assert sorted(planned) == sorted(names), planned
    return sharded


def _answers(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Vectors by feature, and predictions."""
    with torch.no_grad():
        vectors = torchrec_material.vectors_of(model, batch)
        predictions = model(batch)
    found = {f"vectors of {name}": value.clone() for name, value in vectors.items()}
    if isinstance(predictions, tuple):
        predictions = predictions[-1]
    return found | {"predictions": predictions}
