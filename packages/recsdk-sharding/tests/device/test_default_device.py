"""Where torch makes tensors on a device, or of another type, by default, steps are the same."""

from __future__ import annotations

import default_devices
import pytest
import torch
from rank_pool import RankPool
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import Evict
from recsdk_sharding import HashEmbeddingBagCollection, HashEmbeddingBagConfig

CASES = [
    (False, "SUM", False),
    (False, "MEAN", False),
    (False, "SUM", True),
    (False, "MEAN", True),
    (True, "NONE", False),
]


@pytest.mark.parametrize("default", ["device", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("num_ranks", "sharding"), [(1, "row_wise"), (2, "row_wise"), (2, "column_wise")]
)
@pytest.mark.parametrize(("is_sequence", "pooling", "is_weighted"), CASES)
def test_steps_are_the_same(
    npus: RankPool,
    default: str,
    num_ranks: int,
    sharding: str,
    is_sequence: bool,
    pooling: str,
    is_weighted: bool,
) -> None:
    case = default, is_sequence, pooling, is_weighted, sharding
    for said in npus.run(num_ranks, default_devices.differences, *case):
        assert said == []


def test_a_state_of_tables_on_the_host_is_there_and_loads() -> None:
    made = []
    for _ in range(2):
        config = HashEmbeddingBagConfig(
            name="t",
            embedding_dim=4,
            num_embeddings=9,
            feature_names=["t"],
            max_rows=9,
            eviction=Evict.lru(),
        )
        module = HashEmbeddingBagCollection([config])
        arguments = {"lr": 0.1, "weight_decay": 0.1}
        apply_optimizer_in_backward(torch.optim.AdamW, module.parameters(), arguments)
        made.append(module)
    batch = KeyedJaggedTensor(["t"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    made[0](batch).values().sum().backward()
    with torch.device("meta"):
        state = made[0].state_dict()
        made[1].load_state_dict(state)
    assert {entry.device.type for entry in state.values()} == {"cpu"}
    found, expected = (module.eval()(batch).values() for module in reversed(made))
    assert torch.equal(found, expected)
