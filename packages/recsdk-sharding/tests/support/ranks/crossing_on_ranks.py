"""Settings of sharded and device tables and ways to save them, and what each rank runs with them.

Shape letters: N ids, B bags.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import DataType, NoEvictionPolicy, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worlds import Setup, shard

from optimizer_cases import CLIPS, DECAYS, is_a_product
from recsdk_core import Admit, CapacityError, Default, Evict, NonFiniteError, init
from recsdk_sharding import (
    AdmitAndEvictConfig,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingCollection,
    HashEmbeddingConfig,
    RowOptimizer,
    Saver,
)
from table_crossing import FORMS, assert_same, contents, has_fields, keys_of


def fill(rows: torch.Tensor) -> torch.Tensor:
    """An `init_fn` that the engine does not know."""
    return nn.init.uniform_(rows) + 1


def placed(step: Any, count: Any) -> Any:
    """Where keys stand of a rule."""
    return count + step / 4


CONFIG: dict[str, dict[str, Any]] = {
    "num_embeddings": {"many": 500, "few": 64},
    "embedding_dim": {"1": 1, "4": 4, "20": 20},
    "name": {"user": "user", "other": "a_b-c"},
    "data_type": {name: DataType[name] for name in ("FP32", "BF16", "FP16")},
    "feature_names": {"one": ["first"], "two": ["first", "second"]},
    "weight_init_max": {"none": None, "other": 0.5},
    "weight_init_min": {"none": None, "other": -0.75},
    "init_fn": {"none": None, "known": partial(nn.init.normal_, std=0.5), "own": fill},
    "pooling": {"sum": PoolingType.SUM, "mean": PoolingType.MEAN},
    "seed": {"0": 0, "largest": 2**64 - 1},
    "max_rows": {"none": None, "few": 45},
    "eviction_groups": {"none": None, "4": 4},
    "eviction": {
        "none": None,
        "lru": Evict.lru(min_age=1),
        "time": Evict.lru(by="time"),
        "lfu": Evict.lfu(half_life=2.0),
        "shows": Evict.show_click(decay=0.5),
        "norm": Evict.low_norm(every=2),
        "function": Evict.function(placed, every=2),
        "ttl": Evict.lru().expiring(ttl=2, every=2),
    },
    "admission": {
        "none": None,
        "count": Admit.count(2),
        "shows": Admit.show_click(threshold=2.0),
        "sketch": Admit.count_sketch(2, max_bytes=2**20),
        "limited": Admit.count(2, max_records=20),
        "chance": Admit.probability(0.5) | Admit.count(3),
    },
    "default": {
        "zeros": Default.zeros(),
        "constant": Default.constant(-1.5),
        "shared": Default.shared_rows(4),
        "initial": Default.initial_row(),
    },
    "admit_and_evict_config": {"none": None, "off": AdmitAndEvictConfig()},
    "virtual_table_eviction_policy": {"none": None, "off": NoEvictionPolicy()},
    "on_full": {name: name for name in ("refuse", "raise")},
    "accumulate_steps": {"1": 1, "2": 2},
    "initializer": {"none": None, "normal": init.Normal(stddev=0.1)},
    "on_nonfinite": {name: name for name in ("apply", "raise", "skip")},
}
"""Of each field of a table's config the values that are tried, by name."""
COLLECTION: dict[str, dict[str, Any]] = {
    "device": {"cpu": "cpu", "npu": "npu"},
    "is_weighted": {"no": False, "yes": True},
    "need_indices": {"no": False, "yes": True},
}
"""Of each argument of the collections but their tables; the last is of sequences only."""
OPTIMIZER = {"optimizer": FORMS, "decay": DECAYS, "clip": CLIPS}


class Model(nn.Module):
    """A collection where torchrec finds it."""

    def __init__(self, row: Mapping[str, str], device: str) -> None:
        super().__init__()
        of_collection = {name: values[row[name]] for name, values in COLLECTION.items()}
        config = {name: values[row[name]] for name, values in CONFIG.items()}
        config["feature_names"] = list(config["feature_names"])
        self.ebc: Any
        if row["kind"] == "bags":
            made = [HashEmbeddingBagConfig(**config)]
            is_weighted = of_collection["is_weighted"]
            self.ebc = HashEmbeddingBagCollection(made, is_weighted=is_weighted, device=device)
        else:
            del config["pooling"]
            sequences = [HashEmbeddingConfig(**config)]
            need_indices = of_collection["need_indices"]
            self.ebc = HashEmbeddingCollection(sequences, device, need_indices)
        settings = {"settings": optimizer_of(row)}
        apply_optimizer_in_backward(RowOptimizer, self.ebc.parameters(), settings)

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        return self.ebc(batch)


def optimizer_of(row: Mapping[str, str]) -> Any:
    return replace(FORMS[row["optimizer"]], **DECAYS[row["decay"]], **CLIPS[row["clip"]])


def is_legal(row: Mapping[str, str]) -> bool:
    """Whether the values of some or all settings and switches go together."""
    if row.get("device") == "npu" and row.get("data_type", "FP32") != "FP32":
        return False
    evicts = row.get("eviction", "none") not in ("none", "ttl")
    divides = row.get("eviction_groups", "none") != "none"
    if row.get("max_rows") == "none" and (evicts or divides):
        return False
    if row.get("eviction") == "norm" and row.get("accumulate_steps") == "2":
        return False
    is_cut = row.get("ranks") == "2" and row.get("place") == "sharded"
    if is_cut and row.get("admission") == "limited" and row.get("max_rows") == "none":
        return False  # ranks have no whole groups
    if is_cut and row.get("max_rows") == "few" and row.get("eviction_groups") == "none":
        return False  # ranks have whole groups
    kind = row.get("kind", "")
    if kind == "bags" and row.get("need_indices") == "yes":
        return False
    if kind == "sequences" and (row.get("is_weighted") == "yes" or row.get("pooling") == "mean"):
        return False
    if row.get("need_indices") == "yes" and row.get("is_weighted") == "yes":
        return False
    if row.get("need_indices") == "yes" and row.get("pooling") == "mean":
        return False
    if row.get("ranks") == "2" and "raise" in (row.get("on_full"), row.get("on_nonfinite")):
        return False  # the groups are closed after that
    if row.get("on_full") == "raise" and row.get("place") == "sharded":
        return False
    way = row.get("way", "")
    if way in COPIES and (row.get("into") == "used" or row.get("place", "whole") != "whole"):
        return False
    if "optimizer" not in row or not row.get("decay"):
        return True
    options = DECAYS[row["decay"]]
    form = FORMS[row["optimizer"]]
    return has_fields(form, options) and (
        not options.get("catch_up") or is_a_product(form, **options)
    )


# ---- the program -------------------------------------------------------------------------------


class Side:
    """One model, how it is trained, and its table on this rank."""

    def __init__(self, row: Mapping[str, str], model: Any = None) -> None:
        self.row = row
        self.model = self._made() if model is None else model

    def _made(self) -> Any:
        if self.row["place"] == "whole":
            return Model(self.row, self.row["device"])
        return shard(Model(self.row, "meta"), Setup(device=self.row["device"]))

    @property
    def _collection(self) -> Any:
        return getattr(self.model, "module", self.model).ebc

    @property
    def table(self) -> Any:
        [table] = self._collection.tables().values()
        return table

    def step(self, batch: KeyedJaggedTensor, scale: float) -> list[Any]:
        """Trains on a batch; its output and what its backward raised, or what its forward did."""
        if self.row["eviction"] == "time":  # the latest of the ranks' counts
            self._collection.set_time(int(batch.values()[0]) % 1000)
        try:
            found = self.model(batch.to(torch.device(self.row["device"])))
        except CapacityError as error:
            return [type(error).__name__]
        found = found.wait() if hasattr(found, "wait") else found
        parts = [found.values()] if self.row["kind"] == "bags" else _vectors(found)
        flat = torch.cat([part.reshape(-1) for part in parts])
        grad = torch.linspace(-1, 1, len(flat)) * scale
        try:
            flat.backward(grad.to(flat.device))
        except NonFiniteError as error:
            return [flat.detach().cpu().numpy(), type(error).__name__]
        return [flat.detach().cpu().numpy(), None]


def _vectors(found: Any) -> list[torch.Tensor]:
    return [jagged.values() for _, jagged in sorted(found.items())]


class Program:
    """Calls of several sides, which must answer alike."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.default_rng([seed, dist.get_rank()])

    def go_on(self, sides: list[Side]) -> None:
        """Trains, with gradients that are no numbers too, erases and trains."""
        row = sides[0].row
        small, whole = self._batch(row, self._drawn(36)), self._batch(row, self._drawn(54))
        num_backwards = 0
        for batch, scale in ((small, 1.0), (whole, -0.5), (small, np.nan), (whole, 2.0)):
            num_backwards += _both(sides, batch, scale)
        if num_backwards % 2:  # gradients that wait for others are not saved
            present = np.resize(contents(sides[0].table)["keys"], 8)  # for which there is room
            _both(sides, self._batch(row, present), 0.5)
        gone = self._source.permutation(contents(sides[0].table)["keys"])[:5]
        for side in sides:
            side.table.erase(gone)
            side.table.learning_rate *= 0.75

    def _drawn(self, most: int) -> Any:
        return keys_of(self._source)[:most]

    def _batch(self, row: Mapping[str, str], ids: Any) -> KeyedJaggedTensor:
        weights = self._source.uniform(0.5, 2, 2 * len(ids)).astype(np.float32)
        return KeyedJaggedTensor(
            ["first", "second"],
            torch.from_numpy(np.concatenate([ids, ids[::-1]])),
            torch.from_numpy(weights) if row["is_weighted"] == "yes" else None,
            lengths=torch.tensor([3, 0, 1, len(ids) - 4] * 2),
        )


def _counts(model: Any) -> dict[str, Any]:
    found = model.state_dict().items()
    return {name: value.numpy() for name, value in found if ".admit_" in name}


def _both(sides: list[Side], batch: KeyedJaggedTensor, scale: float) -> bool:
    """Whether a step of all sides, which must answer alike, came to its backward."""
    *others, expected = [side.step(batch, scale) for side in sides]
    for other in others:
        assert_same(tuple(other), tuple(expected), "outputs")
    return len(expected) > 1


# ---- ways to save and load ---------------------------------------------------------------------


class Saving:
    """A model that is saved by some way, and what a copy is loaded into."""

    def __init__(self, row: Mapping[str, str], folder: str) -> None:
        self.row = row
        self.side = Side(row)
        self.program = Program(1)
        own = f"/{dist.get_rank()}" if row["place"] == "whole" else ""
        Path(folder + own).mkdir(exist_ok=True)
        self.folder = folder + own

    def go_on(self) -> None:
        self.program.go_on([self.side])

    def target(self) -> Side:
        side = Side(self.row)
        if self.row["into"] == "used":
            Program(2).go_on([side])
        return side

    def load(self, *numbers: int) -> Side:
        side = self.target()
        for number in numbers:
            Saver().load(side.model, f"{self.folder}/{number}", incremental=number > numbers[0])
        return side


def _save(saving: Saving) -> Side:
    Saver().save(saving.side.model, f"{saving.folder}/0", codec="zstd")
    return saving.load(0)


def _chain(saving: Saving) -> None:
    for number in range(3):
        if number:
            saving.go_on()
        Saver().save(saving.side.model, f"{saving.folder}/{number}", incremental=number > 0)


def _deltas_at_once(saving: Saving) -> Side:
    _chain(saving)
    return saving.load(2)


def _deltas_one_by_one(saving: Saving) -> Side:
    _chain(saving)
    return saving.load(0, 1, 2)


def _delta_after_load(saving: Saving) -> Side:
    Saver().save(saving.side.model, f"{saving.folder}/0")
    saving.side = saving.load(0)
    saving.go_on()
    Saver().save(saving.side.model, f"{saving.folder}/1", incremental=True)
    return saving.load(1)


def _state_dict(saving: Saving) -> Side:
    file, side = io.BytesIO(), saving.target()
    torch.save(saving.side.model.state_dict(), file)
    file.seek(0)
    side.model.load_state_dict(torch.load(file, weights_only=False))
    side.table.learning_rate = saving.side.table.learning_rate
    return side


def _deepcopy(saving: Saving) -> Side:
    return Side(saving.row, copy.deepcopy(saving.side.model))


def _pickle(saving: Saving) -> Side:
    return Side(saving.row, pickle.loads(pickle.dumps(saving.side.model)))


WAYS: dict[str, Callable[[Saving], Side]] = {
    "save": _save,
    "incremental, at once": _deltas_at_once,
    "incremental, one by one": _deltas_one_by_one,
    "incremental, after load": _delta_after_load,
    "state_dict": _state_dict,
    "deepcopy": _deepcopy,
    "pickle": _pickle,
}
COPIES = ("deepcopy", "pickle")
SWITCHES = {
    "kind": ["bags", "sequences"],
    "place": ["whole", "sharded"],
    "ranks": ["1", "2"],
    "way": list(WAYS),
    "into": ["new", "used"],
}


@contextlib.contextmanager
def _named(row: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{dict(row)}: {error!r}") from error


def run(rows: list[dict[str, str]], folder: str) -> int:
    """Saves and loads by each combination; the original and the copy must go on alike."""
    for number, row in enumerate(rows):
        Path(f"{folder}/{number}").mkdir(exist_ok=True)
        with _named(row):
            saving = Saving(row, f"{folder}/{number}")
            saving.go_on()
            sides = [WAYS[row["way"]](saving), saving.side]
            for _ in range(2):
                found = [contents(side.table) for side in sides]
                for name, expected in found[1].items():
                    assert_same(found[0][name], expected, name)
                counts = [_counts(side.model) for side in sides]
                assert_same(counts[0], counts[1], "counts of keys without a row")
                saving.program.go_on(sides)
            assert len(sides[0].table) > 10 // dist.get_world_size()
            for side in sides:
                side.table.check_invariants()
    return len(rows)
