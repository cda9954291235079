"""What the matrix of torchrec's test models runs on every rank.

Models, inputs, sharders and the training step are of `torchrec.distributed.test_utils`; here are
our modules in their place, and the comparison by key with torchrec's unsharded model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from random_models import codecs_of
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardedTensor, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec_cells import WORLDS, Cell, Model
from worlds import host_env, use_nodes_of

from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    export_rows,
    get_default_hybrid_sharders,
    import_rows,
)


@contextlib.contextmanager
def _module_that_the_wheel_lacks() -> Iterator[None]:
    """`test_utils.test_sharding` imports a class from a folder of tests that no wheel has."""
    name = "torchrec.distributed.tests.test_sequence_model"
    stand_in = types.ModuleType(name)
    stand_in.TestEmbeddingCollectionSharder = None  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


with _module_that_the_wheel_lacks():
    from torchrec.distributed.test_utils import test_sharding as torchrec_tests
from torchrec.distributed.test_utils import test_model as torchrec_models  # noqa: E402
from torchrec.distributed.test_utils.emb_sharder import (  # noqa: E402
    TestEBCSharder,
    TestECSharder,
)

BATCH_SIZE = 4
NUM_FLOATS = 16
SPARSE_LR = 50.0
DENSE_LR = 0.1
NUM_STEPS = 2
ID_OF_ROW = 0x9E3779B97F4A7C15 - 2**64
"""An odd number: its products with row numbers are ids all over int64, negative ones too."""

VECTORS_OFF = {"": 1e-5, "FP16": 2e-3, "BF16": 2e-2, "INT8": 3e-2}
ROWS_OFF = {"": 1e-3, "FP16": 1e-2, "BF16": 4e-2, "INT8": 6e-2}
"""Largest differences, as parts of the largest number, resp. of the largest change of a row."""


class WrongNumbers(AssertionError):
    """What was computed is not what torchrec's unsharded model computes."""


def outcome(side: str, cell: Cell) -> str:
    """Runs one cell; its error, "" if there is none.

    `side` is "ours" or "torchrec".
    """
    return error_of(_run, side, cell)


def error_of(run: Callable[..., None], *args: Any) -> str:
    """Runs something without its warnings; its error in a line, "" if there is none."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(*args)
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        return f"{type(error).__name__}: {text}"
    finally:
        logging.disable(logging.NOTSET)
    return ""


def _run(side: str, cell: Cell) -> None:
    """One cell; raises if its numbers are wrong."""
    expected = _expected(cell.model, cell.world_size)
    sharded = _Ours(cell) if side == "ours" else _Torchrec(cell)
    wanted = slice(dist.get_rank() * expected.size, (dist.get_rank() + 1) * expected.size)
    for name, value in vectors_of(sharded.model.module, sharded.inputs[0]).items():
        whole = expected.vectors[name]
        check_close(f"vectors of {name}", value, whole[wanted], VECTORS_OFF[cell.codec])
    for step, batch in enumerate(sharded.inputs):
        found = torchrec_tests.gen_full_pred_after_one_step(sharded.model, sharded.optimizer, batch)
        whole = expected.predictions[step]
        check_close(f"predictions after step {step}", found, whole[wanted], VECTORS_OFF[cell.codec])
    for name, (before, after) in expected.rows.items():
        sharded.check_rows(name, before, after, ROWS_OFF[cell.codec])


def check_close(what: str, found: torch.Tensor, expected: torch.Tensor, fraction: float) -> None:
    """Raises if a number is off by more than a fraction of the largest one."""
    if found.shape != expected.shape:
        raise WrongNumbers(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    if expected.numel():
        largest, off = float(expected.abs().max()), float((found - expected).abs().max())
        if not off <= fraction * largest:
            raise WrongNumbers(f"{what} are off by {off:.3g}, the largest is {largest:.3g}")


@dataclass(frozen=True)
class _Expected:
    """What torchrec's unsharded model makes of the batches of all ranks."""

    model: Any
    """Before training."""
    inputs: list[list[Any]]
    """By step and rank."""
    vectors: dict[str, torch.Tensor]
    predictions: list[torch.Tensor]
    """After each step."""
    rows: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """By table, before and after training."""

    @property
    def size(self) -> int:
        """Samples of a rank."""
        return len(self.inputs[0][0].float_features)


@functools.lru_cache(maxsize=1)
def _expected(model: Model, world_size: int) -> _Expected:
    untrained, inputs = model_and_inputs(model, world_size)
    trained = copy.deepcopy(untrained)
    vectors = vectors_of(trained, inputs[0][0])
    tables = {name for name, _ in weights_of(trained)}
    groups = [
        {"params": [p], "lr": SPARSE_LR if name in tables else DENSE_LR}
        for name, p in trained.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=DENSE_LR)
    predictions = [
        torchrec_tests.gen_full_pred_after_one_step(trained, optimizer, whole)
        for whole, _ in inputs
    ]
    pairs = zip(weights_of(untrained), weights_of(trained), strict=True)
    rows = {name.split(".")[-2]: (b.detach(), a.detach()) for (name, b), (_, a) in pairs}
    return _Expected(untrained, [parts for _, parts in inputs], vectors, predictions, rows)


def model_and_inputs(model: Model, world_size: int) -> Any:
    """torchrec's model, and a batch of all ranks and one of each rank for each step."""
    tables, weighted = tables_of(model)
    kinds = torchrec_models.TestMixedEmbeddingSparseArch, torchrec_models.TestSparseNN
    generate = torchrec_models.ModelInput
    return torchrec_tests.gen_model_and_input(
        model_class=kinds[0] if model.is_sequence else kinds[1],
        tables=tables,
        weighted_tables=weighted,
        embedding_groups={"group": _embedding_names(tables)},
        world_size=world_size,
        num_float_features=NUM_FLOATS,
        generate=(
            generate.generate_variable_batch_input
            if model.batches == "per feature"
            else generate.generate
        ),
        variable_batch_size=model.batches == "per rank",
        batch_size=BATCH_SIZE,
        global_constant_batch=True,
        num_inputs=NUM_STEPS,
    )


def tables_of(model: Model) -> tuple[list[Any], list[Any] | None]:
    """The tables of `ModelParallelTestShared`, and the weighted ones: two features are shared."""
    numbers = [*range(4), *range(2)]
    names = [f"table_{index}" for index in range(len(numbers))]
    if model.is_sequence:
        sequences = [
            EmbeddingConfig(
                name=name,
                embedding_dim=16,
                num_embeddings=(i + 1) * 10,
                feature_names=[f"feature_{i}"],
            )
            for name, i in zip(names[:4], numbers, strict=False)
        ]
        return sequences, None
    pooling = PoolingType.MEAN if model.pooling == "mean" else PoolingType.SUM
    bags = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=(i + 2) * 8,
            num_embeddings=(i + 1) * 10,
            feature_names=[f"feature_{i}"],
            pooling=pooling,
        )
        for name, i in zip(names, numbers, strict=True)
    ]
    if "weighted" not in model.kind:
        return bags, None
    weighted = [
        EmbeddingBagConfig(
            name=f"weighted_table_{i}",
            embedding_dim=(i + 2) * 4,
            num_embeddings=(i + 1) * 10,
            feature_names=[f"weighted_feature_{i}"],
        )
        for i in range(2)
    ]
    for config in weighted:
        config.is_weighted = True  # its generator of variable batches asks for this
    return bags, weighted


def _embedding_names(tables: list[Any]) -> list[str]:
    return [name for names in get_embedding_names_by_table(tables) for name in names]


def weights_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The tables of an unsharded model, by name of the parameter."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if "embedding_bags." in name or "embeddings." in name
    ]


def vectors_of(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """What the tables give for a batch, by feature."""
    model.train(False)
    with torch.no_grad():
        found = model.sparse_forward(batch)
    return {"all": found} if isinstance(found, torch.Tensor) else found.to_dict()


def with_collections(model: Any, make: Callable[[Any], nn.Module]) -> Any:
    """A copy of an unsharded model with other collections."""
    made = copy.deepcopy(model)
    kinds = EmbeddingBagCollection, EmbeddingCollection
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kinds):
                setattr(parent, name, make(child))
    return made


class _Sharded:
    """A sharded model with its optimizer and the batches of this rank."""

    def __init__(self, cell: Cell, model: nn.Module, sharders: list[Any]) -> None:
        local_size = WORLDS[cell.world_size]
        use_nodes_of(local_size)
        names = [name.split(".")[-2] for name, _ in weights_of(model)]
        kernel = "dense" if cell.sharding_type == "data_parallel" else "fused"
        constraint = ParameterConstraints(
            sharding_types=[cell.sharding_type], compute_kernels=[kernel], min_partition=4
        )
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=cell.world_size, compute_device="cpu", local_world_size=local_size
            ),
            constraints=dict.fromkeys(names, constraint),
        )
        world = dist.GroupMember.WORLD
        self.model: Any = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(world),
            device=torch.device("cpu"),
            plan=planner.collective_plan(model, sharders, world),
            sharders=sharders,
        )
        groups: dict[float, dict[str, Any]] = {DENSE_LR: {}, SPARSE_LR: {}}
        for name, parameter in in_backward_optimizer_filter(self.model.named_parameters()):
            is_dense = name.startswith(("dense", "over"))
            groups[DENSE_LR if is_dense else SPARSE_LR][name] = parameter
        optimizers = [
            KeyedOptimizerWrapper(group, functools.partial(torch.optim.SGD, lr=lr))
            for lr, group in groups.items()
            if group
        ]
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, *optimizers])

    def check_rows(
        self, name: str, before: torch.Tensor, after: torch.Tensor, fraction: float
    ) -> None:
        """Raises if the rows of a table have not changed as they should."""
        raise NotImplementedError


class _Torchrec(_Sharded):
    """torchrec's modules and test sharders."""

    def __init__(self, cell: Cell) -> None:
        expected = _expected(cell.model, cell.world_size)
        made = with_collections(expected.model, _on_meta)
        sharder = TestECSharder if cell.model.is_sequence else TestEBCSharder
        kernel = "dense" if cell.sharding_type == "data_parallel" else "fused"
        arguments = {"learning_rate": SPARSE_LR}
        codecs = codecs_of(cell.codec or None)
        super().__init__(cell, made, [sharder(cell.sharding_type, kernel, arguments, codecs)])
        torchrec_tests.copy_state_dict(self.model.state_dict(), expected.model.state_dict())
        self.inputs = [parts[dist.get_rank()] for parts in expected.inputs]

    def check_rows(
        self, name: str, before: torch.Tensor, after: torch.Tensor, fraction: float
    ) -> None:
        (state,) = [v for k, v in self.model.state_dict().items() if k.endswith(f"s.{name}.weight")]
        shards = [((0, 0), state)]
        if isinstance(state, ShardedTensor):
            local = state.local_shards()
            shards = [(tuple(s.metadata.shard_offsets), s.tensor) for s in local]
        for (row, column), found in shards:
            part = slice(row, row + found.shape[0]), slice(column, column + found.shape[1])
            whole = (after - before)[part]
            check_close(f"rows of {name}", found.detach() - before[part], whole, fraction)


class _Ours(_Sharded):
    """Hash tables in place of torchrec's, their sharders, and ids in place of row numbers."""

    def __init__(self, cell: Cell) -> None:
        expected = _expected(cell.model, cell.world_size)
        made = with_collections(expected.model, hash_collection)
        tables = [parameter for _, parameter in weights_of(made)]
        _apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": SPARSE_LR})
        sharders = get_default_hybrid_sharders(
            host_env(), qcomm_codecs_registry=codecs_of(cell.codec or None)
        )
        super().__init__(cell, made, sharders)
        self._ids = {name: ids_of_rows(len(before)) for name, (before, _) in expected.rows.items()}
        import_rows(self.model, expected.model.state_dict(), self._ids)
        self.inputs = [with_ids(parts[dist.get_rank()]) for parts in expected.inputs]

    def check_rows(
        self, name: str, before: torch.Tensor, after: torch.Tensor, fraction: float
    ) -> None:
        found = export_rows(self.model, {name: self._ids[name]})[f"{name}.weight"]
        check_close(f"rows of {name}", found - before, after - before, fraction)


def ids_of_rows(num_rows: int) -> torch.Tensor:
    """Our ids of torchrec's rows."""
    return torch.arange(num_rows) * ID_OF_ROW


def with_ids(batch: Any) -> Any:
    """The batch with the ids of its row numbers."""
    made = copy.deepcopy(batch)
    for features in (made.idlist_features, made.idscore_features):
        if features is not None:
            features.values().mul_(ID_OF_ROW)
    return made


def _on_meta(module: Any) -> nn.Module:
    device = torch.device("meta")
    if isinstance(module, EmbeddingCollection):
        return EmbeddingCollection(tables=module.embedding_configs(), device=device)
    return EmbeddingBagCollection(
        tables=module.embedding_bag_configs(), is_weighted=module.is_weighted(), device=device
    )


def hash_collection(module: Any, device: str = "meta") -> nn.Module:
    """Our module in the place of one of torchrec's."""
    if isinstance(module, EmbeddingCollection):
        sequences = [_hash_config(HashEmbeddingConfig, c) for c in module.embedding_configs()]
        return HashEmbeddingCollection(sequences, torch.device(device))
    bags = [_hash_config(HashEmbeddingBagConfig, c) for c in module.embedding_bag_configs()]
    return HashEmbeddingBagCollection(bags, module.is_weighted(), torch.device(device))


def _hash_config(kind: Any, config: Any) -> Any:
    fields = {"name", "embedding_dim", "num_embeddings", "feature_names"}
    if isinstance(config, EmbeddingBagConfig):
        fields.add("pooling")
    return kind(**{field: getattr(config, field) for field in fields})
