"""Names of users in pictures."""

from __future__ import annotations

__all__ = ["picture_text"]


def picture_text(name: str) -> str:
    """A name that matplotlib writes as it is: as no formula, and in legends too.

    A legend leaves out what begins with an underscore; so a space goes before it.
    """
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
