"""Few combinations of settings that have every two values of different settings together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import TypeAlias

Choice: TypeAlias = tuple[str, str]
"""A setting and the name of one of its values."""
Rule: TypeAlias = Callable[[Mapping[str, str]], bool]
"""Whether values of some or all settings go together; one that knows too few says yes."""


def covering(
    settings: Mapping[str, Sequence[str]],
    is_legal: Rule,
    apart: Collection[Collection[str]] = (),
    by_cost: Collection[str] = (),
) -> list[dict[str, str]]:
    """Combinations of all settings: each legal pair of values is in one of them at least.

    But for pairs of two settings `apart`, of which the combinations have those that come.

    Greedy: a combination starts from a pair that none has yet, and takes of each further setting
    the value that adds most such pairs, or the rarest so far of those that do. Of settings
    `by_cost`, which list their cheapest value first, it takes the cheapest of those. The same
    settings give the same combinations. Raises ValueError if a value goes with nothing, or a pair
    with no combination.
    """
    missing = {frozenset(pair): None for pair in pairs_of(settings, is_legal, apart)}
    lost = {(n, v) for n in settings for v in settings[n]} - {c for pair in missing for c in pair}
    if lost:
        raise ValueError(f"no other value goes with {sorted(lost)}")
    found: list[dict[str, str]] = []
    uses: Counter[Choice] = Counter()
    places = {(name, v): place for name in by_cost for place, v in enumerate(settings[name])}
    while missing:
        start = dict(sorted(next(iter(missing))))
        row = next(_completed(start, settings, is_legal, missing, {**uses, **places}), None)
        if row is None:
            raise ValueError(f"no combination has {start}")
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
        uses.update(row.items())
        found.append({name: row[name] for name in settings})
    return found


def pairs_of(
    settings: Mapping[str, Sequence[str]], is_legal: Rule, apart: Collection[Collection[str]] = ()
) -> Iterator[tuple[Choice, Choice]]:
    """Every two values of different settings that go together, but for those of two `apart`."""
    for one, other in combinations(settings, 2):
        if any(one in two and other in two for two in apart):
            continue
        for values in product(settings[one], settings[other]):
            if is_legal(dict(zip((one, other), values, strict=True))):
                yield (one, values[0]), (other, values[1])


def _completed(
    row: dict[str, str],
    settings: Mapping[str, Sequence[str]],
    is_legal: Rule,
    missing: Mapping[frozenset[Choice], None],
    costs: Mapping[Choice, int],
) -> Iterator[dict[str, str]]:
    """The row with a value of every setting: what adds most missing pairs first, by its cost."""
    left = [name for name in settings if name not in row]
    if not left:
        yield row
        return
    name = left[0]

    def rank(value: str) -> tuple[int, int]:
        gain = sum(frozenset([(name, value), chosen]) in missing for chosen in row.items())
        return -gain, costs.get((name, value), 0)

    for value in sorted(settings[name], key=rank):
        longer = {**row, name: value}
        if is_legal(longer):
            yield from _completed(longer, settings, is_legal, missing, costs)
