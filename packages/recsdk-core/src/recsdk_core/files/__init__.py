"""Paths of local files and folders, given as str, bytes or os.PathLike."""

from __future__ import annotations

from recsdk_core.files.paths import file_to_read, file_to_write, local_path

__all__ = ["file_to_read", "file_to_write", "local_path"]
