"""Data for training on raw ids: a synthetic stream, Parquet files, text of two formats."""

from recsdk_pipeline.data.batch import ClickBatch
from recsdk_pipeline.data.criteo import CriteoData, read_criteo
from recsdk_pipeline.data.examples import ClickData, Examples, IdBags, Share
from recsdk_pipeline.data.held_out_split import HeldOutSplit
from recsdk_pipeline.data.keys import category_key, category_keys
from recsdk_pipeline.data.lines import BadLine, BadLines
from recsdk_pipeline.data.movielens import MovieLensData, read_movielens
from recsdk_pipeline.data.parquet import ParquetData
from recsdk_pipeline.data.parquet_columns import IdColumn
from recsdk_pipeline.data.stream import FileData
from recsdk_pipeline.data.synthetic import SyntheticClicks

__all__ = [
    "BadLine",
    "BadLines",
    "ClickBatch",
    "ClickData",
    "CriteoData",
    "Examples",
    "IdBags",
    "IdColumn",
    "FileData",
    "HeldOutSplit",
    "MovieLensData",
    "ParquetData",
    "Share",
    "SyntheticClicks",
    "category_key",
    "category_keys",
    "read_criteo",
    "read_movielens",
]
