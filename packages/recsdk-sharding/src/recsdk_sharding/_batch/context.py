"""What the output dist of a batch needs to know of its input dist."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext

from recsdk_sharding._batch.assembly import Assembly
from recsdk_sharding._batch.features import Features
from recsdk_sharding._batch.in_place import BagsOfAllRanks
from recsdk_sharding._batch.late_weights import LateWeights

__all__ = ["HashShardingContext"]


@dataclass
class HashShardingContext(EmbeddingShardingContext):  # type: ignore[misc]
    """One batch of one sharding group; filled when its host work is done."""

    assembly: Assembly | None = None
    """How this rank's results are made of what ranks send."""
    features: Features | None = None
    """This rank's batch."""
    num_values_sent: list[int] = field(default_factory=list)
    """Numbers that this rank sends to each rank."""
    own_weights: torch.Tensor | None = None
    """The weights of the batch's ids as they were given, with their autograd graph."""
    late_weights: LateWeights | None = None
    """How weights travel when the batch is looked up; None: they came with the ids, if any."""
    outcomes: list[torch.Tensor] | None = None
    """What became of the ids of each of the group's features, uint8 (N,), if it was wanted."""
    in_place: BagsOfAllRanks | None = None
    """What makes all ranks' gradients, if results are pooled at once on several ranks."""
    step: int | None = None
    """The step of the batch."""
    copied: torch.Event | None = None
    """Where the batch's copies to the device end, in the stream that they are on; None: on the cpu.

    torchrec's pipelines may look a batch up on another stream, without a wait between the two."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the device's memory until the stream has done what is queued by then."""
        if self.assembly is not None:
            self.assembly.record_stream(stream)
        if self.late_weights is not None:
            self.late_weights.record_stream(stream)
