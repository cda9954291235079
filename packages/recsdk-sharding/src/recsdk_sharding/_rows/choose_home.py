"""Which home the rows of tables have."""

from __future__ import annotations

import torch

from recsdk_sharding._rows.engine import EngineHome
from recsdk_sharding._rows.home import RowHome
from recsdk_sharding.device.home import DeviceHome

__all__ = ["home_of"]


def home_of(device: torch.device | None) -> RowHome:
    """The home of rows of tables on a device; None: the cpu.

    On the cpu the engine keeps them. On meta there are none, and the home is the engine's too. On
    any other device, rows and optimizer state are tensors there.
    """
    if device is None or device.type in ("cpu", "meta"):
        return EngineHome(device or torch.device("cpu"))
    return DeviceHome(device)
