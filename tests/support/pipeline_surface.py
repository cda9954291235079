"""What the public callables of recsdk_pipeline are called with, when one argument is odd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from odd_arguments import Surface, new_place
from recsdk_core import RecsdkError
from recsdk_pipeline import HybridEvalPipeline, HybridTrainPipelineSparseDist
from recsdk_pipeline.data import (
    BadLine,
    BadLines,
    ClickBatch,
    CriteoData,
    FileData,
    HeldOutSplit,
    IdBags,
    MovieLensData,
    ParquetData,
    Share,
    SyntheticClicks,
)
from recsdk_pipeline.telemetry import (
    JsonLines,
    OpenTelemetry,
    Prometheus,
    Report,
    Telemetry,
    TensorBoard,
)

__all__ = ["PIPELINE"]

_NUM_ROWS = 12


@functools.cache
def _parquet() -> str:
    path = new_place() + ".parquet"
    columns = {
        "user": pa.array(range(_NUM_ROWS), pa.int64()),
        "label": pa.array([0.0, 1.0] * (_NUM_ROWS // 2), pa.float32()),
        "price": pa.array([0.5] * _NUM_ROWS, pa.float32()),
    }
    pq.write_table(pa.table(columns), path, row_group_size=4)  # type: ignore[no-untyped-call]
    return path


@functools.cache
def _criteo() -> str:
    path = Path(new_place())
    path.write_text(("\t".join(["1", *["2"] * 13, *["0a"] * 26]) + "\n") * _NUM_ROWS)
    return str(path)


@functools.cache
def _movielens() -> str:
    folder = Path(new_place())
    folder.mkdir()
    (folder / "u.user").write_text("1|24|M|writer|85711\n")
    flags = "|".join(["0"] * 18 + ["1"])
    (folder / "u.item").write_text(f"7|A film|01-Jan-1995||url|{flags}\n")
    (folder / "u.data").write_text("1\t7\t4\t881250949\n" * _NUM_ROWS)
    return str(folder)


def _data(**settings: Any) -> ParquetData:
    settings = {"ids": ["user"], "labels": "label", "batch_size": 4, **settings}
    return ParquetData(_parquet(), **settings)


def _batch() -> ClickBatch:
    sparse = KeyedJaggedTensor(["user"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    return ClickBatch(dense=torch.ones(2, 1), sparse=sparse, labels=torch.ones(2))


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, batch: ClickBatch) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.linear(batch.dense)
        return output.sum(), output


def _pipeline(**settings: Any) -> HybridTrainPipelineSparseDist:
    model = _Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return HybridTrainPipelineSparseDist(model, optimizer, torch.device("cpu"), **settings)


def _eval_pipeline() -> HybridEvalPipeline:
    return HybridEvalPipeline(_Model().eval(), torch.device("cpu"))


def _telemetry() -> Telemetry:
    pipeline = _pipeline()
    return Telemetry(pipeline._model, pipeline, to=[JsonLines(new_place())])


def _bags() -> IdBags:
    return IdBags.of_lists([[1, 2], [], [3], [4]])


class _Quiet(Prometheus):
    """Pushes nothing."""

    def _push(self) -> None:
        pass


def _opened(sink: Any) -> Any:
    sink.open(None)
    return sink


def _report() -> Report:
    return Report(time=1.0, step=2, rank=None, num_ranks=1, values={"recsdk_loss": {(): 0.5}})


def _state(held: Any) -> Any:
    """What a refused call leaves: numbers of rows, positions and counts."""
    if isinstance(held, FileData):
        return held.state_dict()
    if isinstance(held, HybridTrainPipelineSparseDist):
        return held.state_dict(), [each.tolist() for each in held._model.parameters()]
    if isinstance(held, BadLines):
        return held.count, held.first
    return None


_SETTINGS_OF_READERS: dict[str, Callable[..., Any]] = {
    "batch_size": lambda: 4,
    "window_bytes": lambda: 1 << 20,
    "most": lambda: None,
    "seed": lambda: 1,
    "rank": lambda: None,
    "epoch": lambda: 1,
}

_VALUES: dict[str, Callable[..., Any]] = {
    **_SETTINGS_OF_READERS,
    "HybridTrainPipelineSparseDist.model": _Model,
    "HybridTrainPipelineSparseDist.optimizer": lambda: torch.optim.SGD(_Model().parameters()),
    "HybridEvalPipeline.model": lambda: _Model().eval(),
    "device": lambda: torch.device("cpu"),
    "dataloader_iter": lambda: iter([_batch()]),
    "HybridTrainPipelineSparseDist.load_state_dict.state_dict": lambda: _pipeline().state_dict(),
    "data.BadLines.limit": lambda: 1,
    "data.ClickBatch.dense": lambda: torch.ones(2, 1),
    "data.ClickBatch.sparse": lambda: _batch().sparse,
    "data.ClickBatch.labels": lambda: torch.ones(2),
    "data.ClickBatch.timestamps": lambda: torch.arange(2),
    "data.CriteoData.source": _criteo,
    "data.read_criteo.source": _criteo,
    "data.MovieLensData.folder": _movielens,
    "data.read_movielens.folder": _movielens,
    "data.ParquetData.source": _parquet,
    "data.ParquetData.ids": lambda: ["user"],
    "data.ParquetData.labels": lambda: "label",
    "data.ParquetData.dense": lambda: ["price"],
    "data.ParquetData.part.row_groups": lambda: [0, 1],
    "states": lambda: [_data().state_dict()],
    "state": lambda data: data.state_dict(),
    "data.HeldOutSplit.features": lambda: ("user",),
    "data.HeldOutSplit.examples": lambda: _clicks().draw(0, 12)[0],
    "data.SyntheticClicks.num_train": lambda: 10,
    "data.SyntheticClicks.num_held_out": lambda: 10,
    "data.Share.rank": lambda: 0,
    "data.Share.world_size": lambda: 2,
    "start": lambda: 0,
    "stop": lambda: 4,
    "feature": lambda: "user",
    "value": lambda: "writer",
    "share": lambda: Share(),
    "data.Share.of.examples": lambda: _clicks().draw(0, 4)[0],
    "data.IdBags.single.values": lambda: np.array([1, 2]),
    "data.IdBags.of_lengths.values": lambda: np.array([1, 2]),
    "data.IdBags.of_lengths.lengths": lambda: np.array([2, 0]),
    "bags": lambda: [[1, 2], []],
    "rows": lambda: np.array([1, 0]),
    "error": lambda: BadLine("file", 1, "user", "odd"),
    "report": _report,
    "data.category_keys.values": lambda: ["writer"],
    "telemetry.JsonLines.path": new_place,
    "telemetry.TensorBoard.folder": new_place,
    "telemetry.Prometheus.port": lambda: 0,
    "telemetry.Telemetry.model": _Model,
    "telemetry.Telemetry.pipeline": _pipeline,
    "telemetry.Telemetry.to": lambda: [JsonLines(new_place())],
}


def _clicks() -> SyntheticClicks:
    return SyntheticClicks(num_train=10, num_held_out=10)


PIPELINE = Surface(
    package="recsdk_pipeline",
    receivers={
        "HybridTrainPipelineSparseDist": _pipeline,
        "HybridEvalPipeline": _eval_pipeline,
        "data.BadLines": lambda: BadLines(limit=3),
        "data.CriteoData": lambda: CriteoData(_criteo(), batch_size=4),
        "data.ParquetData": _data,
        "data.FileData": _data,
        "data.MovieLensData": lambda: MovieLensData(_movielens(), batch_size=4),
        "data.SyntheticClicks": _clicks,
        "data.HeldOutSplit": lambda: HeldOutSplit(("user",), _clicks().draw(0, 12)[0]),
        "data.IdBags": _bags,
        "data.Examples": lambda: _clicks().draw(0, 4)[0],
        "data.Share": lambda: Share(),
        "telemetry.Telemetry": _telemetry,
        "telemetry.JsonLines.open": lambda: JsonLines(new_place()),
        "telemetry.TensorBoard.open": lambda: TensorBoard(new_place()),
        "telemetry.Prometheus.open": lambda: Prometheus(push="gateway:9091"),
        "telemetry.OpenTelemetry.open": OpenTelemetry,
        "telemetry.JsonLines": lambda: _opened(JsonLines(new_place())),
        "telemetry.TensorBoard": lambda: _opened(TensorBoard(new_place())),
        "telemetry.Prometheus": lambda: _opened(_Quiet(push="gateway:9091")),
        "telemetry.OpenTelemetry": lambda: _opened(OpenTelemetry()),
    },
    values=_VALUES,
    state=_state,
    errors=(TypeError, ValueError, RecsdkError, OSError, ImportError, IndexError),
    taken=frozenset(
        {
            "HybridTrainPipelineSparseDist.drop.dataloader_iter",
            "HybridEvalPipeline.drop.dataloader_iter",
            "data.HeldOutSplit.features",
            "telemetry.OpenTelemetry.meter",
        }
    ),
    together={
        f"data.{reader}.{name}": lambda: {"rank": 1, "world_size": 2}
        for reader in ("CriteoData", "MovieLensData", "ParquetData")
        for name in ("rank", "world_size")
    },
    called={
        **dict.fromkeys(
            ("source", "path", "folder"), "path|No such|no such|names no file|empty|odd|Parquet"
        ),
        "dataloader_iter": "the iterator must yield",
        "HybridTrainPipelineSparseDist.load_state_dict.state_dict": "state lacks",
        **dict.fromkeys(("states", "state"), "state"),
        **dict.fromkeys(("feature", "value", "values"), "surrogates not allowed"),
        **dict.fromkeys(("ids", "labels", "dense"), "there is no column|features"),
        "data.ParquetData.part.row_groups": "row group",
        **dict.fromkeys(("start", "stop"), "Maximum allowed size"),
        "data.Share.world_size": "ranks",
        "most": "examples are too few",
    },
    left_out={
        r"data\.IdBags\.of_lists\(bags=number\)": "numbers within",
        r".*=nested tensor\)": "a sequence of none: torch raises when its items are asked for",
        r"data\.ClickBatch\..*": "torch checks",
        r"data\.BadLines\((count|first)=.*": "results",
        r"data\.FileData": "made by those who inherit it",
    },
)
