"""Hypothesis profiles, chosen by RECSDK_TEST_PROFILE; see recsdk_core.testing."""

from recsdk_core.testing import register_profiles

register_profiles()
