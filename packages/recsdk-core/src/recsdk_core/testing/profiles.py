"""Hypothesis profiles: a seeded sample for every day, and the full search."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["register_profiles"]


def register_profiles() -> None:
    """Registers the profiles "ci" and "full" and loads the one that RECSDK_TEST_PROFILE names.

    "ci", the default, draws a fixed sample, the same in every run; "full" draws 250 instead
    of 15, at random. Raises ValueError for another name.
    """
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile(
        "ci",
        max_examples=15,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=slow,
    )
    settings.register_profile(
        "full",
        max_examples=250,
        stateful_step_count=50,
        deadline=None,
        print_blob=True,
        suppress_health_check=slow,
    )
    name = os.environ.get("RECSDK_TEST_PROFILE", "ci")
    if name not in ("ci", "full"):
        raise ValueError(f"RECSDK_TEST_PROFILE must be 'ci' or 'full', got {name!r}")
    settings.load_profile(name)
