"""Others' settings for who gets a row and who loses it: Rec SDK's, and torchrec's virtual tables'.

What they ask for is translated where tables can do it, and refused by its name where not.
"""

from __future__ import annotations

import enum
import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
)

from recsdk_core import Admit, Default, Evict
from recsdk_sharding._configs.checking import int_of, is_one_of, number_of

__all__ = [
    "AdmitAndEvictConfig",
    "AdmitAndEvictPolicyType",
    "Rules",
    "ShowClickParams",
    "eviction_of_virtual_table",
    "rules_of_config",
]


class AdmitAndEvictPolicyType(enum.Enum):
    """By what Rec SDK's tables admit and evict ids."""

    NONE = 0
    POLICY_COUNT = 1
    POLICY_SHOWCLICK = 2


@dataclass
class ShowClickParams:
    """Rec SDK's settings of admission and eviction by shows and clicks.

    Raises TypeError for what is no number, ValueError for what is out of range.
    """

    alpha: float = 1.0
    """What a show adds to an id's score."""
    beta: float = 0.0
    """What a click adds."""
    admit_threshold: float = 0.0
    """The score from which on an id has a row; 0: all have."""
    evict_percentage: float = 0.0
    """The part of ids that leave each time, the lowest scores first, up to 1; 0: none."""
    score_decay: float = 1.0
    """By what scores are multiplied each time, 0 to 1."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            setattr(self, name, number_of(f"ShowClickParams: {name}", value))
        if not 0.0 <= self.admit_threshold < math.inf:
            raise ValueError(
                "ShowClickParams: admit_threshold must be a finite number from 0 on, got "
                f"{self.admit_threshold}"
            )
        for name in ("evict_percentage", "score_decay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"ShowClickParams: {name} must be 0 to 1, got {vars(self)[name]}")


@dataclass
class AdmitAndEvictConfig:
    """Rec SDK's settings of who gets a row, and who loses it; `admit_and_evict_config` of a config.

    By count, an id has a row from the `admit_threshold`th occurrence on, in the batches of all
    ranks: `Admit.count`. It leaves, at a step that is a multiple of `evict_step_interval`, once
    `evict_threshold` seconds have passed since its last timestamp, up to the latest that came with
    an id of the table: `Evict.lru(by="time").expiring(...)`. Batches are then
    `KeyedJaggedTensorWithTimestamp`. By shows and clicks, an id has a row once it is worth
    `showclick_params.admit_threshold`: `Admit.show_click`. At each look `evict_percentage` of the
    ids leave, those worth least: `Evict.show_click(...).expiring(share=...)`, with `max_rows`.
    Clicks come with ids, see `with_clicks`; the pipeline of recsdk_pipeline takes them from
    `batch.click_labels`.

    Raises TypeError and ValueError as there, and ValueError for settings that contradict each
    other; a table refuses by name what it cannot do. Warns of settings that are for another policy,
    which have no effect.

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
    """Steps from one look to the next at who leaves, 1 or more where ids leave."""
    showclick_params: ShowClickParams = field(default_factory=ShowClickParams)
    """For POLICY_SHOWCLICK."""
    policy_type: AdmitAndEvictPolicyType = AdmitAndEvictPolicyType.POLICY_COUNT
    """Which of them counts."""
    compat: Literal["upstream"] | None = field(default=None, kw_only=True)
    """"upstream": as Rec SDK's code does it where that is not what its pages say. By count, an id
    leaves once more than `evict_threshold` seconds have passed, not as many. By shows and clicks,
    those of one step alone give it a row: `Admit.show_click_of_step`; and each step that has it
    counts all of them anew: `Evict.show_click_totals`. None: as its pages say."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, kind in (
            ("showclick_params", ShowClickParams),
            ("policy_type", AdmitAndEvictPolicyType),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"AdmitAndEvictConfig: {name} must be of {kind.__name__}, got "
                    f"{getattr(self, name)!r}"
                )
        if self.compat is not None and not is_one_of(self.compat, ("upstream",)):
            raise ValueError(
                f"AdmitAndEvictConfig: compat must be 'upstream' or None, got {self.compat!r}"
            )
        if self.is_feature_evict_enabled() and self.evict_step_interval == 0:
            raise ValueError(
                "AdmitAndEvictConfig: evict_step_interval must be at least 1, got 0, with which "
                "nobody ever looks who leaves"
            )
        self._warn_of_unused()

    def _warn_of_unused(self) -> None:
        """Rec SDK leaves out what is for another policy, and says nothing."""
        unused = []
        if not self._is_by_count():
            unused += ["admit_threshold"] if self.admit_threshold != -1 else []
            unused += ["evict_threshold"] if self.evict_threshold > 0 else []
        if not self._is_by_score() and self.showclick_params != ShowClickParams():
            unused.append("showclick_params")
        if unused:
            warnings.warn(
                f"AdmitAndEvictConfig: {', '.join(unused)} has no effect with "
                f"{self.policy_type.name}; choose the policy_type that it is for, or leave it out",
                stacklevel=4,
            )

    def _check_numbers(self) -> None:
        self.not_admitted_default_value = number_of(
            "AdmitAndEvictConfig: not_admitted_default_value", self.not_admitted_default_value
        )
        for name, lowest in (
            ("admit_threshold", -1),
            ("evict_threshold", 0),
            ("evict_step_interval", 0),
        ):
            value = int_of(f"AdmitAndEvictConfig: {name}", getattr(self, name))
            setattr(self, name, value)
            if value < lowest:
                raise ValueError(
                    f"AdmitAndEvictConfig: {name} must be at least {lowest}, got {value}"
                )

    def is_feature_admit_enabled(self) -> bool:
        """Whether some new ids have no row."""
        if self._is_by_count():
            return self.admit_threshold != -1
        return self._is_by_score() and self.showclick_params.admit_threshold > 0

    def is_feature_evict_enabled(self) -> bool:
        """Whether ids leave."""
        if self._is_by_count():
            return self.evict_threshold > 0
        return self._is_by_score() and self.showclick_params.evict_percentage > 0

    def is_feature_filter_enabled(self) -> bool:
        """Whether the config asks for anything."""
        return self.is_feature_admit_enabled() or self.is_feature_evict_enabled()

    def _is_by_count(self) -> bool:
        return self.policy_type == AdmitAndEvictPolicyType.POLICY_COUNT

    def _is_by_score(self) -> bool:
        return self.policy_type == AdmitAndEvictPolicyType.POLICY_SHOWCLICK


class Rules(NamedTuple):
    """What others' settings ask of a table."""

    admission: Admit | None = None
    eviction: Evict | None = None
    default: Default | None = None


def rules_of_config(config: AdmitAndEvictConfig | None) -> Rules:
    """The rules of Rec SDK's settings.

    Raises TypeError for what is no such config, ValueError for what tables cannot do.
    """
    if config is None:
        return Rules()
    if not isinstance(config, AdmitAndEvictConfig):
        raise TypeError(
            f"admit_and_evict_config must be an AdmitAndEvictConfig, got {type(config).__name__}"
        )
    if not config.is_feature_filter_enabled():
        return Rules()
    if config.policy_type == AdmitAndEvictPolicyType.POLICY_SHOWCLICK:
        return _rules_by_clicks(config)
    return Rules(_admission_by_count(config), _expiry(config), _default(config))


def _default(config: AdmitAndEvictConfig) -> Default | None:
    """What ids without a row read, which Rec SDK has only of tables that keep some out."""
    if not config.is_feature_admit_enabled() or config.not_admitted_default_value == 0.0:
        return None
    return Default.constant(config.not_admitted_default_value)


def _admission_by_count(config: AdmitAndEvictConfig) -> Admit | None:
    return Admit.count(config.admit_threshold) if config.admit_threshold > 1 else None


def _rules_by_clicks(config: AdmitAndEvictConfig) -> Rules:
    params, admission, eviction = config.showclick_params, None, None
    is_as_code = config.compat == "upstream"
    alpha, beta = params.alpha, params.beta
    if config.is_feature_admit_enabled():
        admit = Admit.show_click_of_step if is_as_code else Admit.show_click
        admission = admit(threshold=params.admit_threshold, alpha=alpha, beta=beta)
    if config.is_feature_evict_enabled():
        if not params.score_decay:
            raise ValueError(
                "ShowClickParams: score_decay must be above 0 where ids leave, up to 1, got "
                f"{params.score_decay}"
            )
        evict = Evict.show_click_totals if is_as_code else Evict.show_click
        order = evict(decay=params.score_decay, alpha=alpha, beta=beta)
        eviction = order.expiring(share=params.evict_percentage, every=config.evict_step_interval)
    return Rules(admission, eviction, _default(config))


def _expiry(config: AdmitAndEvictConfig) -> Evict | None:
    if not config.is_feature_evict_enabled():
        return None
    ttl = config.evict_threshold + int(config.compat == "upstream")
    return Evict.lru(by="time").expiring(ttl=ttl, every=config.evict_step_interval)


_NOT_THE_SAME = (
    "training_id_eviction_trigger_count",
    "max_inference_id_num_per_rank",
)
_OF_SERVING = {
    "inference_eviction_threshold": "eviction_threshold",
    "inference_eviction_ttl_mins": "eviction_ttl_mins",
}


def eviction_of_virtual_table(policy: Any) -> Evict | None:
    """The rule of a policy of torchrec's virtual tables; ValueError for what tables cannot do."""
    if policy is None or isinstance(policy, NoEvictionPolicy):
        return None
    threshold, minutes = (getattr(policy, name, 0) for name in _OF_SERVING.values())
    if isinstance(policy, FeatureScoreBasedEvictionPolicy):
        if not policy.enable_eviction:
            return None
        raise _refused(policy, "take eviction=Evict.score() with scores of ids in the batch")
    if isinstance(policy, FeatureL2NormBasedEvictionPolicy):
        if not threshold:
            return None
        rule: Evict | None = Evict.low_norm(below=float(threshold))
    elif isinstance(policy, TimestampBasedEvictionPolicy):
        rule = None if not minutes else Evict.lru(by="time").expiring(ttl=60 * minutes)
    elif isinstance(policy, CountBasedEvictionPolicy):
        rule = _unless_rare(Evict.lru(), policy, threshold, 1)
    elif isinstance(policy, CountTimestampMixedEvictionPolicy):
        rule = _unless_rare(Evict.lru(by="time"), policy, threshold, 60 * minutes)
    else:
        raise _refused(policy, "say by eviction= who leaves")
    if rule is not None:
        _check_rest(policy)
    return rule


def _unless_rare(order: Evict, policy: Any, threshold: int, ttl: int) -> Evict | None:
    """The rule by which ids leave that were seen less often than the threshold."""
    if threshold < 2 or not ttl:  # every row was seen once
        return None
    if policy.decay_rate != 1.0:
        raise _refused(
            policy,
            f"its decay_rate={policy.decay_rate} is of each look, so what counts mean would depend "
            "on how often one looks; pass decay_rate=1.0, or take Evict.lfu(half_life=...)",
        )
    return order.expiring(rare_ttl=ttl, rare_count=threshold)


def _check_rest(policy: Any) -> None:
    """Raises ValueError for settings that no rule has."""
    for name in _NOT_THE_SAME:
        if getattr(policy, name, 0):
            raise _refused(
                policy,
                f"its {name}={getattr(policy, name)} is of a rank, and limits here are of a table: "
                "leave it at 0, and set max_rows",
            )
    for name, of_training in _OF_SERVING.items():
        if getattr(policy, name, None) not in (None, getattr(policy, of_training, None)):
            raise _refused(
                policy,
                f"its {name} is not its {of_training}, and rows are chosen for serving when they "
                "are frozen: leave it out, and pass --where to `recsdk freeze`",
            )


def _refused(policy: Any, advice: str) -> ValueError:
    return ValueError(f"virtual_table_eviction_policy is a {type(policy).__name__}: {advice}")
