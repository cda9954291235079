"""URLs of what a file system has found."""

from __future__ import annotations

from typing import Any


def url_of(path: str, source: str, fs: Any) -> str:
    """The URL of a file at `path` of `fs`, which was opened for the URL `source`.

    A chain such as "zip://*.parquet::s3://bucket/clicks.zip" stays one.
    """
    links = source.split("::")
    if len(links) == 1:
        return str(fs.unstrip_protocol(path))
    # Of a chain the first link that has a path names the files; a cache before it has none.
    at = next((n for n, link in enumerate(links) if "://" in link), len(links) - 1)
    protocol, mark, _ = links[at].partition("://")
    links[at] = f"{protocol}{mark}{path}" if mark and "://" not in path else path
    return "::".join(links)
