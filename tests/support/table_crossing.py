"""Settings of a table and ways to save it, and the program that each combination of them runs.

Shape letters: N keys, B bags, D row width.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimizer_cases import CLIPS, DECAYS, PLAIN, is_a_product
from recsdk_core import Admit, Default, Evict, RecsdkError, Table, _ext, init, optim
from recsdk_core.checkpoint import compact, reshard
from recsdk_core.nn import HashEmbedding
from recsdk_core.testing import EDGE_KEYS, ReferenceTable

FORMS = {
    **PLAIN,
    "adamw by row": optim.AdamW(lr=0.02, betas=(0.4, 0.9), eps=1e-3, bias_correction="row"),
    "lamb by row": replace(PLAIN["lamb by row"], betas=(0.4, 0.9)),
}
for _name in ("adagrad", "partial rowwise adam", "lamb", "ftrl", "rmsprop momentum"):
    del FORMS[_name]  # another form has more settings


def placed(step: Any, count: Any) -> Any:
    """Where keys stand of a rule."""
    return count + step / 4


def by_key(keys: Any, values: Any) -> None:
    """An initializer of the test's own."""
    values[:] = ((keys % 1000) / 7)[:, None]


SETTINGS: dict[str, dict[str, Any]] = {
    "dim": {"1": 1, "4": 4, "19": 19, "64": 64},
    "name": {"plain": "user", "odd": "a b/\u00e9.%"},
    "optimizer": FORMS,
    "decay": DECAYS,
    "clip": CLIPS,
    "initializer": {
        "constant": init.Constant(value=0.25),
        "uniform": init.Uniform(low=-1.0, high=2.0),
        "normal": init.Normal(mean=0.5, stddev=0.25),
        "truncated": init.TruncatedNormal(low=-1.0, high=1.0),
        "custom": init.Custom(fn=by_key),
    },
    "seed": {"0": 0, "largest": 2**64 - 1},
    "max_rows": {"none": None, "few": 45},
    "eviction_groups": {"none": None, "4": 4},
    "owned_groups": {"none": None, "all": (0, 4)},
    "admission": {
        "none": None,
        "count": Admit.count(2, max_records=30),
        "sketch": Admit.count_sketch(2, max_bytes=2**20),
        "any": Admit.count(3) | Admit.probability(0.4),
        "shows": Admit.show_click(alpha=0.5, threshold=1.0, max_records=30),
        "of step": Admit.show_click_of_step(alpha=0.5, threshold=1.0),
    },
    "on_full": {name: name for name in ("refuse", "raise")},
    "eviction": {
        "none": None,
        "lru": Evict.lru(),
        "lfu": Evict.lfu(half_life=2.5, min_age=1),
        "score": Evict.score(),
        "shows": Evict.show_click(alpha=0.5, decay=0.75, min_age=1),
        "totals": Evict.show_click_totals(alpha=0.5, decay=0.25),
        "norm": Evict.low_norm(every=2),
        "function": Evict.function(placed, every=2),
    },
    "default": {
        "zeros": Default.zeros(),
        "constant": Default.constant(-1.5),
        "initial": Default.initial_row(),
        "shared": Default.shared_rows(),
        "shared_8": Default.shared_rows(8),
        "shared_begun": Default.shared_rows(8, begin_with="shared_row"),
    },
    "on_nonfinite": {name: name for name in ("apply", "raise", "skip")},
    "dtype": {name: name for name in ("float32", "bfloat16", "float16")},
    "rounding": {name: name for name in ("stochastic", "nearest")},
    "num_threads": {"none": None, "1": 1, "3": 3},
    "hash_seed": {"none": None, "7": 7},
}
"""Of each argument of Table the values that are tried, by name; decay and clip are the
optimizer's."""


# ---- the program -------------------------------------------------------------------------------


def keys_of(source: np.random.Generator) -> Any:
    """More keys than are fetched ahead, (N,): the edge keys, any, and some of them again."""
    keys = [*EDGE_KEYS, *range(12), *source.integers(-(2**63), 2**63, 18, dtype=np.int64)]
    return source.permutation(np.array([*keys, *keys[:6]], np.int64))


class Program:
    """Calls of several tables, which must answer alike."""

    def __init__(self, dim: int, seed: int = 0) -> None:
        self._dim = dim
        self._source = np.random.default_rng([dim, seed])

    def go_on(self, tables: list[Any]) -> None:
        """Makes the next calls of all tables: they insert, train, write, erase and read."""
        keys, source = keys_of(self._source), self._source
        grads = source.normal(size=(len(keys), self._dim)).astype(np.float32)
        bad = grads.copy()
        bad[3, 0], bad[40, -1] = np.nan, -np.inf
        offsets = np.array([0, 5, 5, 38, len(keys)])
        weights = source.uniform(0.5, 2, len(keys)).astype(np.float32)
        told = {"return_outcomes": True}
        rate = float(source.choice([0.01, 0.02]))
        for table in tables:
            table.learning_rate = rate
        for new in (keys[:36], keys):  # the table may be full after the first
            _both(tables, "find_or_insert", new, **told)
        _both(tables, "apply_gradients", keys, grads, **told)
        _both(tables, "apply_gradients", keys[:0], grads[:0])
        _both(tables, "upsert", keys[5:9], grads[5:9], **told)
        _both(tables, "erase", np.concatenate([keys[::6], [77]]), **told)
        arguments = keys, offsets, grads[:4], weights, "mean"
        _both(tables, "pool_backward", *arguments, return_weights_grad=True)
        _both(tables, "apply_gradients", keys, bad, **told)
        _both(tables, "lookup", keys, **told)
        _both(tables, "pool", keys, offsets, weights, "sum")

    def rewrite(self, tables: list[Any], keys: Any) -> None:
        """Writes rows that all tables have, of keys (N,), as the first call after a load may."""
        values = self._source.normal(size=(len(keys), self._dim)).astype(np.float32)
        _both(tables, "upsert", keys, values, return_outcomes=True)


def _both(tables: list[Any], method: str, *args: Any, **kwargs: Any) -> None:
    *others, expected = [_answer(table, method, *args, **kwargs) for table in tables]
    for other in others:
        assert_same(other, expected, method)


def _answer(table: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    try:
        with np.errstate(all="ignore"):
            return getattr(table, method)(*args, **kwargs)
    except RecsdkError as error:
        return type(error).__name__


def assert_same(one: Any, other: Any, what: str) -> None:
    """Equal to the bit, whatever is no number."""
    if isinstance(other, tuple):
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part, what)
    elif isinstance(other, np.ndarray) and other.dtype == np.float32:
        words, other_words = (np.where(np.isnan(x), 1, x.view(np.int32)) for x in (one, other))
        np.testing.assert_array_equal(words, other_words, what, strict=True)
    else:
        np.testing.assert_equal(one, other, what)


def contents(table: Any) -> dict[str, Any]:
    """What two tables that are alike have in common: all but row numbers."""
    batches = list(table.export())
    fields = dict(table.state_fields)
    parts = [batch.keys for batch in batches], [batch.weights for batch in batches]
    state = {name: [batch.state[name] for batch in batches] for name in fields}
    keys = np.concatenate(parts[0])
    order = np.argsort(keys)
    found = {"keys": keys[order], "weights": np.concatenate(parts[1])[order]}
    found |= {name: np.concatenate(values)[order] for name, values in state.items()}
    shared = table.shared_rows()
    found |= {"shared": shared.weights}
    found |= {f"shared {name}": values for name, values in shared.state.items()}
    counts = ("update_count", "log_decay", "learning_rate")
    return found | {name: getattr(table, name) for name in counts}


# ---- ways to save and load ---------------------------------------------------------------------


class Saving:
    """A table that is saved by some way, the model beside it, and what the copy is loaded into."""

    def __init__(self, config: dict[str, Any], into: str, folder: Path) -> None:
        self.config = config
        self.table = Table(**config)
        self.model = ReferenceTable(**of_the_model(config))
        self.program = Program(config["dim"])
        self.folder = str(folder)
        self._into = into

    def go_on(self) -> None:
        self.program.go_on([self.table, self.model])

    def target(self) -> Table:
        """A table to load into: new, or with rows of its own."""
        table = Table(**{**self.config, "hash_seed": 3})
        if self._into == "used":
            Program(self.config["dim"], 1).go_on([table])
        return table

    def load(self, path: Any) -> Table:
        """What was saved; by the table itself, once it has gone on, if it is to take it."""
        if self._into == "itself":
            Program(self.config["dim"], 2).go_on([self.table])
        target = self.table if self._into == "itself" else self.target()
        target.load(path)
        return target


def of_the_model(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model: it lacks what changes nothing, and one initializer."""
    config = {name: v for name, v in config.items() if name not in ("num_threads", "hash_seed")}
    if not isinstance(config["initializer"], init.TruncatedNormal):
        return config
    same = {name: config[name] for name in ("dim", "name", "seed", "initializer")}

    def fill(keys: Any, values: Any) -> None:
        values[:] = Table(**same).find_or_insert(keys)

    return {**config, "initializer": init.Custom(fn=fill)}


def _save(saving: Saving) -> Table:
    saving.table.save(saving.folder + "/0")
    return saving.load(saving.folder + "/0")


def _save_compressed(saving: Saving) -> Table:
    saving.table.save(saving.folder + "/0", codec="zstd")
    return saving.load(saving.folder + "/0")


def _save_async(saving: Saving) -> Table:
    handle = saving.table.save_async(saving.folder + "/0", max_copy_bytes=1)
    handle.wait()
    return saving.load(saving.folder + "/0")


def _save_async_and_go_on(saving: Saving) -> Table:
    """What is saved is what the table was, so the model stays where it is."""
    before = copy.deepcopy(saving.table)
    handle = saving.table.save_async(saving.folder + "/0")
    Program(saving.config["dim"], 2).go_on([saving.table])
    handle.wait()
    loaded = saving.load(saving.folder + "/0")
    saving.table = before
    return loaded


def _chain(saving: Saving, *, is_async: bool = False) -> list[str]:
    paths = [f"{saving.folder}/{number}" for number in range(3)]
    saving.table.save(paths[0])
    for path, codec in zip(paths[1:], ("none", "zstd"), strict=True):
        saving.go_on()
        if is_async:
            saving.table.save_async(path, delta=True).wait()
        else:
            saving.table.save_delta(path, codec=codec)  # type: ignore[arg-type]
    return paths


def _save_delta(saving: Saving) -> Table:
    return saving.load(_chain(saving)[-1])


def _save_delta_async(saving: Saving) -> Table:
    return saving.load(_chain(saving, is_async=True))


def _delta_after_load(saving: Saving) -> Table:
    saving.table.save(saving.folder + "/0")
    saving.table = saving.load(saving.folder + "/0")
    saving.go_on()
    saving.table.save_delta(saving.folder + "/1")
    return saving.load(saving.folder + "/1")


def _compact(saving: Saving) -> Table:
    compact(_chain(saving)[-1], saving.folder + "/whole")
    return saving.load(saving.folder + "/whole")


def _reshard(saving: Saving) -> Table:
    reshard(_chain(saving)[-1], saving.folder + "/parts", world_size=3)
    return saving.load(saving.folder + "/parts")


def _export(saving: Saving) -> Table:
    made = saving.target()
    made.clear()
    for batch in saving.table.export(batch_size=7):
        made.upsert(batch.keys, batch.weights, batch.state or None)
    made.update_count, made.log_decay = saving.table.update_count, saving.table.log_decay
    made.learning_rate = saving.table.learning_rate
    return made


def _state_dict(saving: Saving) -> Table:
    apart = ("dim", "hash_seed", "owned_groups")
    options = {name: value for name, value in saving.config.items() if name not in apart}
    dim = saving.config["dim"]
    modules = HashEmbedding(dim, **options), HashEmbedding(dim, **options)
    modules[0].table, modules[1].table = saving.table, saving.target()
    file = io.BytesIO()
    torch.save(modules[0].state_dict(), file)
    file.seek(0)
    modules[1].load_state_dict(torch.load(file))
    modules[1].table.learning_rate = saving.table.learning_rate  # which torch's modules have not
    return modules[1].table


WAYS: dict[str, Callable[[Saving], Table]] = {
    "save": _save,
    "save compressed": _save_compressed,
    "save_async": _save_async,
    "save_async beside updates": _save_async_and_go_on,
    "save_delta": _save_delta,
    "save_delta, async": _save_delta_async,
    "save_delta after load": _delta_after_load,
    "compact": _compact,
    "reshard": _reshard,
    "copy": lambda saving: copy.copy(saving.table),
    "deepcopy": lambda saving: copy.deepcopy(saving.table),
    "pickle": lambda saving: pickle.loads(pickle.dumps(saving.table)),
    "export": _export,
    "state_dict": _state_dict,
}
COPIES = ("copy", "deepcopy", "pickle")
WITHOUT_METADATA = ("export",)
"""What leaves out what eviction keeps of keys."""
INTO = ("new", "used", "itself")
SWITCHES = {"isa": _ext.available_isas(), "way": list(WAYS), "into": INTO}


def is_legal(row: Mapping[str, str]) -> bool:
    """Whether the values of some or all settings and switches go together."""
    into, way = row.get("into", "new"), row.get("way", "save")
    if into != "new" and way in COPIES:
        return False
    if into == "itself" and way in ("export", "state_dict", "save_async beside updates"):
        return False
    if "shared" in row.get("default", "zeros") and way == "export":
        return False
    if row.get("admission", "none") != "none" and way == "export":
        return False  # it has rows alone
    if row.get("eviction_groups") == "4" and row.get("max_rows") == "none":
        return False
    if row.get("owned_groups") == "all" and (
        row.get("eviction_groups") == "none" or row.get("max_rows") == "none"
    ):
        return False
    if row.get("eviction", "none") != "none" and (
        row.get("max_rows") == "none" or way in WITHOUT_METADATA
    ):
        return False
    optimizer = FORMS[row["optimizer"]] if "optimizer" in row else None
    options = DECAYS[row.get("decay", "")]
    if optimizer is None or not options:
        return True
    return has_fields(optimizer, options) and (
        not options.get("catch_up") or is_a_product(optimizer, **options)
    )


def has_fields(optimizer: Any, options: Mapping[str, Any]) -> bool:
    """Whether an optimizer has such settings."""
    return {field.name for field in fields(optimizer)} >= set(options)


def config_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of Table of a combination."""
    config = {name: values[row[name]] for name, values in SETTINGS.items()}
    decay, clip = config.pop("decay"), config.pop("clip")
    return {**config, "optimizer": replace(config["optimizer"], **decay, **clip)}
