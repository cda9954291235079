"""torchrec's quantization takes hash tables along, and refuses those it cannot, by name."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsdk_core import CheckpointError, Default, optim
from recsdk_core.nn import (
    HashEmbedding,
    HashEmbeddingBag,
    ServingEmbedding,
    freeze,
)
from recsdk_sharding import (
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    QuantHashEmbeddingBagCollection,
    QuantHashEmbeddingCollection,
)
from sampling import IS_FULL

BASE: dict[str, Any] = {"name": "t", "embedding_dim": 4, "num_embeddings": 10}
IDS = st.lists(st.sampled_from([-7, 0, 3, 2**62, -(2**63), 404]), max_size=12)
# The largest error of a value of a row whose range is 2 or less.
ERROR = {torch.float32: 0.0, torch.float16: 1e-3, torch.qint8: 0.005, torch.quint4x2: 0.08}


def model_with(sparse: nn.Module) -> nn.Module:
    """A model of a sparse and a dense part."""
    return nn.ModuleDict({"sparse": sparse, "over": nn.Linear(4, 2)})


def uniform(weight: torch.Tensor) -> None:
    nn.init.uniform_(weight, -1, 1)


def configs() -> list[HashEmbeddingBagConfig]:
    return [
        HashEmbeddingBagConfig(
            name="users", embedding_dim=8, num_embeddings=9, feature_names=["user", "friend"],
            init_fn=uniform, default=Default.shared_rows(3),
        ),
        HashEmbeddingBagConfig(
            name="films", embedding_dim=20, num_embeddings=9, feature_names=["item"],
            pooling=PoolingType.MEAN, init_fn=uniform,
        ),
    ]  # fmt: skip


def trained(module: Any) -> Any:
    for table in module.tables().values():
        table.set_optimizer(optim.SGD(lr=0.1))
        table.find_or_insert(np.array([-7, 0, 3, 2**62, -(2**63)]))
    return module.eval()


def batch_of(data: st.DataObject, is_weighted: bool) -> KeyedJaggedTensor:
    num_bags = data.draw(st.integers(0, 4))
    bags = [[data.draw(IDS) for _ in range(num_bags)] for _ in range(3)]
    ids = [i for feature in bags for bag in feature for i in bag]
    lengths = torch.tensor([len(bag) for feature in bags for bag in feature], dtype=torch.int64)
    weights = torch.tensor([(i % 5) / 4 for i in range(len(ids))]) if is_weighted else None
    values = torch.tensor(ids, dtype=torch.int64)
    return KeyedJaggedTensor(["item", "user", "friend"], values, weights, lengths)


@settings(max_examples=30)
@given(
    data=st.data(),
    dtype=st.sampled_from(list(ERROR)),
    films=st.sampled_from(list(ERROR)),
    is_weighted=st.booleans(),
    by_inference=st.booleans(),
)
def test_bags_are_those_of_the_trained_module_within_the_step_of_the_dtype(
    data: st.DataObject,
    dtype: torch.dtype,
    films: torch.dtype,
    is_weighted: bool,
    by_inference: bool,
) -> None:
    ebc = trained(HashEmbeddingBagCollection(configs(), is_weighted=is_weighted))
    model = model_with(ebc)
    options: dict[str, Any] = {"per_table_weight_dtype": {"films": films}}
    if by_inference:
        made = quantize_inference_model(copy.deepcopy(model), quantization_dtype=dtype, **options)
    else:
        made = quantize_embeddings(model, dtype, inplace=False, **options)
    quantized = made["sparse"]
    assert type(quantized) is QuantHashEmbeddingBagCollection
    assert model["sparse"] is ebc
    batch = batch_of(data, is_weighted)
    got, wanted = quantized(batch).to_dict(), ebc(batch).to_dict()
    assert list(got) == list(wanted)
    for name, values in wanted.items():
        most = ERROR[films if name == "item" else dtype]
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], values, rtol=0, atol=12 * most)
        if most == 0.0:
            assert torch.equal(got[name], values)
    assert quantized.state_dict() == {}


@pytest.mark.parametrize("by_inference", [False, True])
@pytest.mark.parametrize(
    ("dtype", "by_feature"), [(torch.float32, True), (torch.qint8, False), (torch.quint4x2, True)]
)
def test_feature_processors_stay_in_front(
    dtype: torch.dtype, by_feature: bool, by_inference: bool
) -> None:
    lengths = {"item": 4, "user": 4, "friend": 4}
    weigh: Any = PositionWeightedModuleCollection(lengths)
    if by_feature:
        weigh = {name: PositionWeightedModule(most) for name, most in lengths.items()}
    tables = trained(HashEmbeddingBagCollection(configs(), is_weighted=True))
    processed = FeatureProcessedEmbeddingBagCollection(tables, weigh).eval()
    for weights in processed._feature_processors.parameters():
        nn.init.uniform_(weights)
    model = nn.ModuleDict({"all": model_with(processed)})
    ids = torch.tensor([-7, 404, 2**62, 3, 0, -7, 3])
    bags = torch.tensor([2, 0, 1, 3, 0, 1])
    batch = KeyedJaggedTensor(["item", "user", "friend"], ids, lengths=bags)
    wanted = processed(batch).to_dict()
    if by_inference:
        made = quantize_inference_model(model, quantization_dtype=dtype, fp_weight_dtype=dtype)
        assert not hasattr(tables, "qconfig")
    else:
        made = quantize_embeddings(model, dtype, inplace=False)
    quantized = made["all"]["sparse"]
    assert type(quantized._embedding_bag_collection) is QuantHashEmbeddingBagCollection
    got = quantized(batch).to_dict()
    assert got.keys() == wanted.keys()
    for name, values in got.items():
        torch.testing.assert_close(values, wanted[name], rtol=0, atol=3 * ERROR[dtype])
    assert any(bool(values.any()) for values in got.values())


def test_sequences_are_those_of_the_trained_module() -> None:
    config = HashEmbeddingConfig(
        name="films", embedding_dim=4, num_embeddings=9, feature_names=["a", "b"]
    )
    ec = trained(HashEmbeddingCollection([config], need_indices=True))
    made = quantize_embeddings(
        model_with(ec), torch.float32, inplace=False, output_dtype=torch.float16
    )["sparse"]
    assert type(made) is QuantHashEmbeddingCollection
    ids = torch.tensor([-7, 404, 3, 2**62, -7])
    batch = KeyedJaggedTensor(["b", "a"], ids, lengths=torch.tensor([2, 0, 1, 2]))
    for name, wanted in ec(batch).items():
        got = made(batch)[name]
        assert torch.equal(got.values(), wanted.values().half())
        assert torch.equal(got.lengths(), wanted.lengths())
        assert torch.equal(got.weights(), wanted.weights())


def test_a_forked_process_leaves_the_folder_to_who_made_it() -> None:
    made = quantize_embeddings(
        model_with(HashEmbeddingBagCollection(configs())), torch.qint8, inplace=True
    )["sparse"]
    folder = Path(made.serving_tables()["users"].path)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        del made
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert folder.exists()
    del made
    gc.collect()
    assert not folder.exists()


def test_tables_lie_in_a_folder_of_the_module_or_at_a_path(tmp_path: Path) -> None:
    model = model_with(trained(HashEmbeddingBagCollection(configs())))
    made = quantize_embeddings(model, torch.qint8, inplace=False)["sparse"]
    folder = Path(made.serving_tables()["users"].path)
    copied = copy.deepcopy(made)
    assert copied.serving_tables() == made.serving_tables()
    with pytest.raises(TypeError, match="recsdk freeze"):
        pickle.dumps(made)
    ids = torch.tensor([3, 404, -7])
    batch = KeyedJaggedTensor(["item", "user", "friend"], ids, lengths=torch.ones(3).long())
    kept = tmp_path / "frozen"
    kept.symlink_to(folder)
    served = QuantHashEmbeddingBagCollection(configs(), path=folder)
    assert torch.equal(served(batch).values(), made(batch).values())
    wrong = configs()
    wrong[0].embedding_dim = 5
    with pytest.raises(ValueError, match="has width 8, and its config embedding_dim=5"):
        QuantHashEmbeddingBagCollection(wrong, path=folder)
    del made, copied
    gc.collect()
    assert not folder.exists()
    with pytest.raises(CheckpointError):
        QuantHashEmbeddingBagCollection(configs(), path=folder)


PLAIN: dict[str, Any] = {"name": "t", "optimizer": optim.SGD(lr=0.1)}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: HashEmbeddingBagCollection(configs()), "a bare HashEmbeddingBagCollection"),
        (lambda: model_with(HashEmbeddingBag(4, **PLAIN)), "module 'sparse': a HashEmbeddingBag"),
        (lambda: model_with(HashEmbedding(4, **PLAIN)), "module 'sparse': a HashEmbedding"),
    ],
    ids=["bare", "bag", "embedding"],
)
def test_what_cannot_be_quantized_is_refused_by_name(
    make: Callable[[], nn.Module], said: str
) -> None:
    whole = make()
    with pytest.raises(ValueError, match=f"{said} cannot be quantized"):
        quantize_embeddings(whole, torch.qint8, inplace=False)
    with pytest.raises(ValueError, match=f"{said} cannot be quantized"):
        quantize_inference_model(whole)


class Served(nn.Module):
    """A model of one collection, whose batch is an input of the program."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        return self.collection(batch)


def frozen_model(kind: str) -> Served:
    """Bags, weighted bags, or sequences; one table has the rows that missing ids share."""
    module: Any
    if kind == "sequences":
        config = HashEmbeddingConfig(
            name="films", embedding_dim=4, num_embeddings=9, feature_names=["friend", "item"]
        )
        module = HashEmbeddingCollection([config], need_indices=True)
    else:
        module = HashEmbeddingBagCollection(configs(), is_weighted=kind == "weighted")
    model = quantize_embeddings(model_with(trained(module)), torch.qint8, inplace=False)
    return Served(model["sparse"])


def any_batch(kind: str, lengths: list[int], shift: int = 0) -> KeyedJaggedTensor:
    """Ids in turn, some without a row, in bags of these lengths of three features."""
    known = torch.tensor([-7, 0, 3, 404, 2**62, -(2**63), 405])
    ids = known[(torch.arange(sum(lengths)) * 3 + shift) % len(known)]
    weights = torch.linspace(-1, 1, len(ids)) if kind == "weighted" else None
    return KeyedJaggedTensor(["item", "user", "friend"], ids, weights, torch.tensor(lengths))


def export(model: Served, kind: str, strict: bool) -> Any:
    batch = any_batch(kind, [1, 0, 3, 2, 2, 1])
    shapes = [
        None if tensor is None else {0: torch.export.Dim.DYNAMIC}
        for tensor in pytree.tree_leaves(batch, is_leaf=lambda leaf: leaf is None)
    ]
    return torch.export.export(model, (batch,), dynamic_shapes=(shapes,), strict=strict)


def same_outputs(got: Any, wanted: Any) -> bool:
    assert type(got) is type(wanted)
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)
    return all(one is other or torch.equal(one, other) for one, other in pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "strict"),
    [("bags", True), ("weighted", False), ("sequences", True), ("sequences", False)],
)
def test_exported_programs_give_what_the_collection_gives(kind: str, strict: bool) -> None:
    model = frozen_model(kind)
    program = export(model, kind, strict).module()

    @settings(max_examples=8)
    @given(num_samples=st.integers(2, 5), data=st.data(), shift=st.integers(0, 6))
    def check(num_samples: int, data: st.DataObject, shift: int) -> None:
        length = st.integers(0, 3)
        lengths = data.draw(st.lists(length, min_size=3 * num_samples, max_size=3 * num_samples))
        batch = any_batch(kind, lengths, shift)
        assert same_outputs(program(batch), model(batch))

    check()
    short = any_batch(kind, [1, 0, 3, 2, 2, 1])
    short._lengths = short._lengths + 1
    with pytest.raises((RuntimeError, AssertionError)):
        program(short)


@pytest.mark.skipif(not IS_FULL, reason="compiles C++; RECSDK_TEST_PROFILE=full")
@pytest.mark.filterwarnings("ignore")
def test_an_exported_collection_runs_as_a_package_of_aot_inductor(tmp_path: Path) -> None:
    model = frozen_model("weighted")
    inductor: Any = torch._inductor
    path = str(tmp_path / "model.pt2")
    package = inductor.aoti_compile_and_package(
        export(model, "weighted", strict=False), package_path=path
    )
    run = inductor.aoti_load_package(package)
    for lengths in ([1, 0, 3, 2, 2, 1], [0] * 12, [4, 0, 0, 1, 2, 0, 1, 1, 3]):
        batch = any_batch("weighted", lengths)
        assert same_outputs(run(batch), model(batch))


def test_export_refuses_another_batch_size_per_feature() -> None:
    model = frozen_model("bags")
    batch = KeyedJaggedTensor(
        ["item", "user", "friend"],
        torch.tensor([3, -7, 0, 3]),
        lengths=torch.ones(4, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [2], [1]],
        inverse_indices=(["item", "user", "friend"], torch.zeros(3, 2, dtype=torch.int64)),
    )
    with pytest.raises(ValueError, match="another batch size per feature"):
        torch.export.export(model, (batch,), strict=False)


def test_a_model_with_plain_modules_too_is_frozen_first(tmp_path: Path) -> None:
    collection = trained(HashEmbeddingBagCollection(configs()))
    plain = HashEmbedding(4, name="t", optimizer=optim.SGD(lr=0.1))
    model = nn.ModuleDict({"sparse": collection, "plain": plain})
    frozen = freeze(model, tmp_path / "served", dtype="int8")
    made = quantize_embeddings(frozen, torch.qint8, inplace=False)
    assert isinstance(made["sparse"], QuantHashEmbeddingBagCollection)
    assert isinstance(made["plain"], ServingEmbedding)
    batch = KeyedJaggedTensor(
        ["item", "user", "friend"], torch.tensor([3, -7, 0]), lengths=torch.ones(3).int()
    )
    wanted = collection(batch).values()
    torch.testing.assert_close(made["sparse"](batch).values(), wanted, rtol=0, atol=0.005)


def test_dtypes_that_frozen_tables_lack_are_refused() -> None:
    model = model_with(trained(HashEmbeddingBagCollection(configs())))
    with pytest.raises(ValueError, match="table 'users' cannot be quantized to torch.quint2x4"):
        quantize_embeddings(model, torch.quint2x4, inplace=False)


@pytest.mark.filterwarnings("ignore")
def test_dense_layers_beside_hash_tables_and_torchrecs_own_tables_are_quantized() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        beside = model_with(HashEmbeddingBagCollection([HashEmbeddingBagConfig(**BASE)]))
        made = torch.quantization.quantize_dynamic(beside, {nn.Linear})
        stock = model_with(EmbeddingBagCollection([EmbeddingBagConfig(**BASE)]))
        quantized = quantize_embeddings(stock, torch.qint8, inplace=False)
    assert ".quantized." in type(made["over"]).__module__
    assert isinstance(made["sparse"], HashEmbeddingBagCollection)
    assert ".quant." in type(quantized["sparse"]).__module__
