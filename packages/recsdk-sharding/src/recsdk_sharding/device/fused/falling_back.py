"""Triton's kernels with torch's operators behind them, for what Triton does not compile here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from recsdk_core import BackendUnavailable
from recsdk_sharding.device.fused.launching import NotCompiled
from recsdk_sharding.device.kernel_choice import SETTING
from recsdk_sharding.device.kernels import note_kernel

__all__ = ["falling_back"]


def falling_back(run: Callable[..., Any], torchs: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, and `torchs` for the same arguments where one of its kernels does not compile.

    A RuntimeWarning tells of it, or BackendUnavailable is raised if RECSDK_DEVICE_KERNELS asks for
    Triton's kernels. Nothing that `run` was given has been written to by then.
    """

    @wraps(run)
    def run_or_fall_back(*args: Any) -> Any:
        try:
            return run(*args)
        except NotCompiled as error:
            _tell(error)
        note_kernel(torchs)
        return torchs(*args)

    return run_or_fall_back


_told: set[str] = set()


def _tell(error: NotCompiled) -> None:
    if os.environ.get(SETTING) == "triton":
        raise BackendUnavailable(
            f"{SETTING}=triton: {error}; install the triton that belongs to this torch, or unset "
            f"{SETTING}"
        ) from error
    if str(error) not in _told:
        warnings.warn(
            f"{error}; torch's operators run in its place, which takes longer; install the triton "
            f"that belongs to this torch, or set {SETTING}=torch",
            RuntimeWarning,
            stacklevel=3,
        )
        _told.add(str(error))
