"""A simulated Ascend NPU: torch device "npu" over host memory, and process group backend "hccl".

For development and tests only. torch loads it by itself (entry point `torch.backends`) if the
environment variable RECSDK_SIM_NPU is 1; it then stands in for the module `torch_npu` too.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

__all__ = ["autoload"]

_NOTICE = "recsdk-npusim: device 'npu' is a simulation over host memory; no Ascend hardware is used"


def autoload() -> None:
    """Registers the device if RECSDK_SIM_NPU=1; called by torch when it is imported.

    Prints once that it is a simulation; in a process that was started by another one that has
    printed it, not again. Raises RuntimeError if the real torch_npu is installed.
    """
    if os.environ.get("RECSDK_SIM_NPU") != "1":
        return
    if importlib.util.find_spec("torch_npu") is not None:
        raise RuntimeError(
            "RECSDK_SIM_NPU=1, but torch_npu is installed: a simulated NPU would hide the real "
            "one; unset RECSDK_SIM_NPU, or uninstall torch_npu"
        )
    _register()
    if os.environ.setdefault("RECSDK_SIM_NPU_PRINTED", "0") == "0":
        os.environ["RECSDK_SIM_NPU_PRINTED"] = "1"
        print(_NOTICE, file=sys.stderr, flush=True)


def _register() -> None:
    import torch

    from recsdk_npusim import library

    library.load()
    backend: Any = torch.utils.backend_registration
    backend.rename_privateuse1_backend("npu")

    from recsdk_npusim import autograd, device, hccl

    torch._register_device_module("npu", device)  # type: ignore[no-untyped-call]
    backend.generate_methods_for_privateuse1_backend()
    stand_in = ModuleType("torch_npu", "Stands in for torch_npu; see recsdk_npusim.")
    stand_in.__dict__.update(npu=device, __version__="0+simulation")
    stand_in.__spec__ = None
    sys.modules["torch_npu"] = stand_in
    hccl.register()
    autograd.bridge_gradients()
