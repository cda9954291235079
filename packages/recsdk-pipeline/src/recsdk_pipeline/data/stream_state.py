"""States of data in files, and one state made of those of all ranks and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from recsdk_pipeline._internal.checks import list_of
from recsdk_pipeline._internal.plain_state import from_plain
from recsdk_pipeline.data.dealing import Layer, Layout

KIND = "recsdk.FileData/1"
_POSITION = "data.rank_"


def layer_of(layer: Layer) -> list[Any]:
    """A layer as plain values."""
    layout = layer.layout
    return [layout.world_size, layout.num_workers, [list(each) for each in layer.positions]]


def layers_of(plain: Iterable[Any]) -> tuple[Layer, ...]:
    """The layers of which these are the plain values."""
    return tuple(
        Layer(Layout(world, workers), tuple((window, offset) for window, offset in positions))
        for world, workers, positions in plain
    )


def merged(states: Iterable[Any]) -> dict[str, Any]:
    """See `FileData.merge`."""
    found = [state for each in list_of("states", states) for state in _states_in(each)]
    if not found:
        raise ValueError(
            "no state of data in files was given; pass what state_dict() of such data, of its "
            "loader or of its pipeline returned"
        )
    if any(state["stream"] is None for state in found):
        raise ValueError("a state that was merged is among them; load it as it is")
    same = ("data", "epoch", "layers", "layout")
    first = found[0]
    for name in same:
        if any(state[name] != first[name] for state in found):
            raise ValueError(f"the states differ in {name!r}; merge those of one run and step")
    world, workers = first["layout"]
    streams = sorted(state["stream"] for state in found)
    if streams != list(range(world * workers)):
        raise ValueError(
            f"{world} ranks with {workers} workers have the streams 0 to {world * workers - 1}; "
            f"pass the state of each once, got those of {streams}"
        )
    positions = [each["position"] for each in sorted(found, key=lambda state: int(state["stream"]))]
    return {
        **first,
        "layers": [*first["layers"], [world, workers, positions]],
        "stream": None,
        "position": [0, 0],
        "bad": 0,
    }


def _states_in(value: Any) -> Iterator[dict[str, Any]]:
    """The states of data in files anywhere in a state of a loader or a pipeline."""
    if isinstance(value, Mapping):
        if value.get("kind") == KIND:
            yield dict(value)
            return
        if value.get("_steps_since_snapshot"):
            raise ValueError(
                "the loader's state is some batches behind its position; make the "
                "StatefulDataLoader with snapshot_every_n_steps=1"
            )
        for name, inner in value.items():
            is_packed = isinstance(inner, bytes) and str(name).startswith(_POSITION)
            yield from _states_in(from_plain(inner, str(name)) if is_packed else inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _states_in(inner)
