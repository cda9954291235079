"""The checkpoints of a folder, looked at again and again: which delta comes next in a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recsdk_core.checkpoint.columns import whole_tables
from recsdk_core.checkpoint.reading import Checkpoint, open_checkpoint_at
from recsdk_core.checkpoint.stores import Store, is_frozen, open_store
from recsdk_core.errors import CheckpointError

__all__ = ["ChainFolder", "Look", "Place"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A checkpoint of a chain."""

    hash: str
    """SHA-256 of its manifest."""
    base: str
    """That of the snapshot of its chain."""
    sequence: int
    """Deltas after that snapshot."""
    step: int | None
    """The caller's step."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a look at a folder has found."""

    next: Checkpoint | None
    """The delta that builds on the place that was asked for."""
    behind: int
    """Deltas that lie there, one on the other, from that place on."""
    problem: str | None
    """Why there is no next one, although the training has gone on."""


class ChainFolder:
    """A folder of checkpoints, by path or URL. Manifests are read once, and again when replaced."""

    def __init__(self, location: Any, table: str) -> None:
        """Raises CheckpointError for what is no folder of checkpoints.

        `table` is the name of the one that is followed. Chains without it may lie there as well.
        """
        self._table = table
        self._store = open_store(location)
        if self._store.has_manifest():
            raise CheckpointError(
                f"{self._store.location}: is itself a checkpoint; give the folder that it lies in"
            )
        self._store.children()
        self._known: dict[str, tuple[Any, Checkpoint | None]] = {}
        self._errors: dict[str, str] = {}
        self._first: set[str] | None = None  # hashes that the first look found
        self._way: dict[int, str] = {}  # by sequence, hashes of what led to the place

    @property
    def location(self) -> str:
        """Its path or URL."""
        return self._store.location

    def look(self, place: Place) -> Look:
        """Looks for what builds on a place. Raises CheckpointError if the folder cannot be read."""
        by_parent = self._deltas_by_parent()
        if self._first is None:
            self._first = {each.hash for each in self._found()}
        self._remember_way(place)
        fitting = by_parent.get(place.hash, {})
        if len(fitting) == 1:
            [found] = fitting.values()
            return Look(next=found, behind=_length(by_parent, place.hash), problem=None)
        if fitting:
            where = sorted(each.location for each in fitting.values())
            return Look(
                next=None,
                behind=1,
                problem=f"{len(fitting)} deltas build on delta {place.sequence}, which is served: "
                f"{', '.join(where)}; remove all but the right one",
            )
        return Look(next=None, behind=0, problem=self._gap(place))

    def _remember_way(self, place: Place) -> None:
        by_hash = {each.hash: each for each in self._found()}
        hash_of, sequence = place.hash, place.sequence
        while self._way.get(sequence) != hash_of:
            self._way[sequence] = hash_of
            found = by_hash.get(hash_of)
            if found is None or found.manifest.chain is None:
                return
            hash_of, sequence = found.manifest.chain.parent, sequence - 1

    def _branch(self, of_chain: list[Checkpoint]) -> str | None:
        """What tells that the training went back in the chain, and on from there."""
        for each in sorted(of_chain, key=_sequence):
            own = self._way.get(_sequence(each), each.hash)
            if own != each.hash and each.hash not in (self._first or ()):
                return (
                    f"{each.location} has come and is not the delta {_sequence(each)} that was "
                    "served: its training went back; freeze the end of the chain and open that"
                )
        return None

    def _gap(self, place: Place) -> str | None:
        """What tells that the chain goes on where this cannot follow."""
        known = self._found()
        of_chain = [each for each in known if _base(each) == place.base]
        if (said := self._branch(of_chain)) is not None:
            return said
        later = [each for each in of_chain if _sequence(each) > place.sequence]
        unread = "".join(f"; {error}" for error in self._errors.values())
        if later:
            first = min(later, key=_sequence)
            return (
                f"there is a gap in the chain: {first.location} is delta {_sequence(first)}, and "
                f"no delta builds on delta {place.sequence}, which is served{unread}; put it "
                "there, or freeze the end of the chain and open that"
            )
        if self._errors:
            return unread[2:]
        return next((said for each in known if (said := self._newer_chain(each, place))), None)

    def _newer_chain(self, other: Checkpoint, place: Place) -> str | None:
        """What tells of a checkpoint of the table, of a later chain that this does not follow."""
        is_of_table = any(t.name == self._table for t in whole_tables(other.manifest.tables))
        if not is_of_table or _base(other) == place.base:
            return None
        there, here = other.manifest.step, place.step
        # A delta that came since tells, also of a training that went back to an earlier step. A
        # snapshot may be of the chain that is followed, compacted.
        is_later = other.hash not in (self._first or ()) and other.manifest.chain is not None
        came, served = "has come", "served"
        if there is not None and here is not None:
            is_later = is_later or there > here
            came, served = f"is of step {there}", f"served, of step {here}"
        if not is_later:
            return None
        return (
            f"{other.location} {came} and is of another chain than what is {served}; freeze it "
            "and open that"
        )

    def _found(self) -> list[Checkpoint]:
        return [found for _, found in self._known.values() if found is not None]

    def _deltas_by_parent(self) -> dict[str, dict[str, Checkpoint]]:
        known, self._errors = {}, {}
        found: dict[str, dict[str, Checkpoint]] = {}
        for store in self._store.children():
            try:
                stamp, checkpoint = self._read(store)
            except CheckpointError as error:
                self._errors[store.address] = str(error)
                continue
            known[store.address] = (stamp, checkpoint)
            if checkpoint is not None and checkpoint.manifest.chain is not None:
                siblings = found.setdefault(checkpoint.manifest.chain.parent, {})
                siblings.setdefault(checkpoint.hash, checkpoint)
        self._known = known
        return found

    def _read(self, store: Store) -> tuple[Any, Checkpoint | None]:
        stamp = store.stamp()
        known = self._known.get(store.address)
        if known is not None and known[0] == stamp:
            return known
        if stamp is None:
            return None, None
        try:
            return stamp, open_checkpoint_at(store)
        except CheckpointError:
            if is_frozen(store):  # it may lie beside what it was made of
                return stamp, None
            raise


def _base(checkpoint: Checkpoint) -> str:
    chain = checkpoint.manifest.chain
    return checkpoint.hash if chain is None else chain.base


def _sequence(checkpoint: Checkpoint) -> int:
    chain = checkpoint.manifest.chain
    return 0 if chain is None else chain.sequence


def _length(by_parent: dict[str, dict[str, Checkpoint]], hash_of: str) -> int:
    """Deltas from a place on; where two build on one, the way of the first."""
    count = 0
    while following := by_parent.get(hash_of):
        hash_of = next(iter(following))
        count += 1
    return count
