"""Launches kernels as on a device that is not here. Triton refuses one, a C compiler what starts
another.

Prints what each launch raised.
"""

from __future__ import annotations

from typing import Any

import compile_kernels
import torch
import triton
import triton.language as tl
from triton.runtime import driver

from recsdk_sharding.device.fused.launching import launch


@triton.jit
def _fill(values_N, WIDTH: tl.constexpr):
    tl.static_assert(WIDTH != 4, "four is refused")
    tl.store(values_N + tl.arange(0, WIDTH), tl.zeros([WIDTH], tl.float32))


def _start(source: Any, metadata: Any) -> Any:
    if 16 in source.constants.values():
        raise RuntimeError("sixteen is refused")


def main() -> None:
    device = compile_kernels.device_of(90)
    device.launcher_cls = _start
    driver.set_active(device)
    compiled: list[int] = []
    _fill.add_pre_run_hook(lambda values_N, WIDTH, **options: compiled.append(WIDTH))
    for width in (4, 4, 8, 16, 16):
        compiled.clear()
        try:
            launch(_fill, (1,), torch.ones(width), WIDTH=width)
        except Exception as error:
            print(width, len(compiled), type(error).__name__, repr(str(error)))


if __name__ == "__main__":
    main()
