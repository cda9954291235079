"""Fixtures of the tests of pages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from one_rank import world_of_one

warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A process group of one rank."""
    with world_of_one():
        yield
