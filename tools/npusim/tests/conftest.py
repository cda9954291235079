"""The tests' process has the simulated device, asynchronously, from the start."""

from __future__ import annotations

import os
import sys

assert "torch" not in sys.modules, "torch must be imported after the environment is set"
os.environ.update(RECSDK_SIM_NPU="1", RECSDK_SIM_NPU_ASYNC="1")
