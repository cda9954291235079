"""torch.distributed.checkpoint saves and loads modules that are not sharded.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm_processes
from torch import distributed, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.nn.parallel import DistributedDataParallel

from recsdk_core import optim
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        decaying = optim.Adam(weight_decay=0.1, weight_decay_mode="decoupled", catch_up=True)
        self.user = HashEmbedding(3, name="user", optimizer=torch.optim.Adagrad)
        self.item = HashEmbeddingBag(2, name="item", optimizer=decaying, dtype="bfloat16")
        self.state = HashEmbedding(
            1, name="state", optimizer=optim.SGD()
        )  # as a table's own entries are named
        self.dense = nn.Linear(6, 1)

    def train_on(self, first: int, num_keys: int) -> Model:
        keys = torch.arange(first, first + num_keys).reshape(-1, 1)
        flat = keys.reshape(-1)
        pooled = torch.cat([self.user(flat), self.item(keys), self.state(flat)], 1)
        self.dense(pooled).sum().backward()
        return self


def content(model: Any) -> dict[str, Any]:
    """What tensors the state has, as nested lists."""
    return {name: value.tolist() for name, value in model.state_dict().items()}


def save(state: dict[str, Any], path: Path, is_async: bool, is_flat: bool = True) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=is_flat)
    if not is_async:
        dcp.save(state, checkpoint_id=path, planner=planner)
        return
    group = distributed.new_group(backend="gloo") if distributed.is_initialized() else None
    dcp.async_save(state, checkpoint_id=path, process_group=group, planner=planner).result()


def test_any_number_of_rows_loads(tmp_path: Path) -> None:
    saved = Model().train_on(7, 20)
    dcp.save({"model": saved, "bag": saved.item.state_dict()}, checkpoint_id=tmp_path / "0")
    for num_keys in (0, 20, 33):
        model = Model().train_on(-5, num_keys) if num_keys else Model()
        state = {"model": model, "bag": model.item.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "0")
        assert content(model) == content(saved)
        assert {n: v.tolist() for n, v in state["bag"].items()} == content(saved.item)
    model.train_on(100, 4)
    saved.train_on(100, 4)
    assert content(model) == content(saved)


def test_a_module_alone_and_names_that_are_not_a_table(tmp_path: Path) -> None:
    saved, other = HashEmbedding(2), HashEmbedding(2)
    saved(torch.arange(9))
    extra = {"keys": torch.arange(3), "weight": torch.ones(3, 2)}
    dcp.save({**saved.state_dict(), "other": extra}, checkpoint_id=tmp_path / "0")
    state: dict[str, Any] = {**other.state_dict(), "other": {k: v * 0 for k, v in extra.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "0")
    assert torch.equal(state["other"]["weight"], extra["weight"])
    other.load_state_dict({name: state[name] for name in other.state_dict()})
    assert content(other) == content(saved)


def test_what_does_not_fit_is_said_by_the_module(tmp_path: Path) -> None:
    dcp.save({"model": HashEmbedding(3)}, checkpoint_id=tmp_path / "0")
    with pytest.raises(RuntimeError, match=r"weight: must have shape \(0, 2\)"):
        dcp.load({"model": HashEmbedding(2)}, checkpoint_id=tmp_path / "0")


def refusal_of(state: dict[str, Any], path: Path, is_async: bool, is_flat: bool = True) -> str:
    try:
        save(state, path, is_async, is_flat)
    except BaseException as error:  # torch's wraps what a rank raised, and is no Exception
        return str(error)
    return "it was saved"


def check_equal_on_all_ranks(rank: int, folder: Path, is_async: bool) -> None:
    model = Model().train_on(3, 10)
    save({"model": DistributedDataParallel(model)}, folder / "0", is_async)
    other = Model().train_on(0, rank)
    dcp.load({"model": DistributedDataParallel(other)}, checkpoint_id=folder / "0")
    assert content(other) == content(model)


def check_different(rank: int, folder: Path, is_async: bool) -> None:
    models = [Model().train_on(3, 10) for _ in range(6)]
    models[0].train_on(50 * rank, 4)  # other keys, equally many
    models[1].train_on(3, 4 + rank)  # as many updates and keys
    models[2].train_on(20, 3 + rank)  # not as many rows
    models[3].item.table.update_count += rank
    models[4].item.table.upsert(np.array([5]), np.full((1, 2), rank, np.float32))
    models[5].item.table.find_or_insert(np.array([50, 51] if rank else [51, 50]))
    for number, model in enumerate(models):
        text = refusal_of({"model": model}, folder / str(number), is_async)
        table = "model.user" if number < 3 else "model.item"
        assert f"CheckpointError: table {table!r} is whole on ranks 0 and 1, which have" in text
        assert "different rows, or the same rows in another order" in text
    mine = {f"model_{rank}": models[2]}
    save(mine, folder / "own", is_async)
    other = Model()
    dcp.load({f"model_{rank}": other}, checkpoint_id=folder / "own")
    assert content(other) == content(models[2])


def check_on_one_rank_only(rank: int, folder: Path, is_async: bool) -> None:
    model = Model().train_on(3, 10)
    state = {"dense": model.dense, **({"item": model.item} if rank == 1 else {})}
    save(state, folder / "0", is_async)
    other = Model()
    dcp.load({"item": other.item}, checkpoint_id=folder / "0")
    assert content(other.item) == content(model.item)


def load_whole(state: dict[str, Any], path: Path) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(state, checkpoint_id=path, planner=planner)


def check_dicts_saved_whole(rank: int, folder: Path, is_async: bool) -> None:
    model, other = Model().train_on(3, 10), Model()
    state = {"model": model, "both": [{"item": model.item.state_dict()}]}
    save(state, folder / "0", is_async, is_flat=False)
    load_whole({"model": other}, folder / "0")
    assert content(other) == content(model)
    different = Model().train_on(3, 10 + rank)
    states = {
        "model.item": {"model": different},
        "deep.both.0.item": {"deep": {"both": [{"item": different.item.state_dict()}]}},
        "some.item": {"some": {"n": 1, **({"item": model.item.state_dict()} if rank else {})}},
    }
    for table, each in states.items():
        text = refusal_of(each, folder / table, is_async, is_flat=False)
        assert f"CheckpointError: table {table!r} is whole on ranks 0 and 1" in text, text
    part = {f"rank_{rank}.{n}": v for n, v in model.item.state_dict().items()}
    part[f"rank_{rank}.ranks"] = torch.tensor([2, 0])
    text = refusal_of({"item": part}, folder / "parts", is_async, is_flat=False)
    assert "table 'item.rank_0' is one rank's shard of a table" in text
    assert "leave flatten_state_dict on" in text
    save({"item": part}, folder / "flat", is_async)
    dcp.save(  # each rank a checkpoint of its own
        {"item": part},
        checkpoint_id=folder / f"own_{rank}",
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    save({f"model_{rank}": different}, folder / "own", is_async, is_flat=False)
    load_whole({f"model_{rank}": other}, folder / "own")
    assert content(other) == content(different)


def test_tables_are_found_in_lists_of_any_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    bag = Model().item.state_dict()
    endless: list[Any] = [3, {"bag": bag}]
    endless.append(endless)
    deep: Any = bag
    for _ in range(5000):
        deep = (deep,)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({"endless": endless, "deep": deep}, is_coordinator=True)
    plan: Any = planner.create_local_plan()
    assert set(plan.tables) == {"endless.1.bag", "deep" + ".0" * 5000}


def test_two_ranks(tmp_path: Path) -> None:
    ranks = [
        warm_processes.start(__file__, rank, tmp_path, output=tmp_path / f"printed_{rank}")
        for rank in range(2)
    ]
    assert [warm_processes.status_of(rank) for rank in ranks] == [0, 0]


def run_rank(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    try:
        checks = (
            check_equal_on_all_ranks,
            check_different,
            check_on_one_rank_only,
            check_dicts_saved_whole,
        )
        for check, is_async in product(checks, (False, True)):
            check(rank, folder / f"{check.__name__}_{is_async}", is_async)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]))
