"""Fixtures of the package's tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from rank_pool import RankPool

from recsdk_core.testing import register_profiles

register_profiles()
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for tests over several ranks, at most 5."""
    pool = RankPool(5)
    yield pool
    pool.close()
