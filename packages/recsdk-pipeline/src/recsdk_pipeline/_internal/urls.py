"""URLs of what a file system has found."""

from __future__ import annotations

from collections.abc import Sequence

_MARKS = "*?["


def is_pattern(path: str) -> bool:
    """Whether it stands for all files that match it."""
    return any(mark in path for mark in _MARKS)


def urls_of(found: Sequence[str], source: str, path: str) -> list[str]:
    """The URLs of files found where the URL `source`, of `path`, leads.

    Files of this machine without a chain have their whole paths.

    `path` is a file, a folder or a pattern. What the URL says beside it stays: a host, as in
    "hdfs://name:8020/clicks", and a chain, such as "zip://*.parquet::s3://bucket/clicks.zip".
    """
    before, link, after = _naming(source)
    protocol, mark, _ = link.partition("://")
    if mark and protocol not in ("file", "local"):
        own = [_found_at(each, link, path) for each in found]
    elif before or after:
        own = [f"{protocol}{mark}{each}" if mark else each for each in found]
    else:
        own = list(found)
    return ["::".join([*before, each, *after]) for each in own]


def url_within(folder: str, name: str) -> str:
    """The URL of a file of the folder that a URL names."""
    before, link, after = _naming(folder)
    return "::".join([*before, _folder(link) + name, *after])


def _naming(source: str) -> tuple[list[str], str, list[str]]:
    """Of a chain the first link that has a path names the files; a cache before it has none."""
    links = source.split("::")
    at = next((n for n, link in enumerate(links) if "://" in link), len(links) - 1)
    return links[:at], links[at], links[at + 1 :]


def _folder(link: str) -> str:
    """The link, to which names of files can be added."""
    bare = link.rstrip("/")
    return link if bare.endswith(":") else f"{bare}/"  # of "zip://" every slash counts


def _found_at(found: str, link: str, path: str) -> str:
    """The link of a file, found where the link of `path` leads."""
    if found == path:
        return link
    fixed, tail = path.rstrip("/"), ""
    if is_pattern(path):
        first = min(path.index(mark) for mark in _MARKS if mark in path)
        fixed = path[: path.rfind("/", 0, first) + 1]
        tail = path[len(fixed) :]
    if not found.startswith(fixed) or not link.endswith(tail):
        return found if "://" in found else f"{link.partition('://')[0]}://{found}"
    return _folder(link.removesuffix(tail)) + found[len(fixed) :].lstrip("/")
