"""Local files and folders, by whatever stands for their paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from recsdk_core.checkpoint.stores import is_url

__all__ = ["file_to_read", "local_path"]


def local_path(path: Any) -> Path:
    """A str, bytes or os.PathLike as a Path; looks at nothing yet.

    Raises TypeError for anything else, ValueError for what names no local file: nothing at all, a
    URL, a zero character, characters that the file system cannot encode.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise TypeError(f"path must be a string, bytes or os.PathLike, got {kind}") from None
    if not text:
        raise ValueError("path is empty; give that of a local file or folder")
    if "\0" in text:
        raise ValueError(f"path must not have a zero character, got {text!r}")
    if is_url(text):
        raise ValueError(f"{text}: is a URL; copy what it names to a local place and give that")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"path {text!r} has characters that no file's name can have") from None
    return Path(text)


def file_to_read(path: Any) -> Path:
    """The local file of a path that holds something.

    Raises as `local_path`; FileNotFoundError, IsADirectoryError or another OSError for what cannot
    be read, and ValueError for an empty file and for a pipe or a device.
    """
    file = local_path(path)
    if file.is_dir():
        raise IsADirectoryError(f"{file}: is a folder; give the path of a file in it")
    if not file.exists():
        raise FileNotFoundError(f"{file}: there is no such file; look at the path for mistakes")
    if not file.is_file():
        raise ValueError(
            f"{file}: is a pipe or a device, which cannot be read twice; copy what it gives to "
            "a file"
        )
    if not file.stat().st_size:
        raise ValueError(f"{file}: is empty; was it written or copied to its end?")
    return file
