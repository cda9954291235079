"""Modules over frozen tables give what the trained model gives in evaluation mode."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import os
import pickle
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm_processes
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch._inductor.constant_folding import constant_fold
from torch.export import Dim, export

from recsdk_core import CheckpointError, Default, Outcome, Table, init, optim
from recsdk_core.checkpoint import open_checkpoint
from recsdk_core.nn import (
    HashEmbedding,
    HashEmbeddingBag,
    ServingEmbedding,
    ServingEmbeddingBag,
    close_exported,
    freeze,
    serving_modules,
)
from recsdk_core.serving import (
    FrozenManifest,
    ServingTable,
    freeze_tables,
    open_frozen,
    open_tables,
)
from recsdk_core.serving import freeze as freeze_checkpoint
from recsdk_core.serving.exported import ExportedTables

KEYS = torch.tensor([[5, 6, 7], [-1, 5, 2**62]])
WEIGHTS = torch.tensor([[1.0, 2.0, 0.5], [-1.0, 0.0, 3.0]])
ENDS = torch.tensor([0, 2, 2, 6])
OTHER = (KEYS.repeat(2, 1)[1:, :2] + 1, WEIGHTS.repeat(2, 1)[1:, :2], torch.tensor([0, 2, 6]))
OPS = torch.ops.recsdk
IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
_numbers = itertools.count()


class Model(nn.Module):
    """One of each, trained a little."""

    def __init__(self, mode: Any = "sum", padding_idx: int | None = None) -> None:
        super().__init__()
        kwargs: dict[str, Any] = {
            "optimizer": optim.Adam(lr=0.5, weight_decay=0.1),
            "initializer": init.Normal(),
            "default": Default.constant(-0.25) if padding_idx else Default.shared_rows(3),
            "padding_idx": padding_idx,
        }
        self.items = HashEmbedding(4, name="items", **kwargs)
        self.bags = HashEmbeddingBag(5, name="bags", mode=mode, include_last_offset=True, **kwargs)
        self.head = nn.Linear(4, 5)
        self(KEYS, WEIGHTS, ENDS).square().sum().backward()
        self.eval()

    def forward(
        self, keys: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        given = weights if self.bags.mode != "max" else None
        pooled = self.bags(keys, per_sample_weights=given) + self.head(self.items(keys).sum(1))
        return torch.cat([pooled, self.bags(keys.reshape(-1), ends)])


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(values: torch.Tensor) -> bytes:
    return values.detach().contiguous().view(torch.uint8).numpy().tobytes()


@given(
    data=st.data(),
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding_idx=st.sampled_from([None, 6, 2**64 - 1]),
    num_shards=st.sampled_from([1, 3]),
)
def test_a_frozen_model_gives_what_the_trained_one_gives(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    mode: str,
    padding_idx: int | None,
    num_shards: int,
) -> None:
    model = Model(mode, padding_idx)
    folder = tmp_path_factory.mktemp("model") / "served"
    served = freeze(model, folder, num_shards=num_shards)
    assert isinstance(served.items, ServingEmbedding)
    assert isinstance(served.bags, ServingEmbeddingBag)
    assert isinstance(model.items, HashEmbedding)
    keys = data.draw(st.lists(st.sampled_from([5, 6, 7, -1, 2**62, 8]), max_size=12))
    flat = torch.tensor(keys, dtype=torch.int64)
    ends = torch.tensor([0, *sorted(data.draw(st.sets(st.integers(0, len(keys))))), len(keys)])
    assert same(served.items(flat), model.items(flat))
    assert same(served.bags(flat, ends), model.bags(flat, ends))
    assert same(served.bags(flat, ends.int()), model.bags(flat, ends.int()))
    assert same(served(KEYS, WEIGHTS, ENDS), model(KEYS, WEIGHTS, ENDS))
    if mode != "max":
        weights = torch.linspace(-1, 1, len(keys))
        got = served.bags(flat, ends, weights)
        assert same(got, model.bags(flat, ends, weights))
    half = copy.deepcopy(model).bfloat16(), copy.deepcopy(served).bfloat16()
    assert same(half[0].items(flat), half[1].items(flat))


def test_freezing_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    """Its rows, its mode, and what counts for its next delta."""
    model = Model().train()
    model.items.table.save(tmp_path / "snapshot")
    model.items(torch.tensor([77]))
    rows = model.items.table.lookup(KEYS.reshape(-1))
    served = freeze(model, tmp_path / "served", dtype={"items": "int8", "bags": "float32"})
    assert (model.training, served.training) == (True, False)
    assert served.items.table.dtype == "int8"
    assert torch.equal(model.items.table.lookup(KEYS.reshape(-1)), rows)
    model.items.table.save_delta(tmp_path / "delta")
    assert open_checkpoint(tmp_path / "delta").manifest.tables[0].num_rows == 1
    assert open_frozen(tmp_path / "served").source is None
    assert served.head.weight is not model.head.weight


def test_a_module_under_two_names_stays_one(tmp_path: Path) -> None:
    model = nn.ModuleList([HashEmbedding(4, name="a"), HashEmbeddingBag(4, name="b")])
    model.append(model[0])
    served = freeze(model, tmp_path / "served")
    assert served[0] is served[2]
    assert [each.name for each in open_frozen(tmp_path / "served").tables] == ["a", "b"]
    assert isinstance(freeze(model[0], tmp_path / "one"), ServingEmbedding)


def test_nothing_of_a_table_is_in_state_dict_pickle_or_copy(tmp_path: Path) -> None:
    served = freeze(Model(), tmp_path / "served")
    assert set(served.state_dict()) == {"head.weight", "head.bias"}
    raw = pickle.dumps(served)
    assert str(tmp_path / "served").encode() in raw
    assert copy.deepcopy(served).items.table is served.items.table
    for other in (pickle.loads(raw), copy.deepcopy(served)):
        assert same(other(KEYS, WEIGHTS, ENDS), served(KEYS, WEIGHTS, ENDS))
    other.load_state_dict(served.state_dict())


@pytest.mark.parametrize("padding_idx", [6, None], ids=["constant", "shared"])
def test_opcheck(tmp_path: Path, padding_idx: int | None) -> None:
    served = freeze(Model(padding_idx=padding_idx), tmp_path / "served")
    items, bags = served.items, served.bags
    found = torch.library.opcheck(OPS.serving_lookup.default, (KEYS, 4, None, items.number_1))
    assert set(found.values()) == {"SUCCESS"}
    how = (3, "mean", True, None, 5, None, bags.number_1)
    args = (KEYS.reshape(-1), ENDS, WEIGHTS.reshape(-1), *how)
    assert set(torch.library.opcheck(OPS.serving_pool.default, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("mode", "padding_idx"), [("sum", 6), ("max", 6), ("mean", None)])
def test_compiled(tmp_path: Path, mode: str, padding_idx: int | None) -> None:
    """One compiled function serves other tables too."""
    torch._dynamo.reset()
    served = freeze(Model(mode, padding_idx), tmp_path / "served")
    run = torch.compile(served, fullgraph=True, backend="aot_eager", dynamic=True)
    for args in ((KEYS, WEIGHTS, ENDS), OTHER):
        with torch.no_grad():
            assert same(run(*args), served(*args))
    torch._dynamo.reset()


def test_one_compilation_serves_many_tables(tmp_path: Path) -> None:
    torch._dynamo.reset()
    many = []
    for number in range(10):
        module = HashEmbedding(4, name=f"t{number}", initializer=init.Normal())
        module(KEYS)
        many.append(freeze(module, tmp_path / str(number)))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda module, keys: module(keys), fullgraph=True, backend=counter)
    for module in many:
        assert same(run(module, KEYS), module(KEYS))
    assert counter.frame_count == 1
    torch._dynamo.reset()


EXPORTED = list(itertools.product([False, True], ["mean", "max"], [6, None]))


@pytest.mark.parametrize(  # each of them, or all together
    ("strict", "mode", "padding_idx"),
    EXPORTED if IS_FULL else [(False, "max", 6), (True, "mean", None)],
)
def test_exported(tmp_path: Path, strict: bool, mode: str, padding_idx: int | None) -> None:
    """Missing keys read the default, or rows that they share."""
    served = freeze(Model(mode, padding_idx), tmp_path / "served")
    assert (served.items.table.num_shared > 0) == (padding_idx is None)
    auto = Dim.DYNAMIC
    shapes = ({0: auto, 1: auto}, {0: auto, 1: auto}, {0: auto})
    program = export(served, (KEYS, WEIGHTS, ENDS), dynamic_shapes=shapes, strict=strict)
    _, outcomes = served.items.table.lookup(OTHER[0].reshape(-1), return_outcomes=True)
    assert {Outcome.FOUND, Outcome.MISSING} <= set(outcomes.tolist())
    for each in (program, program.run_decompositions()):
        assert same(each.module()(*OTHER), served(*OTHER))


LOADED = """
import sys, torch
import recsdk_core.nn
program = torch.export.load(sys.argv[1]).module()
inputs, expected = torch.load(sys.argv[2])
print(torch.equal(program(*inputs), expected))
"""


def test_a_freeze_that_another_replaces_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables would be those of the other, or of both."""
    folder, real = tmp_path / "served", serving_modules.freeze_tables

    def then_another(*args: Any, **options: Any) -> Any:
        written = real(*args, **options)
        monkeypatch.setattr(serving_modules, "freeze_tables", real)
        freeze(Model(), folder, overwrite=True)
        return written

    monkeypatch.setattr(serving_modules, "freeze_tables", then_another)
    with pytest.raises(CheckpointError, match="another freeze has replaced the one that was to be"):
        freeze(Model(), folder)
    ServingTable(folder, "bags").verify()


@pytest.mark.parametrize("way", ["open_tables", "freeze", "pickle"])
def test_tables_that_are_opened_while_others_are_frozen_are_of_one_freeze(
    tmp_path: Path, way: str
) -> None:
    """Threads freeze to one folder, each rows of its own."""
    folder, stop = tmp_path / "served", threading.Event()
    models = [constant_model(float(number)) for number in range(3)]
    freeze(models[0], folder)

    def keep_freezing(model: nn.Module) -> None:
        while not stop.is_set():
            with suppress(CheckpointError):  # it lost
                freeze(model, folder, overwrite=True)

    threads = [threading.Thread(target=keep_freezing, args=(model,)) for model in models[1:]]
    for thread in threads:
        thread.start()
    try:
        read_by_way(way, folder, models[0])
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def constant_model(value: float) -> nn.Module:
    """Three tables whose rows are all this number."""
    made = nn.ModuleList([HashEmbedding(2, name=name) for name in "abc"])
    for module in made:
        module.table.upsert(np.arange(4), np.full((4, 2), value, np.float32))
    return made.eval()


def read_by_way(way: str, folder: Path, own: nn.Module) -> None:
    raw = pickle.dumps([ServingTable(folder, name) for name in "abc"])
    for _ in range(30):
        if way == "open_tables":
            rows = [each.lookup(np.arange(4)) for each in open_tables(folder).values()]
        elif way == "pickle":
            try:
                rows = [each.lookup(np.arange(4)) for each in pickle.loads(raw)]
            except CheckpointError:  # another freeze came between them
                continue
        else:
            try:
                served = freeze(own, folder, overwrite=True)
            except CheckpointError:
                continue
            rows = [module(torch.arange(4)).numpy() for module in served]
            assert rows[0][0, 0] == 0
        assert len({float(value) for each in rows for value in each.reshape(-1)}) == 1


def test_tables_of_an_exported_program_are_of_one_freeze(tmp_path: Path) -> None:
    """Those of a later program are of what is there then."""
    folder = tmp_path / "served"
    for number in range(3):
        read = []
        for name in "abc":
            freeze(constant_model(float(10 * number + len(read))), folder, overwrite=True)
            place = json.dumps(("elsewhere", 7, str(folder), name, None, f"token {number}"))
            read.append(OPS.serving_lookup(torch.arange(4), 2, place, None))
        assert torch.equal(torch.stack(read), torch.full((3, 4, 2), 10.0 * number))
    with pytest.raises(CheckpointError, match=r"there is no table 'd'; it has \['a', 'b', 'c'\]"):
        OPS.serving_lookup(torch.arange(4), 2, place.replace('"c"', '"d"'), None)
    for older in (json.dumps(("elsewhere", 7, str(folder), "a", None)), "no JSON"):
        with pytest.raises(CheckpointError, match="by this version of recsdk-core; export the pro"):
            OPS.serving_lookup(torch.arange(4), 2, older, None)


class Freezing:
    """Freezes to a folder where a pickle of it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return frozen_of, (self.folder, next(_numbers))


def frozen_of(folder: Path, value: float) -> nn.Module:
    return freeze(constant_model(float(value)), folder, overwrite=True)


@given(names=st.lists(st.sampled_from("abc!"), max_size=7), apart=st.booleans())
@example(names=["a", "!", "b"], apart=True)
@example(names=["!", "b", "a"], apart=False)
def test_tables_of_a_pickle_are_of_one_freeze(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], apart: bool
) -> None:
    """Whether they were opened together or apart; "!" is another freeze while it is read."""
    folder = tmp_path_factory.mktemp("freezes") / "served"
    frozen_of(folder, -1.0)
    opened = open_tables(folder)
    parts: list[Any] = []
    for name in names:
        table = ServingTable(folder, name) if apart and name != "!" else opened.get(name)
        parts.append(Freezing(folder) if table is None else ServingEmbedding(table))
    raw = pickle.dumps(nn.ModuleList(parts) if "!" not in names else parts)
    if is_torn(names, apart):
        with pytest.raises(CheckpointError, match="freeze has replaced .* so table '[abc]'"):
            pickle.loads(raw)
        return
    loaded = pickle.loads(raw)
    read = [each for each, name in zip(loaded, names, strict=True) if name != "!"]
    rows = {float(value) for each in read for value in each(torch.arange(4)).reshape(-1)}
    assert len(rows) == min(len(read), 1)
    again = pickle.loads(pickle.dumps(read))  # what is there now
    assert all(each.table.manifest.token == open_frozen(folder).token for each in again)


def is_torn(names: list[str], apart: bool) -> bool:
    """Whether a freeze comes between the first and another table that a pickle has to open."""
    opened: dict[str, int] = {}
    freezes = 0
    for number, name in enumerate(names):
        freezes += name == "!"
        if name != "!":
            opened.setdefault(f"{name}{number if apart else ''}", freezes)
    return len(set(opened.values())) > 1


def damage(file: Path, how: str) -> None:
    whole = file.read_bytes()
    file.unlink()
    if how != "missing":
        file.write_bytes(b"\0" + whole[1:] if how == "changed" else whole[:-1])


@pytest.mark.parametrize("how", ["missing", "changed", "cut"])
@pytest.mark.parametrize("damaged", ["a", "b", "c"])
def test_an_exported_program_needs_the_tables_that_it_reads(
    tmp_path: Path, damaged: str, how: str
) -> None:
    """One that cannot be opened is refused where it is read, and opened once it can be."""
    folder = tmp_path / "served"

    def read(name: str) -> float:
        place = json.dumps(("elsewhere", 8, str(folder), name, None, "a token"))
        return float(OPS.serving_lookup(torch.arange(4), 2, place, None).unique())

    frozen_of(folder, 1.0)
    [entry] = open_frozen(folder).table(damaged, "")[1].files
    file = folder / entry.path
    whole = file.read_bytes()
    damage(file, how)
    with pytest.raises(CheckpointError, match=re.escape(entry.path)):
        read(damaged)  # the first to be asked for: nothing is open yet
    frozen_of(folder, 2.0)
    others = sorted({*"abc"} - {damaged})
    [entry] = open_frozen(folder).table(damaged, "")[1].files
    file = folder / entry.path
    whole = file.read_bytes()
    damage(file, how)
    assert [read(name) for name in others] == [2.0, 2.0]
    with pytest.raises(CheckpointError, match=re.escape(entry.path)):
        read(damaged)
    if how == "cut":  # the freeze is whole again
        file.write_bytes(whole)
        assert read(damaged) == 2.0
        frozen_of(folder, 3.0)
        assert [read(name) for name in "abc"] == [2.0] * 3
    else:
        frozen_of(folder, 3.0)
        with pytest.raises(CheckpointError, match="another freeze has replaced the one whose"):
            read(damaged)
        assert [read(name) for name in others] == [2.0, 2.0]
    assert close_exported(folder) == (3 if how == "cut" else 2)
    assert [read(name) for name in "abc"] == [3.0] * 3


def test_an_exported_program_opens_its_tables_anew_if_a_freeze_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "served"
    frozen_of(folder, 1.0)
    whole, opened = ExportedTables._of, list[str]()

    def of(self: ExportedTables, manifest: FrozenManifest, name: str) -> ServingTable:
        opened.append(name)
        if len(opened) == 2:
            frozen_of(folder, 2.0)
        return whole(self, manifest, name)

    monkeypatch.setattr(ExportedTables, "_of", of)
    for name in "abc":
        place = json.dumps(("elsewhere", 10, str(folder), name, None, "a token"))
        assert float(OPS.serving_lookup(torch.arange(4), 2, place, None).unique()) == 2.0
    assert close_exported(folder) == 3


def test_what_exported_programs_opened_is_closed(tmp_path: Path) -> None:
    """Files that another freeze has replaced take no place on the disk from then on."""
    folder = tmp_path / "served"
    frozen_of(folder, 1.0)
    token = open_frozen(folder).token
    for number in range(2):  # two programs
        place = json.dumps(("elsewhere", 9, str(folder), "a", None, f"program {number}"))
        OPS.serving_lookup(torch.arange(4), 2, place, None)
    frozen_of(folder, 2.0)
    gc.collect()
    assert token in Path("/proc/self/maps").read_text()
    assert close_exported(tmp_path / "other") == 0
    assert close_exported(folder) == 6
    gc.collect()
    assert token not in Path("/proc/self/maps").read_text()
    assert float(OPS.serving_lookup(torch.arange(4), 2, place, None).unique()) == 2.0
    assert close_exported(str(folder)) == 3


def test_an_exported_program_opens_its_files_in_another_process(tmp_path: Path) -> None:
    served = freeze(Model(), tmp_path / "served", num_shards=2)
    buffer = io.BytesIO()
    torch.export.save(export(served, (KEYS, WEIGHTS, ENDS), strict=False), buffer)
    (tmp_path / "program.pt2").write_bytes(buffer.getvalue())
    args = (KEYS, WEIGHTS, ENDS)
    torch.save((args, served(*args)), tmp_path / "data.pt")
    script, printed = tmp_path / "loaded.py", tmp_path / "printed"
    script.write_text(LOADED)
    files = tmp_path / "program.pt2", tmp_path / "data.pt"
    assert warm_processes.status_of(warm_processes.start(script, *files, output=printed)) == 0
    assert printed.read_text().split() == ["True"]


class ConstantKeys(nn.Module):
    """What a compiler could compute ahead, if the table stayed as it is."""

    def __init__(self, table: ServingTable) -> None:
        super().__init__()
        self.items = ServingEmbedding(table)
        self.bags = ServingEmbeddingBag(table)
        self.register_buffer("keys", torch.arange(4))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return (self.items(self.keys) + self.bags(self.keys.view(4, 1))) * scale


def test_modules_of_a_table_that_follows_serve_the_newest_version(tmp_path: Path) -> None:
    """So do copies, compiled functions, and programs that were exported here or elsewhere."""
    table = Table(dim=4, name="items")
    chain = tmp_path / "chain"
    table.upsert(np.arange(4), np.zeros((4, 4), dtype=np.float32))
    table.save(chain / "0")
    freeze_checkpoint(chain / "0", tmp_path / "served")
    served = ServingTable(tmp_path / "served")
    module = ConstantKeys(served)
    one = torch.ones(1)
    program = export(module, (one,), strict=False)
    ahead = export(module, (one,), strict=False).module()
    constant_fold(ahead)
    elsewhere = export(ConstantKeys(ServingTable(tmp_path / "served")), (one,), strict=False)
    forgotten = elsewhere.module()  # its own table is gone, as in another process
    del elsewhere
    gc.collect()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    every = [module, copy.deepcopy(module), compiled, program.module(), ahead, forgotten]
    assert [float(each(one).sum()) for each in every] == [0.0] * 6
    served.follow(chain, interval_seconds=0.005)
    assert copy.deepcopy(module).items.table is served
    for value in (1.0, 2.0):
        table.upsert(np.arange(4), np.full((4, 4), value, dtype=np.float32))
        table.save_delta(chain / str(int(value)))
        while served.stats().sequence != value:
            time.sleep(0.002)
        assert [float(each(one).sum()) for each in every] == [32 * value] * 6
    served.stop_following()
    torch._dynamo.reset()


def test_a_backward_to_weights_is_refused(tmp_path: Path) -> None:
    served = freeze(Model(), tmp_path / "served").bags
    weights = WEIGHTS.clone().requires_grad_()
    pooled = served(KEYS, per_sample_weights=weights)
    assert same(pooled, served(KEYS, per_sample_weights=WEIGHTS))
    with pytest.raises(RuntimeError, match="only read and has no gradient"):
        pooled.sum().backward()


def test_what_cannot_be_frozen_is_refused(tmp_path: Path) -> None:
    class Own(HashEmbedding):
        pass

    two = nn.Sequential(HashEmbedding(4, name="same"), HashEmbedding(4, name="same"))
    for model, message in (
        (nn.Linear(2, 2), "has no HashEmbedding.*call torchrec.s quantize_embeddings"),
        (nn.Sequential(HashEmbedding(4, max_norm=1.0)), "0 has max_norm=1.0"),
        (Own(4), "the model is a Own"),
        (two, "names of their own"),
    ):
        with pytest.raises(ValueError, match=message):
            freeze(model, tmp_path / "served")
    model = Model()
    with pytest.raises(ValueError, match="dtype must name the tables"):
        freeze(model, tmp_path / "served", dtype={"items": "int8"})
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="must be a recsdk_core.serving.ServingTable"):
        ServingEmbedding(model.items.table)  # type: ignore[arg-type]
    served = freeze(model, tmp_path / "served")
    with pytest.raises(RuntimeError, match="torch.jit.trace"):
        torch.jit.trace(served.items, (KEYS,))
    with pytest.raises(RuntimeError, match="torch.jit.script"):
        torch.jit.script(served.bags)
    with pytest.raises(ValueError, match="shape of keys"):
        served.bags(KEYS, per_sample_weights=WEIGHTS[:1])
    with pytest.raises(ValueError, match="offsets must ascend"):
        served.bags(KEYS.reshape(-1), ENDS[:3])
    with pytest.raises(ValueError, match="mode must be"):
        ServingEmbeddingBag(served.bags.table, mode="min")  # type: ignore[arg-type]


def test_tables_are_frozen_without_a_checkpoint(tmp_path: Path) -> None:
    table = Model().items.table
    freeze_tables([table], tmp_path / "served", dtype="bfloat16")
    served = ServingTable(tmp_path / "served")
    keys = np.array([5, 6, 404])
    wanted = torch.from_numpy(table.lookup(keys)).bfloat16().float()
    assert torch.equal(torch.from_numpy(served.lookup(keys)), wanted)
