"""Fixtures of the package's tests."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator

import pytest
from device_type import IS_CUDA
from rank_pool import RankPool, npu_pool

from recsdk_core.testing import register_profiles

gc.disable()  # nothing that imports make is garbage
if not IS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton
register_profiles()
pytest.register_assert_rewrite("comparing")
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now: no collection need look at it
    gc.enable()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for tests over several ranks, at most 5."""
    pool = RankPool(5)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def npus() -> Iterator[RankPool]:
    """Processes with an NPU each, at most 5."""
    pool = npu_pool(5)
    yield pool
    pool.close()
