"""The page for users of torchrec: its rows are held by tests, and it has a row for all there is.

The tests of its tables are in the other files of this name.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingType

from claims import Page, assert_all_are_held, assert_ten_things_are_explained
from public_names import public_classes

HERE = Path(__file__).parent
PAGE = Page(HERE.parents[1] / "docs" / "coming_from" / "torchrec.md")
WORDS = {
    *("same", "renamed", "looser", "stricter", "differs"),
    *("refused", "no effect", "torchrec's", "not here"),
}
CHANGED_LINES = 6  # the host group, the config, the collection, sharders, the pipeline, ids


def test_the_first_section_names_what_the_rest_explains() -> None:
    assert_ten_things_are_explained(PAGE)


def test_every_row_is_held_by_a_test() -> None:
    assert_all_are_held(PAGE, HERE.glob("test_coming_from_torchrec*.py"))


def test_rows_say_it_in_the_words_that_the_page_explains() -> None:
    assert {claim.here for claim in PAGE.claims} == WORDS
    explained = set(re.findall(r"\*\*([a-z' ]+)\*\*", PAGE.path.read_text()))
    assert explained == WORDS


def test_the_two_versions_of_the_script_differ_in_six_lines() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.path.read_text(), re.DOTALL)
    before, after = (block.splitlines() for block in blocks[1:3])
    assert len(before) == len(after) <= 10
    assert len(set(after) - set(before)) == len(set(before) - set(after)) == CHANGED_LINES


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def arguments_of(kind: Any) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self"}


def classes_in(package: str, base: type) -> set[str]:
    """The public classes of torchrec that derive from one, wherever they are in a package."""
    return {name for name, kind in public_classes(package).items() if issubclass(kind, base)}


EXISTING = {
    "torchrec": {
        name
        for name, value in vars(torchrec).items()
        if inspect.isclass(value) and value.__module__.startswith("torchrec.")
    },
    "EmbeddingBagConfig": fields_of(torchrec.EmbeddingBagConfig)
    | fields_of(torchrec.EmbeddingConfig),
    "EmbeddingBagCollection": arguments_of(torchrec.EmbeddingBagCollection),
    "EmbeddingCollection": arguments_of(torchrec.EmbeddingCollection),
    "ShardingType": {each.value for each in ShardingType},
    "EmbeddingComputeKernel": {each.value for each in EmbeddingComputeKernel},
    "ParameterConstraints": fields_of(ParameterConstraints),
    "ParameterSharding": fields_of(ParameterSharding),
    "DistributedModelParallel": arguments_of(DistributedModelParallel),
    "EmbeddingBagCollectionSharder": arguments_of(EmbeddingBagCollectionSharder)
    | arguments_of(EmbeddingCollectionSharder),
    "EmbeddingShardingPlanner": arguments_of(EmbeddingShardingPlanner),
    "Topology": arguments_of(Topology),
    "TrainPipelineSparseDist": arguments_of(TrainPipelineSparseDist),
    "torch.optim": {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    },
    "torchrec.optim": classes_in("torchrec.optim", Optimizer),
    "train_pipeline": classes_in("torchrec.distributed.train_pipeline", TrainPipeline),
    "torchrec.modules": classes_in("torchrec.modules", nn.Module),
    "Sharders": classes_in("torchrec.distributed", ModuleSharder),
}


@pytest.mark.parametrize("table", EXISTING)
def test_all_that_this_torchrec_has_is_there(table: str) -> None:
    assert PAGE.names(table) == EXISTING[table]
