"""The data that the demo was asked to train on."""

from __future__ import annotations

from recsdk_pipeline.data import (
    BadLines,
    ClickData,
    SyntheticClicks,
    read_criteo,
    read_movielens,
)
from recsdk_pipeline.demo.parquet_clicks import ParquetClicks, parquet_clicks
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
    if settings.parquet is not None:
        return parquet_clicks(settings)
    assert most is not None, "the synthetic stream has no end, so its recipe sets one"
    num_held_out = max(_FEWEST_HELD_OUT, most // _HELD_OUT_SHARE)
    return SyntheticClicks(num_train=most, num_held_out=num_held_out, seed=settings.seed)


def num_steps(data: ClickData, settings: Settings) -> int:
    """Return the steps of all epochs."""
    recipe = settings.recipe()
    if isinstance(data, ParquetClicks):
        return sum(data.num_steps(epoch, recipe.batch_size) for epoch in range(recipe.epochs))
    return recipe.epochs * -(-data.num_train // recipe.batch_size)
