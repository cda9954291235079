"""The batch that the demo's model reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from recsdk_pipeline._internal.sending import Sent, received, sent


@dataclass
class ClickBatch(Pipelineable):  # type: ignore[misc]
    """B examples: what was shown to whom, and whether it was clicked."""

    dense: torch.Tensor
    """(B, C) float32."""

    sparse: KeyedJaggedTensor
    """One bag of raw int64 ids per feature and example; bags may be empty."""

    labels: torch.Tensor
    """(B,) float32, 1 for a click and 0 for none; of several label columns (B, L)."""

    timestamps: torch.Tensor | None = None
    """int64, one beside each of `sparse.values()`, 0 where a feature has none; or None."""

    def __post_init__(self) -> None:
        """Raise TypeError for what is no tensor, and ids that are no KeyedJaggedTensor."""
        if not isinstance(self.sparse, KeyedJaggedTensor):
            raise TypeError(
                f"sparse must be a KeyedJaggedTensor, got {type(self.sparse).__name__}; "
                "Examples(...).batch() makes one of IdBags"
            )
        for name in ("dense", "labels", "timestamps"):
            given = getattr(self, name)
            if not isinstance(given, torch.Tensor) and not (name == "timestamps" and given is None):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")

    @property
    def dense_features(self) -> torch.Tensor:
        """`dense`, as torchrec's models that read a whole batch call it (DLRMTrain)."""
        return self.dense

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """`sparse`, likewise."""
        return self.sparse

    def __len__(self) -> int:
        """Number of examples B; 0 is legal."""
        return len(self.labels)

    def to(self, device: torch.device, non_blocking: bool = False) -> ClickBatch:
        """Return the batch on `device`."""
        return ClickBatch(
            dense=self.dense.to(device=device, non_blocking=non_blocking),
            sparse=self.sparse.to(device=device, non_blocking=non_blocking),
            labels=self.labels.to(device=device, non_blocking=non_blocking),
            timestamps=None
            if self.timestamps is None
            else self.timestamps.to(device=device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> ClickBatch:
        """Return the batch in page-locked memory, from which devices copy fastest."""
        return ClickBatch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            labels=self.labels.pin_memory(),
            timestamps=None if self.timestamps is None else self.timestamps.pin_memory(),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the device's allocator that `stream` reads this batch."""
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        if self.timestamps is not None:
            self.timestamps.record_stream(stream)


_FIELDS = {field.name for field in fields(ClickBatch)}


def _reduced(batch: ClickBatch) -> Any:
    """What is sent of it to another process, as pickle has it."""
    if get_worker_info() is not None and _is_as_declared(batch):
        found = sent(batch.sparse, [batch.dense, batch.labels, batch.timestamps])
        if found is not None:
            return _received, tuple(found)
    return batch.__reduce_ex__(2)


def _is_as_declared(batch: ClickBatch) -> bool:
    """Whether nothing of it was left out, or set beside its fields, such as `click_labels`."""
    is_whole = batch.dense is not None and batch.labels is not None
    return is_whole and vars(batch).keys() == _FIELDS


def _received(*parts: Any) -> ClickBatch:
    sparse, (dense, labels, timestamps) = received(Sent(*parts))
    assert dense is not None
    assert labels is not None
    return ClickBatch(dense=dense, sparse=sparse, labels=labels, timestamps=timestamps)


ForkingPickler.register(ClickBatch, _reduced)
