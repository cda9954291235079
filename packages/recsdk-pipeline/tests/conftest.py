"""Hypothesis profiles for the tests of this package; see recsdk_core.testing."""

from recsdk_core.testing import register_profiles

register_profiles()
