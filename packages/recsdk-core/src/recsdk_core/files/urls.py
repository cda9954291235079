"""Whether the URLs that a user gives can be opened at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

from recsdk_core._internal.extras import require
from recsdk_core.files.paths import is_url

__all__ = ["require_protocols"]

_NAME = re.compile("[a-z]{2,}")


def require_protocols(place: str) -> None:
    """Raises ValueError for a URL, or a chain of such, of a protocol that fsspec does not know, and
    ImportError, with what to install, for one whose library is missing. Paths are left alone.

    Looks at no store.
    """
    if not is_url(place):
        return
    require("fsspec", extra="fsspec", user=f"the URL {place}")
    for name in _protocols(place):
        _require_protocol(name, place)


def _require_protocol(name: str, place: str) -> None:
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(name)
    except ImportError as error:
        raise ImportError(
            f"{place}: the library for the protocol {name!r} is not installed; install it with "
            f"pip; fsspec says: {error}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{place}: the protocol {name!r} is not known to fsspec; look at the URL for mistakes, "
            "or install the library that brings it"
        ) from error


def _protocols(url: str) -> Iterator[str]:
    """As fsspec splits a chain: a link is a URL, a protocol alone, or a path."""
    links = url.split("::")
    for link in links:
        name, mark, _ = link.partition("://")
        if (mark and len(name) > 1) or (not mark and len(links) > 1 and _NAME.fullmatch(link)):
            yield name
