"""Jagged tensors with what comes with ids do as torchrec's, and keep it beside the ids."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsdk_sharding import (
    JaggedTensorWithCount,
    JaggedTensorWithData,
    JaggedTensorWithTimestamp,
    KeyedJaggedTensorWithCount,
    KeyedJaggedTensorWithData,
    KeyedJaggedTensorWithTimestamp,
    with_clicks,
)

CPU = torch.device("cpu")
NAMES = ["a", "b", "c"]
OF_KEYED = {
    KeyedJaggedTensorWithTimestamp: ("times", "timestamps", JaggedTensorWithTimestamp),
    KeyedJaggedTensorWithCount: ("counts", "counts", JaggedTensorWithCount),
    KeyedJaggedTensorWithData: ("scores", None, JaggedTensorWithData),
}


def made(lengths: list[list[int]], kind: Any, values: torch.Tensor | None = None) -> Any:
    """Values count up; what comes with each is ten times as much."""
    flat = torch.tensor([n for of_feature in lengths for n in of_feature], dtype=torch.int64)
    values = torch.arange(int(flat.sum())) if values is None else values
    name, argument, _ = OF_KEYED[kind]
    data = (10 * values).to(torch.float32 if name == "scores" else torch.int64)
    keys = NAMES[: len(lengths)]
    return kind(keys, values, lengths=flat, weights=values / 2, **{argument or name: data})


def agrees(found: Any, plain: Any, kind: type, name: str) -> None:
    """The same as torchrec's, with data that follows the values."""
    assert type(found) is kind
    for method in ("values", "lengths", "weights"):
        assert torch.equal(getattr(found, method)(), getattr(plain, method)())
    assert torch.equal(found.data[name].to(torch.int64), 10 * found.values())


@given(st.data())
@pytest.mark.parametrize("kind", OF_KEYED)
def test_what_torchrecs_does_with_features_happens_to_data(kind: type, data: Any) -> None:
    bags = data.draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 3), min_size=bags, max_size=bags)
    lengths = data.draw(st.lists(row, min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, 3))]
    cut = data.draw(st.integers(0, len(lengths)))
    name, argument, of_feature = OF_KEYED[kind]
    given_ = made(lengths, kind)
    plain = KeyedJaggedTensor(
        given_.keys(), given_.values(), lengths=given_.lengths(), weights=given_.weights()
    )
    agrees(given_.permute(list(order)), plain.permute(list(order)), kind, name)
    segments = [cut, len(lengths) - cut]
    for found, expected in zip(given_.split(segments), plain.split(segments), strict=True):
        agrees(found, expected, kind, name)
    for feature in NAMES[: len(lengths)]:
        agrees(given_[feature], plain[feature], of_feature, name)
        agrees(given_.to_dict()[feature], plain[feature], of_feature, name)
    for same in (given_.to(CPU), given_.flatten_lengths(), copy.deepcopy(given_)):
        agrees(same, plain, kind, name)
    agrees(pickle.loads(pickle.dumps(given_)), plain, kind, name)
    joined = kind.from_jt_dict({f: given_[f] for f in NAMES[: len(lengths)]})  # type: ignore[attr-defined]
    agrees(joined, plain, kind, name)
    agrees(kind.concat(given_.split([1] * len(lengths))), plain, kind, name)  # type: ignore[attr-defined]
    if argument is not None:
        assert torch.equal(getattr(given_, argument), given_.data[name])
    given_["a"].to(CPU)


class Stream:
    """Notes what is told of it."""


def test_streams_learn_of_data_and_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, _: seen.append(id(self)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    batch = made([[1, 2]], KeyedJaggedTensorWithTimestamp)
    batch.record_stream(Stream())
    batch["a"].record_stream(Stream())
    assert id(batch.timestamps) in seen
    pinned = batch.pin_memory()
    agrees(pinned, batch, KeyedJaggedTensorWithTimestamp, "times")
    assert pinned.timestamps.data_ptr() != batch.timestamps.data_ptr()


BASE: dict[str, Any] = {
    "values": torch.arange(5),
    "lengths": torch.tensor([2, 3]),
    "offsets": torch.tensor([0, 2, 5]),
}
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (JaggedTensorWithTimestamp, {}),
    (KeyedJaggedTensorWithTimestamp, {"keys": ["a", "b"]}),
    (JaggedTensorWithData, {}),
    (KeyedJaggedTensorWithData, {"keys": ["a", "b"]}),
]


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_what_does_not_fit_is_refused(kind: Any, more: dict[str, Any]) -> None:
    argument = "timestamps" if "Timestamp" in kind.__name__ else "times"
    fitting = {**BASE, **more, argument: torch.arange(5)}
    assert kind(**fitting).data["times"].tolist() == list(range(5))
    assert kind(**{**fitting, argument: None}).data == {}
    for name in ("values", "weights", "lengths", "offsets", argument):
        with pytest.raises(TypeError, match=f"{kind.__name__}: {name} must be a tensor, got str"):
            kind(**{**fitting, name: "invalid"})
    with pytest.raises(ValueError, match=rf"{argument} must have the shape of values, \(5,\), got"):
        kind(**{**fitting, argument: torch.tensor([1, 2])})
    with pytest.raises(ValueError, match=rf"{argument} must be torch.int64, got torch.int32"):
        kind(**{**fitting, argument: torch.arange(5, dtype=torch.int32)})


def test_a_dictionary_has_data_of_all_features_or_of_none() -> None:
    kind = KeyedJaggedTensorWithTimestamp
    with pytest.raises(ValueError, match="there must be a feature, got none"):
        kind.from_jt_dict({})
    lengths = torch.tensor([1])
    timed = JaggedTensorWithTimestamp(torch.tensor([3]), lengths=lengths, timestamps=lengths)
    plain = JaggedTensor(torch.tensor([4]), lengths=lengths)
    with pytest.raises(ValueError, match=r"timestamps come with some features, and \['b'\] have"):
        kind.from_jt_dict({"a": timed, "b": plain})
    assert kind.from_jt_dict({"b": plain}).timestamps is None
    batches = [kind.from_jt_dict({"a": timed}), KeyedJaggedTensor.from_jt_dict({"b": plain})]
    with pytest.raises(ValueError, match=r"concat: timestamps come with some features, and .*'b'"):
        kind.concat(batches)


def test_ids_have_the_clicks_of_their_samples() -> None:
    lengths = torch.tensor([2, 0, 1, 1, 1, 0])
    plain = KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=lengths)
    timed = KeyedJaggedTensorWithTimestamp(
        ["a", "b"], torch.arange(5), torch.arange(5), None, lengths
    )
    for batch in (plain, timed):
        for labels in (torch.tensor([3, 5, 7]), torch.tensor([3.0, 5.0, 7.0])):
            found = with_clicks(batch, labels)
            expected = type(batch) if batch is timed else KeyedJaggedTensorWithData
            assert type(found) is expected
            assert found.data["clicks"].tolist() == [3, 3, 7, 3, 5]
            assert torch.equal(found.lengths(), lengths)
            assert ("times" in found.data) == (batch is timed)
    assert torch.equal(found.timestamps, torch.arange(5))
    assert with_clicks(found, torch.zeros(3)) is found
    with pytest.raises(ValueError, match=r"one for each of 3 samples, got \(2,\)"):
        with_clicks(plain, torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="click_labels must be whole numbers, got [0-9.]+;"):
        with_clicks(plain, torch.tensor([1.0, 0.5, 0.0]))
    varying = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match=r"must have one batch size, .*, got \["):
        with_clicks(varying, torch.tensor([1, 0]))
