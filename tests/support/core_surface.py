"""What the public callables of recsdk_core are called with, when one argument is odd."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odd_arguments import Surface, folder, new_place
from recsdk_core import (
    Admit,
    Bags,
    CombineBlock,
    Evict,
    Index,
    JoinedBags,
    RecsdkError,
    Shuffle,
    Table,
    VectorParts,
    VectorStretches,
    checkpoint,
    cut_bags,
    init,
    map_joined,
    nn,
    optim,
    serving,
    simulation,
)
from recsdk_core.predicates import Kept, Predicate

__all__ = ["CORE"]


def _keys() -> Any:
    return np.array([1, 2, 3])


def _rows() -> Any:
    return np.ones((3, 2), np.float32)


def _table(**settings: Any) -> Table:
    table = Table(2, **{"optimizer": optim.SGD(lr=0.5), **settings})
    table.upsert(np.array([1, 2, 7]), _rows())
    return table


def _finished(result: Any) -> Any:
    """A save under way, once it is done: what it has written so far differs from call to call."""
    if isinstance(result, checkpoint.SaveHandle):
        result.wait()
    return result


def _evicting(**settings: Any) -> Any:
    table = Table(2, max_rows=10, **{"eviction": Evict.lru(by="time"), **settings})
    if table.eviction is not None and table.eviction.by == "time":
        table.time = 1
    return table


def _index() -> Index:
    index = Index(max_rows=10, eviction=Evict.lru())
    index.map(np.array([1, 2, 7]), insert=True)
    return index


def _index_by(**rules: Any) -> Index:
    return Index(**{"max_rows": 10, **rules})


def _bags(table: Table) -> Bags:
    return Bags(*table.map(_keys(), insert=False), np.array([0, 1, 3]))


@functools.cache
def _saved() -> str:
    path = new_place()
    _table().save(path)
    return path


@functools.cache
def _frozen() -> str:
    path = new_place()
    serving.freeze(_saved(), path)
    return path


def _saved_trace() -> str:
    path = f"{new_place()}.npz"
    np.savez(path, ids=_keys(), times=_keys(), scores=np.ones(3, np.float32), clicks=_keys())
    return path


def _described() -> str:
    path = f"{new_place()}.json"
    told = {"format": simulation.DESCRIPTION_FORMAT, "rows": 0, "columns": []}
    Path(path).write_text(json.dumps(told))
    return path


def _two() -> list[Table]:
    return [_table(name="a"), _table(name="b")]


def _joined(tables: list[Table]) -> JoinedBags:
    rows, outcomes = map_joined(tables, _keys(), np.array([1, 2]), insert=False)
    one = np.array([1, 1])
    return JoinedBags(rows, outcomes, one, np.array([1, 2]), np.array([0, 2]))


def _parts() -> VectorParts:
    zero, one = np.array([0]), np.array([1])
    three = np.arange(3, dtype=np.int32)
    return VectorParts(zero, zero, np.array([2]), one, zero, zero, np.array([3]), three)


def _tensor_keys() -> Any:
    return torch.tensor([1, 2, 3])


def _embedding(**settings: Any) -> nn.HashEmbedding:
    return nn.HashEmbedding(None, 2, optimizer=torch.optim.SGD, **settings)


def _embedding_bag() -> nn.HashEmbeddingBag:
    return nn.HashEmbeddingBag(None, 2, optimizer=torch.optim.SGD)


def _row_optimizer() -> nn.RowOptimizer:
    return nn.RowOptimizer(nn.HashEmbedding(None, 2).parameters(), torch.optim.SGD, lr=0.1)


def _handle() -> Any:
    return _table().save_async(new_place())


def _leavers() -> Any:
    return _table().leavers()


def _kept() -> Kept:
    return Kept.by_rule({"evict_step": _keys()}, 5, Evict.lru())


def _state(held: Any) -> Any:
    """What a table or an index holds; of other things nothing."""
    if isinstance(held, (list, tuple)):
        return [_state(each) for each in held]
    if isinstance(held, torch.nn.Module):
        table = getattr(held, "table", None)
        return _state(table) if isinstance(table, Table) else None
    if isinstance(held, Table):
        rows = {
            int(key): weights.tobytes()
            for batch in held.export()
            for key, weights in zip(batch.keys, batch.weights, strict=True)
        }
        settings = held.name, held.learning_rate, held.update_count, held.log_decay, held.time
        return rows, settings, held.optimizer, held.decided(), held.stats().outcomes
    if isinstance(held, Index):
        return [each.tolist() for each in held.keys_and_rows()], held.decided(), held.time
    return None


def _looked_up() -> Any:
    module = nn.HashEmbedding(None, 2)
    optimizer = nn.RowOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    module(_tensor_keys())
    optimizer.zero_grad()
    module(_tensor_keys())
    return module


_VALUES: dict[str, Callable[..., Any]] = {
    "keys": _keys,
    "insert": lambda: True,
    "return_outcomes": lambda: False,
    "values": _rows,
    "gradients": _rows,
    "offsets": lambda: np.array([0, 1, 3]),
    "grad": lambda: _rows()[:2],
    "bags": _bags,
    "max_norm": lambda: 1.0,
    "num_rows": lambda: 10,
    "step": lambda: 1,
    "key": lambda: 1,
    "path": new_place,
    "source": _saved,
    "optimizer": lambda: optim.Adam(),
    "eviction": lambda: Evict.lru(),
    "max_rows": lambda: 10,
    "dim": lambda: 2,
    "initializer": init.Constant,
    "name": lambda: "new",
    "Table.evict.max_rows": lambda: 1,
    "Table.check_replaceable.what": lambda: "name",
    "Table.load.name": lambda: None,
    "Table.load.path": _saved,
    "Table.learning_rate.value": lambda: 0.5,
    "Table.log_decay.value": lambda: 0.0,
    "Table.update_count.value": lambda: 1,
    "Table.time.value": lambda: 4,
    "Table.save_delta.path": lambda table: (table.save(new_place()), new_place())[1],
    "Table.owned_groups": lambda: (0, 1),
    "Table.eviction_groups": lambda: 1,
    "Table.hash_seed": lambda: 1,
    "Table.num_threads": lambda: 1,
    "Index.eviction_groups": lambda: 1,
    "Index.owned_groups": lambda: (0, 1),
    "Index.make_rows": lambda: print,
    "Index.evict.max_rows": lambda: 1,
    "Index.time.value": lambda: 4,
    "Index.assign.eviction": lambda: None,
    "Index.metadata.rows": lambda: np.array([0, 1]),
    "Index.note_changed.rows": lambda: np.array([0, 1]),
    "Admit.kind": lambda: "count",
    "Admit.n": lambda: 3,
    "Admit.count.n": lambda: 3,
    "Admit.count_sketch.n": lambda: 3,
    "Admit.count_sketch.max_bytes": lambda: 600_000,
    "Admit.probability.p": lambda: 0.5,
    "threshold": lambda: 1.0,
    "Admit.threshold": lambda: None,
    "Admit.parts": tuple,
    "Default.constant.value": lambda: 0.5,
    "Evict.order": lambda: "lfu",
    "Evict.half_life": lambda: 3.0,
    "Evict.expiring.ttl": lambda: 5,
    "Evict.expiring.rare_ttl": lambda: 3,
    "Evict.expiring.rare_count": lambda: 2,
    "Evict.function.places": lambda: lambda step: step,
    "Evict.with_churn.steps": lambda: 5,
    "init.Custom.fn": lambda: print,
    "init.Uniform.low": lambda: 0.0,
    "init.Uniform.high": lambda: 1.0,
    "optim.from_torch.optimizer_class": lambda: torch.optim.SGD,
    "optim.from_torch.kwargs": lambda: {"lr": 0.1},
    "rows": lambda: np.arange(3),
    "outcomes": lambda: np.zeros(3, np.uint8),
    "weights": lambda: np.ones(3, np.float32),
    "pooling": lambda: "sum",
    "num_pieces": lambda: np.array([1, 1]),
    "num_keys": lambda: np.array([1, 2]),
    "starts": lambda: np.array([0, 2]),
    "JoinedBags.offsets": lambda: None,
    "JoinedBags.is_mean": lambda: None,
    "IndexLeavers.free_rows.count": lambda: 0,
    "Shuffle.num_rows": lambda: 3,
    "Shuffle.seed": lambda: 1,
    "Shuffle.write.columns": lambda: [([_keys()], [np.zeros(3, np.int64)])],
    "checkpoint.Checkpoint.table": lambda: "table",
    "checkpoint.Checkpoint.table.name": lambda: "table",
    "checkpoint.Checkpoint.blocks.table": lambda: 0,
    "checkpoint.Checkpoint.record_blocks.table": lambda: 0,
    "checkpoint.Checkpoint.rows_file.table": lambda: 0,
    "rank": lambda: 0,
    "checkpoint.chain_of.path": _saved,
    "checkpoint.open_checkpoint.path": _saved,
    "checkpoint.SaveHandle.wait.timeout": lambda: 60.0,
    "checkpoint.SaveHandle.result.timeout": lambda: 60.0,
    "checkpoint.diff.a": lambda: checkpoint.chain_of(_saved()),
    "checkpoint.diff.b": lambda: checkpoint.chain_of(_saved()),
    "checkpoint.reshard.world_size": lambda: 2,
    "combine_gradients.blocks": lambda: [
        CombineBlock(
            bags=Bags(_keys() - 1, np.zeros(3, np.uint8)), column=0, width=2, start=0, num_sums=3
        )
    ],
    "combine_gradients.grad": _rows,
    "packed": lambda: np.zeros(6, np.float32),
    "lengths": lambda: np.array([1, 1, 1]),
    "num_bags": lambda: [1, 2],
    "count_keys.num_keys": lambda: 3,
    "num_shards": lambda: 2,
    "files.file_to_read.path": lambda: f"{_saved()}/manifest.json",
    "hash_strings.bytes": lambda: np.frombuffer(b"odd", np.uint8),
    "array": _rows,
    "columns": lambda: [np.ones(3, np.float32)] * 2,
    "matrix": _rows,
    "join_offsets.offsets": lambda: [np.array([0, 1]), None],
    "join_offsets.num_keys": lambda: np.array([1, 1]),
    "join_rows.parts": lambda: tuple(np.array([n]) for n in (0, 3, 0, 0, 0)),
    "out": lambda: np.zeros(3, np.int64),
    "lay_out_vectors.counts": lambda: np.array([1, 2]),
    "stretches": lambda: VectorStretches(np.array([0, 1]), np.array([2, 2]), np.array([0, 1])),
    "num_processes": lambda: 2,
    "multiple": lambda: 4,
    "tables": _two,
    "map_joined.counts": lambda: np.array([1, 2]),
    "calls": lambda: [(_table(), _keys())],
    "pool_tables.calls": lambda: [(table := _table(), [(_bags(table), np.zeros((2, 2), "f"), 0)])],
    "update_tables.calls": lambda: [(t := _table(), [(_bags(t), np.zeros((2, 2), "f"), 0)])],
    "pool_serving.calls": list,
    "serving.pool_serving.calls": list,
    "leases": lambda: None,
    "release_leases.leases": lambda: [_table().lease(), None],
    "pool_joined.tables": _two,
    "pool_joined.bags": lambda: _joined(_two()),
    "pool_joined.shape": lambda: (6,),
    "pool_joined.out": lambda: None,
    "update_joined.bags": lambda: _joined(_two()),
    "update_joined.grad": lambda: np.ones(6, np.float32),
    "parts": _parts,
    "matrices": lambda: [_rows()],
    "map_joined.num_pieces": lambda: None,
    "predicates.Kept.by_rule.metadata": lambda: {"evict_step": _keys()},
    "predicates.Kept.by_rule.rule": lambda: Evict.lru(),
    "predicates.Kept.column.name": lambda: "step",
    "predicates.Predicate.text": lambda: "idle > 3",
    "predicates.Predicate.matches.kept": _kept,
    "predicates.Predicate.require.metadata": lambda: ["evict_step"],
    "predicates.Predicate.require.of": lambda: "table 'odd'",
    "predicates.sources_of.metadata": lambda: ["evict_step"],
    "read_bags.words": lambda: cut_bags(_keys(), np.array([1, 1, 1]), [1, 2], 1).words,
    "read_bags.num_words": lambda: cut_bags(_keys(), np.array([1, 1, 1]), [1, 2], 1).num_words,
    "read_bags.num_features": lambda: [2],
    "read_bags.every_key_is_a_bag": lambda: [False],
    "serving.FrozenManifest.table.name": lambda: "table",
    "serving.FrozenManifest.table.where": lambda: "there",
    "serving.ServingTable.path": _frozen,
    "serving.open_frozen.path": _frozen,
    "serving.open_tables.path": _frozen,
    "nn.close_exported.path": _frozen,
    "serving.open_tables.tables": lambda: ["table"],
    "serving.ServingTable.follow.location": lambda: folder(),
    "serving.ServingTable.follow.interval_seconds": lambda: 60.0,
    "target": new_place,
    "serving.freeze.dtype": lambda: "float32",
    "set_isa.name": lambda: "baseline",
    "set_num_threads.count": lambda: 2,
    "simulation.Trace.num_distinct.sample": lambda: 1.0,
    "simulation.Trace.of_arrays.ids": _keys,
    "simulation.open_trace.path": _saved_trace,
    "simulation.read_description.path": _described,
    "simulation.simulate.trace": lambda: simulation.Trace.of_arrays(_keys()),
    "simulation.simulate.sizes": lambda: [2],
    "simulation.simulate.rules": lambda: {"lru": Evict.lru()},
    "simulation.simulate.step_ids": lambda: 2,
    "embedding_dim": lambda: 2,
    "nn.HashEmbedding.optimizer": lambda: torch.optim.SGD,
    "nn.HashEmbedding.eviction": lambda: None,
    "nn.HashEmbedding.forward.keys": _tensor_keys,
    "nn.HashEmbedding.from_pretrained.keys": _tensor_keys,
    "nn.HashEmbedding.from_pretrained.weights": lambda: torch.ones(3, 2),
    "nn.HashEmbeddingBag.forward.keys": _tensor_keys,
    "nn.HashEmbeddingBag.forward.offsets": lambda: torch.tensor([0, 1]),
    "nn.HashEmbeddingBag.from_pretrained.keys": _tensor_keys,
    "nn.HashEmbeddingBag.from_pretrained.weights": lambda: torch.ones(3, 2),
    "nn.RowOptimizer.params": lambda: nn.HashEmbedding(None, 2).parameters(),
    "nn.RowOptimizer.optimizer_class": lambda: torch.optim.SGD,
    "nn.RowOptimizer.add_param_group.param_group": lambda: {
        "params": list(nn.HashEmbedding(None, 2).parameters())
    },
    "nn.RowOptimizer.load_state_dict.state_dict": lambda: _row_optimizer().state_dict(),
    "nn.ServingEmbedding.table": lambda: serving.ServingTable(_frozen()),
    "nn.ServingEmbeddingBag.table": lambda: serving.ServingTable(_frozen()),
    "nn.ServingEmbedding.forward.keys": _tensor_keys,
    "nn.ServingEmbeddingBag.forward.keys": _tensor_keys,
    "nn.ServingEmbeddingBag.forward.offsets": lambda: torch.tensor([0, 1]),
    "nn.bag_offsets.keys": _tensor_keys,
    "nn.bag_offsets.offsets": lambda: torch.tensor([0, 1]),
    "nn.bag_offsets.include_last_offset": lambda: False,
    "nn.freeze.model": lambda: torch.nn.Sequential(_embedding()),
    "nn.freeze.folder": new_place,
    "nn.l2.module": _looked_up,
}


def _counting(kind: Callable[..., Any], **settings: Any) -> Any:
    """With a rule that goes by counts and clicks."""
    return kind(admission=Admit.show_click(threshold=1.0), **settings)


_FRACTION: dict[str, Any] = {"fraction": 0.5, "max_rows": None}
_TOGETHER: dict[str, Callable[[], dict[str, Any]]] = {
    "Index.record_groups": lambda: {"admission": Admit.count(3, max_records=64)},
    **{
        f"{kind}.{call}.fraction": lambda: _FRACTION
        for kind in ("Index", "Table")
        for call in ("evict", "would_evict")
    },
    **{
        f"Index.map.{name}": lambda name=name: {
            "self": _index_by(eviction=Evict.lru(by="time")),
            "times": 3,
            name: 3,
        }
        for name in ("times", "now")
    },
    **{
        f"Index.map.{name}": lambda name=name: {"self": _counting(_index_by), name: 3}
        for name in ("counts", "clicks")
    },
    **{
        f"Table.{call}.{name}": lambda name=name: {"self": _counting(_table), name: 3}
        for call in ("map", "find_or_insert")
        for name in ("counts", "clicks")
    },
    "Table.upsert.clicks": lambda: {
        "self": _evicting(eviction=Evict.show_click(decay=0.5)),
        "clicks": 3,
    },
    **{
        f"nn.{kind}.forward.times": lambda kind=kind: {
            "self": getattr(nn, kind)(2, max_rows=10, eviction=Evict.lru(by="time")),
            "times": 3,
        }
        for kind in ("HashEmbedding", "HashEmbeddingBag")
    },
    **{
        f"nn.{kind}.forward.{name}": lambda kind=kind, name=name: {
            "self": _counting(getattr(nn, kind), embedding_dim=2),
            name: 3,
        }
        for kind in ("HashEmbedding", "HashEmbeddingBag")
        for name in ("counts", "clicks")
    },
    **{
        f"serving.{name}.shards": lambda: {"shards": [0]}
        for name in ("ServingTable", "open_tables")
    },
}


CORE = Surface(
    package="recsdk_core",
    receivers={
        "Table": _table,
        "Index": _index,
        "Index.time": lambda: Index(max_rows=10, eviction=Evict.lru(by="time")),
        **dict.fromkeys(
            ("Table.map", "Table.find_or_insert", "Table.upsert", "Table.time"), _evicting
        ),
        **dict.fromkeys(
            ("Table.evict", "Table.would_evict"), lambda: _evicting(eviction=Evict.lru())
        ),
        "IndexLeavers": lambda: _index().leavers(),
        "Leavers": _leavers,
        "Shuffle": lambda: Shuffle(3, 1),
        "checkpoint.Checkpoint": lambda: checkpoint.open_checkpoint(_saved()),
        "checkpoint.SaveHandle": _handle,
        "Evict": lambda: Evict.lru(),
        "nn.HashEmbedding": _embedding,
        "nn.HashEmbeddingBag": _embedding_bag,
        "nn.RowOptimizer": _row_optimizer,
        "nn.ServingEmbedding": lambda: nn.ServingEmbedding(serving.ServingTable(_frozen())),
        "nn.ServingEmbeddingBag": lambda: nn.ServingEmbeddingBag(serving.ServingTable(_frozen())),
        "predicates.Kept": _kept,
        "predicates.Predicate": lambda: Predicate("idle > 3"),
        "serving.FrozenManifest": lambda: serving.open_frozen(_frozen()),
        "serving.ServingTable": lambda: serving.ServingTable(_frozen()),
        "simulation.Trace": lambda: simulation.Trace.of_arrays(_keys()),
    },
    values=_VALUES,
    together=_TOGETHER,
    state=_state,
    finished=_finished,
    signatures={
        "Bags": ("rows", "outcomes", "offsets", "weights", "pooling"),
        "JoinedBags": (
            *("rows", "outcomes", "num_pieces", "num_keys", "starts", "offsets", "is_mean"),
        ),
    },
    called={
        **dict.fromkeys(
            (
                *("path", "source", "target", "folder", "location"),
                *("checkpoint.diff.a", "checkpoint.diff.b"),
            ),
            r"path|chain|odd|No such file",
        ),
        "keep": "predicate",
        "where": "predicate",
        "text": "predicate",
        "calls": "each call|^TypeError: keys|^ValueError: keys",
        "places": "function",
        "Evict.with_churn.steps": "churn_steps",
        "Evict.with_churn.max_records": "churn_records",
        "every": "expire_every",
        "columns": "a? column|parts|stretches|matrix must have",
        "matrices": "^(Type|Value)Error: (vectors|out) ",
        "Table.load.name": "has no table",
        "checkpoint.Checkpoint.table.name": "has no table",
        **dict.fromkeys(("rows", "lengths", "num_keys", "counts"), "outcomes|bags|lengths|keys"),
        "JoinedBags.num_keys": "starts",
        "map_joined.tables": "counts must have one element for each table",
        "lay_out_vectors.counts": "count",
        "lay_out_vectors.num_processes": "processes",
        "Table.apply_gradients.keys": "gradients must have shape",
        "Table.upsert.keys": "values must have shape",
        "serving.ServingTable.pool.keys": "weights must have shape",
        "serving.FrozenManifest.table.name": "there is no table",
        "read_bags.num_features": "features|num_words",
        "read_bags.num_words": "words",
        "serving.open_tables.tables": "table",
        "serving.open_tables.token": "another freeze",
        "set_isa.name": "instruction set",
        "simulation.simulate.sizes": "at least one size",
        "update_joined.grad": "do not lie within the array",
        "tables": "each call must start|one for each table|bags must have num_pieces",
        "nn.RowOptimizer.optimizer_class": "optimizer",
        "optim.from_torch.optimizer_class": "optimizer",
        "optim.from_torch.kwargs": "argument",
        "optimizer_kwargs": "argument",
        "Index.cut.changes_only": "changes",
        "Index.metadata.rows": "row number",
        "Index.note_changed.rows": "row number",
        "simulation.open_trace.column": "there is no",
        "simulation.open_trace.time": "there is no",
        "simulation.open_trace.score": "there is no",
        "simulation.open_trace.clicks": "there is no",
        "timeout": "has not ended",
        "nn.HashEmbedding.from_pretrained.weights": "values",
        "nn.HashEmbeddingBag.from_pretrained.weights": "values",
    },
    errors=(TypeError, ValueError, RecsdkError, OSError, ImportError),
    left_out={
        r"(pool|update)_tables\(calls=number\)": "numbers within",
        r"(Admit|Default|Evict)\(\w+=number\)": "the functions that make them take these",
        r"testing\..*": "its strategies and reference table are for tests",
        r"(Lease|IndexCut)": "made by methods only",
        r"(Leavers|IndexLeavers|checkpoint\.SaveHandle)": "made by methods only",
        r"nn\.(function|joined)\..*": "for frameworks, which pass what the others made",
        r"nn\.(gather_features|pool_features|SharedTraining\..*)": "the same",
        r"predicates\.(Kept\..*|sources_of|Predicate\.(require|matches))": "tables call them",
        r"nn\.RowOptimizer\((params|param_group|state_dict|closure|set_to_none)=.*": "torch checks",
        r"nn\.RowOptimizer\.\w+\(.*": "torch's own class checks these",
        r".*=nested tensor\)": "a sequence of none: torch raises when its items are asked for",
        r"Table\.check_replaceable": "its argument is for messages",
        r"Shuffle\(num_rows=2\*\*.*": "takes 16 GiB",
        r".*Manifest\.table\(where=.*": "it is for messages",
        r"checkpoint\.Checkpoint\.rows_file": "it reads when it is entered",
        r"simulation\.Trace\.of_arrays\(.*=tensor with gradient\)": "the message ends with torch's",
        r"checkpoint\.Checkpoint\.record_blocks": "of tables with admission",
        r"nn\.HashEmbeddingBag": "its settings are those of HashEmbedding",
        r"nn\.\w+\.begin(_squares)?": "the same",
        r".*Manifest\.from_bytes": "the fuzzers of tests/fuzz call it",
        r"serving\.FrozenFileEntry\.path_of": "for those who write files",
    },
)
