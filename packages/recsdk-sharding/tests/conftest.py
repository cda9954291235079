"""Fixtures of the package's tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from rank_pool import RankPool

warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for tests over several ranks, at most 4."""
    pool = RankPool(4)
    yield pool
    pool.close()
