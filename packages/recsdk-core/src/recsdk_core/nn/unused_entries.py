"""Names of entries that `load_state_dict` does not use, with what to do about them."""

from __future__ import annotations

__all__ = ["UnusedEntry"]


class UnusedEntry(str):
    """A name for `unexpected_keys`: equal to the plain one, but torch's error adds advice to it.

    A module cannot raise that advice itself: torch does not tell it whether loading is strict, and
    raises a module's messages in either case. But torch formats the names.
    """

    def __new__(cls, name: str, advice: str = "") -> UnusedEntry:
        """`advice`: what the entry is, and what to do with it."""
        made = super().__new__(cls, name)
        made._advice = advice
        return made

    _advice: str

    def __format__(self, spec: str) -> str:
        return format(f"{self!s} ({self._advice})", spec)
