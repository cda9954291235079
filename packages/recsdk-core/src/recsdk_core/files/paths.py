"""Paths of local files and folders, given as str, bytes or os.PathLike; which are URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

__all__ = ["file_to_read", "file_to_write", "is_url", "local_path"]

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)")


def is_url(path: str) -> bool:
    """Whether it is a URL of fsspec, not a path."""
    return _URL.match(path) is not None


def local_path(path: Any) -> Path:
    """The Path of a str, bytes or os.PathLike; does not look at the file system.

    Raises TypeError for anything else, ValueError for what cannot name a local file: an empty path,
    a URL, a zero character, characters that the file system cannot encode.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise TypeError(f"path must be a string, bytes or os.PathLike, got {kind}") from None
    if not text:
        raise ValueError("path is empty; give the path of a local file or folder")
    if "\0" in text:
        raise ValueError(f"path must not have a zero character, got {text!r}")
    if is_url(text):
        raise ValueError(f"{text}: is a URL; give a local path instead, and copy between the two")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise ValueError(f"path {text!r} has characters that no file's name can have") from None
    return Path(text)


def file_to_read(path: Any) -> Path:
    """The Path of a local file that is there and not empty.

    Raises what `local_path` raises; FileNotFoundError, IsADirectoryError, PermissionError or
    another OSError for what cannot be read; ValueError for an empty file, a pipe or a device.
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
    if not os.access(file, os.R_OK):
        raise PermissionError(f"{file}: must not be read; give another path or the right to it")
    if not file.stat().st_size:
        raise ValueError(f"{file}: is empty; was it written or copied to its end?")
    return file


def file_to_write(path: Any) -> Path:
    """The Path of a local file that can be made or written anew; ask before long work.

    Raises what `local_path` raises; FileNotFoundError without its folder, IsADirectoryError for a
    folder, PermissionError for what must not be written.
    """
    file = local_path(path)
    if file.is_dir():
        raise IsADirectoryError(f"{file}: is a folder; give the path of a file in it")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file}: there is no folder {file.parent}; make it first")
    place = file if file.exists() else file.parent
    if not os.access(place, os.W_OK):
        raise PermissionError(f"{file}: must not be written; give another path or the right to it")
    return file
