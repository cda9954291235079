"""Which devices tables can be on, and what their streams wait for."""

from __future__ import annotations

import math

import torch

__all__ = [
    "check_device",
    "mark_of",
    "row_budget",
    "rows_with_eviction",
    "stream_of",
    "wait_for",
]

_ROW_DEVICES = ("cpu", "npu", "cuda")
_FEWEST_SPARE_ROWS = 4096
_DEVIATIONS = 6  # standard deviations of the number of keys that a rank gets


def check_device(device: torch.device | str | None, what: str) -> torch.device:
    """The device as a torch.device; raises unless tables can be on it, or it is meta.

    TypeError for what names no device, ValueError for another device.
    """
    if device is not None and not isinstance(device, (torch.device, str)):
        raise TypeError(f"{what}: device must be a torch.device or a string, got {device!r}")
    try:
        made = torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f"{what}: torch has no device {device!r}: {error}") from error
    if made.type not in (*_ROW_DEVICES, "meta"):
        raise ValueError(
            f"{what}: hash tables can be on {', '.join(_ROW_DEVICES)}; got device {str(made)!r}; "
            "pass one of those, or torch.device('meta') before sharding"
        )
    return made


def mark_of(device: torch.device) -> torch.Event | None:
    """An event behind the work queued on the current stream of a device; None on the cpu."""
    stream = stream_of(device)
    return None if stream is None else stream.record_event()


def stream_of(device: torch.device) -> torch.Stream | None:
    """The current stream of a device; None on the cpu."""
    if device.type == "cpu":
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def wait_for(mark: torch.Event | None) -> None:
    """Makes the current stream of the mark's device wait for the work before the mark."""
    if mark is not None:
        torch.get_device_module(mark.device).current_stream(mark.device).wait_event(mark)


def row_budget(num_embeddings: int, share: float) -> int:
    """Rows for which one rank has room on its device, of a table of `num_embeddings` rows.

    Its share of them, see `RankMap.share_of`, and six standard deviations for the hash that spreads
    keys over the ranks; at most all rows.
    """
    deviation = math.sqrt(num_embeddings * share * (1 - share))
    return min(num_embeddings, math.ceil(num_embeddings * share + _DEVIATIONS * deviation))


def rows_with_eviction(quota: int) -> int:
    """Rows on a device of a shard that may have `quota` keys, and evicts.

    A sixteenth more, and at least 4096: rows of evicted keys that batches in flight still use, and
    those of a batch's new keys, which come before others leave.
    """
    return quota + max(_FEWEST_SPARE_ROWS, quota // 16)
