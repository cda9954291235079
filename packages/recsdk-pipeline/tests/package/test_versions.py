"""The guard at import names what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import recsdk_pipeline
from recsdk_pipeline._internal.version import layer_problem


@pytest.mark.parametrize("found", ["0.1.0", "0.1.7", "0.1.0rc1"])
def test_fitting_versions_pass(found: str) -> None:
    assert layer_problem(found) is None


@pytest.mark.parametrize("found", ["0.0.9", "0.2.0", "1.0"])
def test_other_versions_are_named_with_the_line_to_install(found: str) -> None:
    problem = layer_problem(found)
    assert problem is not None
    assert f"found {found}" in problem
    assert 'pip install "recsdk-sharding>=0.1,<0.2"' in problem


def test_missing_layer_is_named() -> None:
    assert "it is not installed" in str(layer_problem(None))


def test_package_imports_without_torch() -> None:
    program = "import sys, recsdk_pipeline.demo.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pipeline'"):
        recsdk_pipeline.Pipeline  # noqa: B018
