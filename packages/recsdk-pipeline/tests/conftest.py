"""Hypothesis profiles for the tests of this package; see recsdk_core.testing."""

from __future__ import annotations

import gc

from recsdk_core.testing import register_profiles

register_profiles()


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now: no collection need look at it
