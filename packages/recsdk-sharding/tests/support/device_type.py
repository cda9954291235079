"""Which type of device the tests of devices run on."""

from __future__ import annotations

import os

import pytest

IS_CUDA = bool(os.environ.get("RECSDK_TEST_CUDA_HARDWARE"))
DEVICE_TYPE = "cuda" if IS_CUDA else "npu"
on_npus_alone = pytest.mark.skipif(IS_CUDA, reason="needs the simulated NPU; make test")
