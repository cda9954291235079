"""What optional parts of the package need."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require"]


def require(module: str, *, extra: str, user: str) -> None:
    """Raises ImportError with the line to install if `module`, which `user` needs, is missing."""
    if find_spec(module) is None:
        raise ImportError(
            f"{user} needs {module}, which is not installed; run: "
            f'pip install "recsdk-core[{extra}]"'
        )
