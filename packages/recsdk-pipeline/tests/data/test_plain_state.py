"""States of data: kept as they are, refused by name if they cannot be, and never code."""

from __future__ import annotations

import ast
import base64
import collections
import importlib.util
import json
import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsdk_core import CheckpointError
from recsdk_pipeline._internal.plain_state import from_plain, to_plain
from recsdk_pipeline._internal.position import Progress

Place = collections.namedtuple("Place", "file line")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(["$tuple", "$", "\ud800"])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.just("$dict")
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return len(one) == len(other) and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


@given(STATES)
def test_states_come_back_as_they_were(state: Any) -> None:
    assert same(from_plain(to_plain(state, "state"), "state"), state)


def test_arrays_and_tensors_come_back() -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = [
        generator.get_state(), torch.zeros(0, 3), torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([[True, False]]), torch.arange(6).reshape(2, 3).t(),
        torch.tensor(1 + 2j).conj(),
    ]  # fmt: skip
    for tensor in tensors:
        found = from_plain(to_plain({"t": tensor}, "state"), "state")["t"]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.resolve_conj())
    for array in [np.arange(6, dtype=np.uint64).reshape(2, 3).T, np.float32(2.5), np.array("x")]:
        found = from_plain(to_plain([array], "state"), "state")[0]
        assert type(found) is type(array)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    state = random.Random(3).getstate()
    again = random.Random(4)
    again.setstate(from_plain(to_plain(state, "state"), "state"))
    assert again.getstate() == state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"at": [object()]}, r"state\['at'\]\[0\] is of type builtins.object, which is not kept"),
        (Place("x", 3), "state is of type .*Place"),
        ({1, 2}, "state is of type builtins.set"),
        (np.array([object()]), "state is an array of objects"),
        (torch.zeros(2, device="meta"), "state is a .* tensor of torch.float32 on meta"),
        (torch.zeros(2).to_sparse(), "state is a torch.sparse_coo tensor"),
        (2**10_000, "state must have at most 8192 bits, got 10001"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(state: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        to_plain(state, "state")


def test_depth_has_a_limit_both_ways() -> None:
    for wrap in (lambda inner: [inner], lambda inner: {0: (inner,)}):
        state: Any = "x"
        for _ in range(50):
            state = wrap(state)
        assert same(from_plain(to_plain(state, "state"), "state"), state)
        for _ in range(60):
            state = wrap(state)
        with pytest.raises(ValueError, match="nests lists, tuples and dicts deeper than 100"):
            to_plain(state, "state")
    for count in (101, 100_000):
        with pytest.raises(CheckpointError, match="no state that was saved"):
            from_plain(b"[" * count + b"]" * count, "state")


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._folder),)


class Data:
    position: Any = 0

    def state_dict(self) -> Any:
        return self.position

    def load_state_dict(self, state: Any) -> None:
        self.position = state


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_in_a_state_is_not_read(tmp_path: Path, protocol: int) -> None:
    payload = pickle.dumps(Hostile(tmp_path / "made"), protocol)
    array = np.array([Hostile(tmp_path / "made")], dtype=object)
    np.save(tmp_path / "array.npy", array, allow_pickle=True)
    as_array = base64.b64encode((tmp_path / "array.npy").read_bytes()).decode()
    data = Data()
    progress = Progress(data)
    for raw in (payload, json.dumps({"$array": as_array}).encode(), Hostile(tmp_path / "made")):
        with pytest.raises(CheckpointError, match=r"data.rank_0 (is no state|must be bytes)"):
            progress.load_state_dict({"num_batches_trained": 3, "data.rank_0": raw})
    assert (data.position, progress.num_batches) == (0, 0)
    assert not (tmp_path / "made").exists()


@given(st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.sampled_from(["AAAA", "float32", "nan"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["$tuple", "$dict", "$float", "$bytes", "$array", "$scalar", "$tensor",
                         "$file", "x"]), inner, max_size=2),
    max_leaves=8,
))  # fmt: skip
def test_any_other_json_is_a_checkpoint_error_or_data(value: Any) -> None:
    try:
        found = from_plain(json.dumps(value).encode(), "state")
    except CheckpointError:
        return
    to_plain(found, "state")


REFUSED = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib",
           "yaml", "pickletools", "copyreg")  # fmt: skip
PACKAGES = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")


def problems_of(source: str) -> list[str]:
    """Calls and imports through which bytes of a file may become code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            found += _problems_of_call(node)
        found += [name for name in names if name.split(".")[0] in REFUSED]
    return found


def _problems_of_call(call: ast.Call) -> list[str]:
    given = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
    name = ast.unparse(call.func)
    is_unsafe = (
        name in ("eval", "exec", "__import__")
        or (name == "torch.load" and given.get("weights_only") is not True)
        or (name in ("np.load", "numpy.load") and given.get("allow_pickle") is not False)
        or given.get("allow_pickle") is True
        or given.get("weights_only") is False
    )
    return [ast.unparse(call)] if is_unsafe else []


def test_no_source_can_read_a_pickle() -> None:
    count = 0
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for folder in spec.submodule_search_locations:
            for path in Path(folder).rglob("*.py"):
                count += 1
                assert problems_of(path.read_text()) == [], path
    assert count > 100


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import dill as d", "torch.load(f)",
        "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)",
        "eval(text)", "from yaml import load",
    ],
)  # fmt: skip
def test_each_way_would_be_found(source: str) -> None:
    assert len(problems_of(source)) == 1
    assert problems_of("torch.load(f, weights_only=True); model.eval()") == []
