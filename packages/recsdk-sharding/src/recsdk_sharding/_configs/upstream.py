"""Others' settings for who gets a row and who loses it: Rec SDK's, and torchrec's virtual tables'.

What they ask for is translated where tables can do it, and refused by its name where not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
)

__all__ = [
    "AdmitAndEvictConfig",
    "AdmitAndEvictPolicyType",
    "ShowClickParams",
    "asked_of_admission",
    "asked_of_virtual_table",
]

_BY_COUNT = "with max_rows, eviction=Evict.lfu(half_life=...) makes the least frequent ids leave"
_BY_TIME = 'with max_rows, eviction=Evict.lru(by="time") makes the ids leave that came longest ago'


class AdmitAndEvictPolicyType(enum.Enum):
    """By what Rec SDK's tables admit and evict ids."""

    NONE = 0
    POLICY_COUNT = 1
    POLICY_SHOWCLICK = 2


@dataclass(kw_only=True)
class ShowClickParams:
    """Rec SDK's settings of admission and eviction by shows and clicks; refused if they are used.

    Raises TypeError for what is no number.
    """

    alpha: float = 1.0
    """What a show adds to an id's score."""
    beta: float = 0.0
    """What a click adds."""
    admit_threshold: float = 0.0
    """The score from which on an id has a row."""
    evict_percentage: float = 0.0
    """The part of ids that leave each time, the lowest scores first."""
    score_decay: float = 1.0
    """By what scores are multiplied each time."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"ShowClickParams: {name} must be a number, got {value!r}")


@dataclass(kw_only=True)
class AdmitAndEvictConfig:
    """Rec SDK's settings of who gets a row, and who loses it; `admit_and_evict_config` of a config.

    A table takes one that asks for nothing. It refuses what it cannot do by name: ids are neither
    admitted by count, nor do they expire. Raises TypeError and ValueError as there.

    >>> AdmitAndEvictConfig(admit_threshold=3).is_feature_admit_enabled()
    True
    """

    admit_threshold: int = -1
    """How often an id has to come before it has a row; -1: once."""
    not_admitted_default_value: float = 0.0
    """What other ids read."""
    evict_threshold: int = 0
    """Seconds without the id after which it leaves; 0: it stays."""
    evict_step_interval: int = 0
    """Steps from one look to the next at who leaves."""
    showclick_params: ShowClickParams = field(default_factory=ShowClickParams)
    """For POLICY_SHOWCLICK."""
    policy_type: AdmitAndEvictPolicyType = AdmitAndEvictPolicyType.POLICY_COUNT
    """Which of them counts."""

    def __post_init__(self) -> None:
        for name, lowest in (
            ("admit_threshold", -1),
            ("evict_threshold", 0),
            ("evict_step_interval", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"AdmitAndEvictConfig: {name} must be an int, got {value!r}")
            if value < lowest:
                raise ValueError(
                    f"AdmitAndEvictConfig: {name} must be at least {lowest}, got {value}"
                )
        for name, kind in (
            ("not_admitted_default_value", float),
            ("showclick_params", ShowClickParams),
            ("policy_type", AdmitAndEvictPolicyType),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"AdmitAndEvictConfig: {name} must be of {kind.__name__}, got "
                    f"{getattr(self, name)!r}"
                )

    def is_feature_admit_enabled(self) -> bool:
        """Whether ids are admitted by count."""
        return self._is_by_count() and self.admit_threshold != -1

    def is_feature_evict_enabled(self) -> bool:
        """Whether ids expire."""
        return self._is_by_count() and self.evict_threshold > 0

    def is_feature_filter_enabled(self) -> bool:
        """Whether the config asks for anything."""
        by_score = self.policy_type == AdmitAndEvictPolicyType.POLICY_SHOWCLICK
        return by_score or self.is_feature_admit_enabled() or self.is_feature_evict_enabled()

    def _is_by_count(self) -> bool:
        return self.policy_type == AdmitAndEvictPolicyType.POLICY_COUNT


def asked_of_admission(config: AdmitAndEvictConfig | None) -> str | None:
    """What a config asks for that tables cannot do, and what to do; None: nothing.

    Raises TypeError for what is no such config.
    """
    if config is None:
        return None
    if not isinstance(config, AdmitAndEvictConfig):
        raise TypeError(
            f"admit_and_evict_config must be an AdmitAndEvictConfig, got {type(config).__name__}"
        )
    if not config.is_feature_filter_enabled():
        return None
    if config.is_feature_admit_enabled():
        what = f"admit_threshold={config.admit_threshold}"
        advice = "every id has a row from its first occurrence on; leave it at -1"
    elif config.is_feature_evict_enabled():
        what = f"evict_threshold={config.evict_threshold}"
        advice = f"ids do not expire; leave it at 0: {_BY_TIME}"
    else:
        what = "policy_type=POLICY_SHOWCLICK"
        advice = "batches carry no shows and clicks; take AdmitAndEvictPolicyType.NONE"
    return f"admit_and_evict_config has {what}, and {advice}"


def asked_of_virtual_table(policy: Any) -> str | None:
    """What a policy of torchrec's virtual tables asks for, and what to do; None: nothing."""
    if policy is None or isinstance(policy, NoEvictionPolicy):
        return None
    thresholds = [getattr(policy, name, 0) for name in ("eviction_threshold", "eviction_ttl_mins")]
    known = {
        CountBasedEvictionPolicy: _BY_COUNT,
        TimestampBasedEvictionPolicy: _BY_TIME,
        CountTimestampMixedEvictionPolicy: f"{_BY_COUNT}; {_BY_TIME}",
        FeatureL2NormBasedEvictionPolicy: "no id leaves for the norm of its row",
        FeatureScoreBasedEvictionPolicy: "batches carry no scores of ids",
    }
    by_score = isinstance(policy, FeatureScoreBasedEvictionPolicy)
    asks = policy.enable_eviction if by_score else any(thresholds)
    if type(policy) in known and not asks:
        return None
    advice = known.get(type(policy), "eviction=Evict.lru() or Evict.lfu(...) says who leaves")
    return (
        f"virtual_table_eviction_policy is a {type(policy).__name__}, whose thresholds go by other "
        f"things than the room that there is; leave it out: {advice}"
    )
