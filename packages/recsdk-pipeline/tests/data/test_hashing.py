"""Keys of categories are the documented ones, however the values are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from recsdk_pipeline.data import category_key, category_keys


def signed(number: int) -> int:
    return number - ((number >> 63) << 64)


def expected_of(feature: str, values: list[str]) -> list[int]:
    seed = xxhash.xxh64_intdigest(feature.encode())
    return [signed(xxhash.xxh64_intdigest(each.encode(), seed=seed)) for each in values]


FORMS: dict[str, Callable[[list[str]], Any]] = {
    "list": lambda values: values,
    "string": lambda values: pa.array(values, pa.string()),
    "large string": lambda values: pa.array(values, pa.large_string()),
    "bytes": lambda values: pa.array([each.encode() for each in values], pa.binary()),
    "view": lambda values: pa.array(values, pa.string_view()),
    "slice": lambda values: pa.array(["before", *values, "after"])[1:-1],
    "chunks": lambda values: pa.chunked_array([values[:2], values[2:]], pa.string()),
}


@given(st.text(max_size=12), st.lists(st.text(max_size=12)), st.sampled_from(sorted(FORMS)))
@example("city", ["K\u00f6ln", "", "Bonn"], "list")
def test_category_keys_are_the_documented_ones(feature: str, values: list[str], form: str) -> None:
    expected = expected_of(feature, values)
    assert category_keys(feature, FORMS[form](values)).tolist() == expected
    assert [category_key(feature, each) for each in values] == expected


def test_what_is_no_array_of_strings() -> None:
    with pytest.raises(ValueError, match="values must have no nulls, got 1 of 2"):
        category_keys("city", pa.array(["Bonn", None]))
    with pytest.raises(TypeError, match="values must be strings or bytes, got int64"):
        category_keys("city", pa.array([1]))


def test_one_string_is_no_list_of_strings() -> None:
    with pytest.raises(TypeError, match="values must be a list of strings, got the string 'abc'"):
        category_keys("city", "abc")
