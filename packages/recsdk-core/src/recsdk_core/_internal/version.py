"""The version of this package, in one place: the build reads it from here."""

from __future__ import annotations

__all__ = ["__version__", "check_compiled_version"]

__version__ = "0.1.0"


def check_compiled_version(compiled: str) -> None:
    """Raises ImportError if the compiled part belongs to another version of the package."""
    if compiled != __version__:
        raise ImportError(
            f"recsdk_core {__version__} found its compiled part _ext of version {compiled}; "
            f"reinstall with: pip install --force-reinstall recsdk-core=={__version__}"
        )
