"""The data that the demo was asked to train on."""

from __future__ import annotations

from recsdk_pipeline.data import (
    BadLines,
    ClickData,
    SyntheticClicks,
    read_criteo,
    read_movielens,
)
from recsdk_pipeline.demo.settings import Settings

_HELD_OUT_SHARE = 20
_FEWEST_HELD_OUT = 1000


def click_data(settings: Settings, bad: BadLines) -> ClickData:
    """Return the data; malformed lines of files are counted in `bad`."""
    most = settings.recipe().examples
    if settings.movielens is not None:
        return read_movielens(settings.movielens, most=most, seed=settings.seed, bad=bad)
    if settings.criteo is not None:
        return read_criteo(settings.criteo, most=most, seed=settings.seed, bad=bad)
    assert most is not None, "the synthetic stream has no end, so its recipe sets one"
    num_held_out = max(_FEWEST_HELD_OUT, most // _HELD_OUT_SHARE)
    return SyntheticClicks(num_train=most, num_held_out=num_held_out, seed=settings.seed)
