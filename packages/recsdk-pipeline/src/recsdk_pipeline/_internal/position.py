"""How far training has come, for a checkpoint: batches trained, and the data's own position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from recsdk_pipeline._internal.plain_state import from_plain, to_plain

__all__ = ["Progress"]

_STATE = "data.state_dict()"


class Progress:
    """Counts trained batches, and keeps the position that the data had after the last of them.

    A pipeline reads ahead, so the data is further on. It is asked for its position after each
    fetched batch, and the position travels with the batch until it is trained.
    """

    def __init__(self, data: Any | None) -> None:
        """`data` has `state_dict()` and `load_state_dict()`, or is None."""
        for method in ("state_dict", "load_state_dict"):
            if data is not None and not callable(getattr(data, method, None)):
                raise TypeError(
                    f"data must have state_dict() and load_state_dict(), got {type(data).__name__}"
                )
        self._data = data
        self.num_batches = 0
        """Batches trained."""
        self._position = self.of_data()

    def of_data(self) -> bytes | None:
        """The data's position now; None without data. TypeError if it cannot be kept."""
        return None if self._data is None else to_plain(self._data.state_dict(), _STATE)

    def advance(self, position: bytes | None) -> None:
        """Counts a batch, after which the data had this position."""
        self.num_batches += 1
        self._position = position

    def state_dict(self) -> dict[str, Any]:
        """Plain values; the data's position is named by rank, since each rank reads its own."""
        state: dict[str, Any] = {"num_batches_trained": self.num_batches}
        if self._data is not None:
            state[_name()] = self._position
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` gave.

        Raises ValueError if something is missing, CheckpointError if the position is damaged.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state_dict must be a dict, got {type(state).__name__}")
        wanted = ["num_batches_trained"] + ([_name()] if self._data is not None else [])
        missing = [name for name in wanted if name not in state]
        if missing:
            raise ValueError(
                f"the pipeline's state lacks {missing}; it has {sorted(state)}; with another "
                "number of ranks, merge the states of all ranks by ParquetData.merge, and load the "
                "result into the data before the pipeline is made; with other data, say where each "
                "rank goes on by yourself"
            )
        num_batches = int(state["num_batches_trained"])
        if self._data is not None:
            self._data.load_state_dict(from_plain(state[_name()], _name()))
            self._position = self.of_data()
        self.num_batches = num_batches


def _name() -> str:
    is_one_of_many = dist.is_available() and dist.is_initialized()
    return f"data.rank_{dist.get_rank() if is_one_of_many else 0}"
