"""Click data for training on raw ids: a synthetic stream and readers of two public formats."""

from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.criteo import read_criteo
from recsdk_pipeline.data.examples import ClickData, Examples, IdBags, Share
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.keys import category_key
from recsdk_pipeline.data.lines import BadLine, BadLines
from recsdk_pipeline.data.movielens import read_movielens
from recsdk_pipeline.data.synthetic import SyntheticClicks

__all__ = [
    "BadLine",
    "BadLines",
    "ClickBatch",
    "ClickData",
    "Examples",
    "IdBags",
    "HeldOutSplit",
    "Share",
    "SyntheticClicks",
    "category_key",
    "read_criteo",
    "read_movielens",
]
