"""What the tests of migration run on every rank."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from on_ranks import own_batches
from plans import module_plan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as TensorShard
from torch.distributed.tensor import distribute_tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Setup, host_env, new_model, rows_of, shard, unwrapped

from recsdk_core import CapacityError
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    Saver,
    export_rows,
    get_default_hybrid_sharders,
    import_rows,
)
from recsdk_sharding._checkpoint import migrate


def there_and_back(setup: Setup, state: dict[str, Any], ids: dict[str, Any]) -> dict[str, Any]:
    """Imports rows, and exports them and those of an unknown id."""
    model = shard(new_model(setup, "meta"), setup)
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    keys = {name: torch.from_numpy(value) for name, value in ids.items()}
    import_rows(model, tensors, keys)
    wanted = {name: torch.cat([value, torch.tensor([123456])]) for name, value in keys.items()}
    return {name: value.numpy() for name, value in export_rows(model, wanted).items()}


def import_between_saves(setup: Setup, folder: str) -> dict[str, Any]:
    """Imports rows of ids that were trained and of others, and saves what changed; all rows."""
    model = shard(new_model(setup, "meta"), setup)
    for batch in own_batches([[4, 3]], setup.weighted, device=setup.device):
        model(batch)[0].backward()
    Saver().save(model, f"{folder}/snapshot")
    ids = torch.arange(-20, 50)
    weights = torch.arange(70 * 8, dtype=torch.float64).reshape(70, 8)
    import_rows(model, {"user.weight": weights}, {"user": ids})
    Saver().save(model, f"{folder}/delta", incremental=True)
    return rows_of(unwrapped(model).ebc.tables())


def import_too_many(setup: Setup) -> dict[str, Any]:
    """Imports more rows than the second of two tables has room for."""
    model = shard(new_model(setup, "meta"), setup)
    state = {"user.weight": torch.ones(4, 8), "genre.weight": torch.ones(5, 3)}
    text = ""
    try:
        import_rows(model, state, {"user": torch.arange(4), "genre": torch.arange(5)})
    except CapacityError as error:
        text = str(error)
    lengths = {name: len(table) for name, table in unwrapped(model).ebc.tables().items()}
    return {"text": text, "lengths": lengths}


NUM_STOCK_ROWS = 12


def stock_batches(num: int) -> list[Any]:
    """This rank's batches of indices of two features, one in each of two tables."""
    rng = np.random.default_rng(dist.get_rank())
    found = []
    for _ in range(num):
        lengths = rng.integers(0, 4, 2 * 3)
        values = torch.from_numpy(rng.integers(0, NUM_STOCK_ROWS, int(lengths.sum())))
        found.append(KeyedJaggedTensor(["u", "g"], values, lengths=torch.from_numpy(lengths)))
    return found


def with_raw_ids(batch: Any) -> Any:
    return KeyedJaggedTensor(batch.keys(), raw_ids(batch.values()), lengths=batch.lengths())


def raw_ids(indices: torch.Tensor) -> torch.Tensor:
    """The raw id of each row."""
    return indices * 7_777_777_777 - 3


def collections_on(device: str) -> tuple[Any, Any]:
    """The same two tables as torchrec's and as hash tables."""
    dims = {"user": ("u", 16), "genre": ("g", 8)}
    stock = EmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=NUM_STOCK_ROWS, feature_names=[feature]
            )
            for name, (feature, dim) in dims.items()
        ],
    )
    hashed = HashEmbeddingBagCollection(
        device=torch.device(device),
        tables=[
            HashEmbeddingBagConfig(
                name=name, embedding_dim=dim, num_embeddings=100, feature_names=[feature]
            )
            for name, (feature, dim) in dims.items()
        ],
    )
    return stock, hashed


def spread(model: Any, sharder: Any, kind: str, *, has_dtensors: bool = False) -> Any:
    """Shards tables of one kind of sharding."""
    size = dist.get_world_size()
    configs = model.embedding_bag_configs()
    halves = {
        c.name: [(c.embedding_dim // 2, 0), (c.embedding_dim // 2, size - 1)] for c in configs
    }
    specs: dict[str, Any] = {
        name: {"table_wise": (kind, size - 1), "column_wise": (kind, cut)}.get(kind, (kind,))
        for name, cut in halves.items()
    }
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    if has_dtensors:
        env.output_dtensor = True
        env.device_mesh = init_device_mesh("cpu", (size,))
    return DistributedModelParallel(
        model,
        env=env,
        device=torch.device("cpu"),
        plan=ShardingPlan({"": module_plan(configs, specs, size, size)}),
        sharders=[sharder],
    )


def go_on_from_stock(
    optimizer: type, arguments: dict[str, Any], kind: str, has_dtensors: bool
) -> dict[str, Any]:
    """Trains torchrec's tables, takes them over a few rows at once, and trains both on."""
    whole, hashed = collections_on("meta")
    for each in (whole, hashed):
        apply_optimizer_in_backward(optimizer, each.parameters(), dict(arguments))
    stock = spread(whole, EmbeddingBagCollectionSharder(), kind, has_dtensors=has_dtensors)
    own = spread(hashed, get_default_hybrid_sharders(host_env())[0], kind)
    batches = stock_batches(10)
    for batch in batches[:5]:
        stock(batch).values().square().sum().backward()
    stock.fused_optimizer.save_param_groups(True)
    for group in stock.fused_optimizer.param_groups:
        group["lr"] = 0.03
    ids = dict.fromkeys(("user", "genre"), raw_ids(torch.arange(NUM_STOCK_ROWS)))
    with patch.object(migrate, "_ROWS_AT_ONCE", 5):
        import_rows(own, stock.state_dict(), ids, stock.fused_optimizer.state_dict())
    outputs = []
    for batch in batches[5:]:
        for each in (stock, own):
            each.fused_optimizer.zero_grad()
        both = [stock(batch).values(), own(with_raw_ids(batch)).values()]
        outputs.append([each.detach().numpy() for each in both])
        for each in both:
            each.square().sum().backward()
    rates = [group["lr"] for group in own.fused_optimizer.param_groups]
    return {"outputs": outputs, "rates": rates}


def from_dtensors(placements: list[Any]) -> tuple[Any, Any]:
    """What is imported from torch's own DTensor, and what it has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(7 * 8.0).reshape(7, 8)
    model, ids = shard(new_model(Setup(), "meta"), Setup()), {"user": torch.arange(7)}
    import_rows(model, {"user.weight": distribute_tensor(weight, mesh, placements)}, ids)
    return export_rows(model, ids)["user.weight"].numpy(), weight.numpy()


def of_one_rank() -> tuple[str, int]:
    """What an unsharded model hears of a tensor that is spread, and how many rows it has then."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = distribute_tensor(torch.ones(7, 8), mesh, [TensorShard(0)])
    model, text = new_model(Setup(), "cpu"), ""
    try:
        import_rows(model, {"user.weight": spread}, {"user": torch.arange(7)})
    except ValueError as error:
        text = str(error)
    return text, len(model.ebc.tables()["user"])


def refused(what: str) -> tuple[str, bool]:
    """What a rank hears of an import that cannot be, and whether that changed anything."""
    setup = Setup(torch.optim.Adagrad, options={"max_rows": 8})
    model, is_last = shard(new_model(setup, "meta"), setup), dist.get_rank() > 0
    ids = {"user": torch.arange(4), "genre": torch.arange(4)}
    dims = {"user": 8, "genre": 3}
    import_rows(model, {f"{n}.weight": torch.ones(4, d) for n, d in dims.items()}, ids)
    before = held(model)
    num = 40 if what == "rows" else 6
    ids = {name: torch.arange(num) + int(what == "ids" and is_last) for name in dims}
    state = {f"{n}.weight": torch.full((num, d), 2.0) for n, d in dims.items()}
    sums = {f"{n}.weight": {f"{n}.momentum1": torch.ones(num, d)} for n, d in dims.items()}
    if what == "weight" and is_last:
        state["genre.weight"] = state["genre.weight"].long()
    if what == "state":
        sums["genre.weight"].clear()
    rates = {"user.weight": 0.5, "genre.weight": 0.25 if what == "rate" and is_last else 0.5}
    groups = [{"params": [name], "lr": rate} for name, rate in rates.items()]
    text = ""
    try:
        import_rows(model, state, ids, {"state": sums, "param_groups": groups})
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text, held(model) == before


def held(model: Any) -> list[Any]:
    """All that an import may change."""
    rates = [group["lr"] for group in model.fused_optimizer.param_groups]
    tables = unwrapped(model).ebc.tables()
    counts = [table.update_count for table in tables.values()]
    rows = {
        name: [(b.keys.tolist(), b.weights.tolist(), b.state["sum"].tolist()) for b in t.export()]
        for name, t in tables.items()
    }
    return [rates, counts, rows]
