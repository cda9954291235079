"""Adapts torchrec's pipelines to devices other than cuda and mtia.

They make streams for cuda and mtia only, and enter any other device's streams as those of cuda.
Without a stream `TrainPipelineSemiSync` and `TrainPipelineFusedSparseDist` ask cuda for its current
one, so in a torch without cuda they raise in the model's forward, whatever the modules. So
importing the package gives them the streams of an npu, and on a cpu no streams to wait for.

Their thread that loads batches (`EvalPipelineSparseDist` has one) works on its own current device,
which is the first one, if it is given a device without an index; on cuda it raises there, and the
pipeline waits for ever. It is given the current device of the thread that makes it.

`attach` after `detach` sends the ids of the next batch anew, which torchrec's own tables do not
mind. Hash tables would map it again, as a further step, so what is under way stays. Likewise
`SparseDataDistUtil`, `EvalPipelineSparseDist` and torchrec 1.6's `PrefetchTrainPipelineSparseDist`
send the first batch twice, and a step that is tried again after its iterator raised sends the next
one.

`TrainPipelineSemiSync` runs the backward of each collection by itself, which torch refuses for one
whose tables are all frozen. Such collections are left out.

With `free_features_storage_early` torchrec's modules free a batch's ids once all modules have begun
with it. Hash tables that have the same batch read it later, so it is then left to Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import compress
from typing import Any

import torch
from torchrec.distributed.train_pipeline import pipeline_stage, train_pipelines, utils
from torchrec.distributed.train_pipeline.pipeline_stage import SparseDataDistUtil
from torchrec.distributed.train_pipeline.postproc import PipelinedPostproc
from torchrec.distributed.train_pipeline.runtime_forwards import EmbeddingPipelinedForward
from torchrec.distributed.train_pipeline.train_pipelines import (
    StagedTrainPipeline,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.utils import DataLoadingThread
from torchrec.sparse.jagged_tensor import KeyedTensor

from recsdk_sharding._batch.awaitables import StartedInputs
from recsdk_sharding._compat.private import PIPELINE_STREAMS
from recsdk_sharding._modules.feature_processed import (
    ShardedHashFeatureProcessedEmbeddingBagCollection,
)
from recsdk_sharding._modules.sharded_tables import ShardedTables

__all__ = ["adapt_pipelines"]

_DEVICE = "npu"
_sends_again: ContextVar[Callable[[], bool]] = ContextVar("_sends_again", default=lambda: False)
"""Whether what sends a batch now sends it once more at once."""


def adapt_pipelines() -> None:
    """Adapts torchrec's pipelines; a second call changes nothing that matters."""
    for kind, names in PIPELINE_STREAMS.items():
        kind.__init__ = _with_streams(kind.__init__, names)  # type: ignore[misc]
    EmbeddingPipelinedForward.__init__ = _on_the_modules_device(EmbeddingPipelinedForward.__init__)
    DataLoadingThread.__init__ = _with_an_index(DataLoadingThread.__init__)
    KeyedTensor.record_stream = _of_devices_only(KeyedTensor.record_stream)
    TrainPipelineSparseDist.attach = _sending_nothing_again(TrainPipelineSparseDist.attach)
    TrainPipelineSemiSync.embedding_backward = _of_trained(TrainPipelineSemiSync.embedding_backward)
    for name in ("_wait_for_events", "_start_embedding_lookup"):
        function = getattr(train_pipelines, name)
        setattr(train_pipelines, name, _with_streams_of_devices_only(function))
    SparseDataDistUtil.start_sparse_data_dist = _sending_after(
        SparseDataDistUtil.start_sparse_data_dist, lambda util, batch: not util.initialized
    )
    TrainPipelineSparseDist._init_pipelined_modules = _sending_after(
        TrainPipelineSparseDist._init_pipelined_modules,
        lambda pipeline, batch, context, pipelined_forward=None: context.version == 0,
    )
    for module in (pipeline_stage, train_pipelines):
        module._start_data_dist = _sending_once(module._start_data_dist)
    clear = getattr(utils, "_clear_releasable_inputs", None)
    if clear is not None:  # older releases free nothing early
        utils._clear_releasable_inputs = _unless_hash_tables_read(clear)


def _with_streams(construct: Callable[..., None], names: tuple[str, ...]) -> Callable[..., None]:
    @functools.wraps(construct)
    def adapted(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        device = _device_of(self)
        if device is None or device.type != _DEVICE:
            return
        module = torch.get_device_module(device)
        self._stream_context = module.stream
        for name in names:
            if getattr(self, name) is None:
                setattr(self, name, module.Stream(device=device))

    return adapted


def _device_of(pipeline: Any) -> torch.device | None:
    """The device of a pipeline, or of a part of one."""
    if isinstance(pipeline, StagedTrainPipeline):
        found: torch.device | None = pipeline._compute_stream.device
    elif isinstance(pipeline, PipelinedPostproc):
        found = None if pipeline._dist_stream is None else pipeline._dist_stream.device
    else:
        found = pipeline._device
    return found


def _on_the_modules_device(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def adapted(
        self: Any, name: str, args: Any, module: Any, context: Any, stream: Any = None
    ) -> None:
        if type(self) is EmbeddingPipelinedForward:
            _check_semi_sync(name, module)
        construct(self, name, args, module, context, stream)
        device = getattr(module, "_device", None)
        if stream is None and device is not None and device.type == "cpu":
            self._device = device

    return adapted


def _with_an_index(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def adapted(self: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        if device.type != "cpu" and device.index is None:
            index = torch.get_device_module(device).current_device()
            device = torch.device(device.type, index)
        construct(self, device, *args, **kwargs)

    return adapted


def _check_semi_sync(name: str, module: Any) -> None:
    """Raises ValueError for processors that each rank would train by its own gradients alone.

    The pipeline runs tables' backward after the model's, when DistributedDataParallel is done.
    """
    if not isinstance(module, ShardedHashFeatureProcessedEmbeddingBagCollection):
        return
    parameters = module.processor_parameters()
    if module.host_exchange.world_size > 1 and any(p.requires_grad for p in parameters):
        raise ValueError(
            f"TrainPipelineSemiSync would train the feature processors of {name!r} on each rank by "
            "its own batch alone, so that they drift apart; use TrainPipelineSparseDist, or freeze "
            "the processors with requires_grad_(False)"
        )


def _of_trained(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def adapted(self: Any, context: Any) -> None:
        names = ("embedding_tensors", "embedding_features", "detached_embedding_tensors")
        for of_module in zip(*(getattr(context, name) for name in names), strict=True):
            is_trained = [tensor.requires_grad for tensor in of_module[0]]
            for each in of_module:
                each[:] = list(compress(each, is_trained))
        backward(self, context)

    return adapted


def _of_devices_only(record_stream: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(record_stream)
    def adapted(self: Any, stream: Any) -> None:
        if self.values().device.type != "cpu":  # torch raises for memory of the host
            record_stream(self, stream)

    return adapted


def _sending_nothing_again(attach: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(attach)
    def adapted(self: Any, model: Any = None, sparse_dist: bool = True) -> None:
        tables = _hash_tables(self._model)
        if not self.contexts or not tables:
            attach(self, model, sparse_dist)
            return
        if model is not None and _hash_tables(model) != tables:
            raise ValueError(
                "attach: batches in flight have rows of the tables of another model; call reset() "
                "of the pipeline first, which drops them"
            )
        self.start_sparse_data_dist = lambda *_: None
        try:
            attach(self, model, sparse_dist)
        finally:
            del self.start_sparse_data_dist

    return adapted


def _with_streams_of_devices_only(function: Callable[..., None]) -> Callable[..., None]:
    """On the cpu there is a stream too, but no tensor takes it."""

    def of_device(given: Any) -> Any:
        return None if isinstance(given, torch.cpu.Stream) else given

    @functools.wraps(function)
    def adapted(*args: Any, **kwargs: Any) -> None:
        function(*map(of_device, args), **{name: of_device(kwargs[name]) for name in kwargs})

    return adapted


def _sending_after(
    start: Callable[..., Any], sends_again: Callable[..., bool]
) -> Callable[..., Any]:
    """A method that sends a batch; where `sends_again` is true of its arguments, once more."""

    @functools.wraps(start)
    def adapted(*args: Any, **kwargs: Any) -> Any:
        token = _sends_again.set(lambda: sends_again(*args, **kwargs))
        try:
            return start(*args, **kwargs)
        finally:
            _sends_again.reset(token)

    return adapted


def _sending_once(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def adapted(pipelined_modules: Sequence[torch.nn.Module], batch: Any, context: Any) -> None:
        sends_again = _sends_again.get()()
        left = [
            each
            for each in pipelined_modules
            if not ((sends_again or _is_sent(each, context)) and _hash_tables(each))
        ]
        start(left, batch, context)

    return adapted


def _is_sent(module: Any, context: Any) -> bool:
    """Whether a module's part of a batch is under way; contexts of version 0 serve all batches."""
    return context.version != 0 and module.forward.name in context.module_contexts


def _unless_hash_tables_read(clear: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(clear)
    def adapted(context: Any) -> None:
        started = context.input_dist_splits_requests.values()
        if not any(isinstance(each, StartedInputs) for each in started):
            clear(context)

    return adapted


def _hash_tables(model: torch.nn.Module) -> set[int]:
    """Which sharded collections of hash tables a model has."""
    return {id(each) for each in model.modules() if isinstance(each, ShardedTables)}
