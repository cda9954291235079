"""Settings of others for who gets a row and who loses it: translated, or refused by their names."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
from packaging.version import Version
from torchrec.modules.embedding_configs import (
    CountBasedEvictionPolicy,
    CountTimestampMixedEvictionPolicy,
    EmbeddingBagConfig,
    FeatureL2NormBasedEvictionPolicy,
    FeatureScoreBasedEvictionPolicy,
    NoEvictionPolicy,
    TimestampBasedEvictionPolicy,
    VirtualTableEvictionPolicy,
)

from recsdk_core import Admit, Default, Evict
from recsdk_sharding import (
    AdmitAndEvictConfig,
    AdmitAndEvictPolicyType,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    HashEmbeddingConfig,
    ShowClickParams,
)

TABLE: dict[str, Any] = {"name": "user", "embedding_dim": 4, "num_embeddings": 9}
NONE, COUNT, SHOWCLICK = AdmitAndEvictPolicyType
BY_TIME = Evict.lru(by="time")


def test_defaults_are_rec_sdks_and_ask_for_nothing() -> None:
    config = AdmitAndEvictConfig()
    assert (config.admit_threshold, config.not_admitted_default_value) == (-1, 0.0)
    assert (config.evict_threshold, config.evict_step_interval) == (0, 0)
    assert config.showclick_params == ShowClickParams(1.0, 0.0, 0.0, 0.0, 1.0)
    assert config.policy_type == COUNT
    assert [each.value for each in AdmitAndEvictPolicyType] == [0, 1, 2]
    assert AdmitAndEvictConfig(2, 0.0, 60, 10) == AdmitAndEvictConfig(
        admit_threshold=2,
        not_admitted_default_value=0.0,
        evict_threshold=60,
        evict_step_interval=10,
    )
    assert not config.is_feature_filter_enabled()
    made = HashEmbeddingBagConfig(**TABLE, admit_and_evict_config=config)
    assert (made.admission, made.eviction) == (None, None)


CLICKS = ShowClickParams(admit_threshold=0.1, evict_percentage=0.1)
SHOWN = ShowClickParams(1.0, 2.0, 2.2)
EXPIRES = {"evict_threshold": 60, "evict_step_interval": 10}


@pytest.mark.parametrize(
    ("given", "admits", "evicts"),
    [
        ({"admit_threshold": 0}, None, None),
        ({"admit_threshold": 1}, None, None),
        ({"admit_threshold": 9}, Admit.count(9), None),
        (EXPIRES, None, BY_TIME.expiring(ttl=60, every=10)),
        ({**EXPIRES, "compat": "upstream"}, None, BY_TIME.expiring(ttl=61, every=10)),
        ({**EXPIRES, "admit_threshold": 9}, Admit.count(9), BY_TIME.expiring(ttl=60, every=10)),
        ({"admit_threshold": 9, "compat": "upstream"}, Admit.count(9), None),
        ({"evict_step_interval": 100, "not_admitted_default_value": 0.5}, None, None),
        (
            {"policy_type": SHOWCLICK, "showclick_params": SHOWN},
            Admit.show_click(threshold=2.2, beta=2.0),
            None,
        ),
    ],
)
@pytest.mark.parametrize("kind", [HashEmbeddingBagConfig, HashEmbeddingConfig])
def test_what_is_asked_for_becomes_rules(
    kind: Any, given: dict[str, Any], admits: Admit | None, evicts: Evict | None
) -> None:
    made = kind(**TABLE, admit_and_evict_config=AdmitAndEvictConfig(**given))
    assert (made.admission, made.eviction) == (admits, evicts)
    again = replace(made)
    assert (again.admission, again.eviction) == (admits, evicts)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policy_type": NONE, "admit_threshold": 9}, "admit_threshold"),
        ({"policy_type": NONE, "showclick_params": CLICKS}, "showclick_params"),
        ({"showclick_params": CLICKS}, "showclick_params"),
        (
            {"policy_type": SHOWCLICK, "admit_threshold": 9, **EXPIRES},
            "admit_threshold, evict_threshold",
        ),
    ],
)
def test_what_is_for_another_policy_has_no_effect_and_is_warned_of(
    given: dict[str, Any], named: str
) -> None:
    policy = given.get("policy_type", COUNT).name
    with pytest.warns(UserWarning, match=f"{named} has no effect with {policy}") as warned:
        config = AdmitAndEvictConfig(**given)
    assert warned[0].filename == __file__
    made = HashEmbeddingBagConfig(**TABLE, admit_and_evict_config=config)
    assert (made.admission, made.eviction) == (None, None)


@pytest.mark.filterwarnings("ignore:AdmitAndEvictConfig")
@pytest.mark.parametrize(
    ("given", "admits", "evicts"),
    [
        ({}, False, False),
        ({"admit_threshold": 0}, True, False),
        ({"admit_threshold": 9, **EXPIRES}, True, True),
        ({"admit_threshold": 9, "policy_type": NONE}, False, False),
        ({"admit_threshold": 9, "policy_type": SHOWCLICK}, False, False),
        ({"policy_type": SHOWCLICK, "showclick_params": CLICKS, **EXPIRES}, True, True),
        ({"showclick_params": CLICKS}, False, False),
    ],
)
def test_what_is_enabled(given: dict[str, Any], admits: bool, evicts: bool) -> None:
    config = AdmitAndEvictConfig(**given)
    assert config.is_feature_admit_enabled() == admits
    assert config.is_feature_evict_enabled() == evicts
    assert config.is_feature_filter_enabled() == (admits or evicts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"policy_type": SHOWCLICK, "showclick_params": CLICKS, "evict_step_interval": 5},
            "a share of eviction is of each group of ids that max_rows has",
        ),
        (
            {"policy_type": SHOWCLICK, "showclick_params": ShowClickParams(0.0, 0.0, 2.0)},
            "Admit: alpha and beta are 0",
        ),
    ],
)
def test_what_tables_cannot_do_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"table 'user': {message}"):
        HashEmbeddingBagConfig(**TABLE, admit_and_evict_config=AdmitAndEvictConfig(**given))


def test_shows_and_clicks_become_rules() -> None:
    params = ShowClickParams(1.0, 2.0, 0.5, 0.1, 0.9)
    asked = AdmitAndEvictConfig(
        evict_step_interval=5, showclick_params=params, policy_type=SHOWCLICK
    )
    made = HashEmbeddingConfig(**TABLE, max_rows=99, admit_and_evict_config=asked)
    assert made.admission == Admit.show_click(threshold=0.5, beta=2.0)
    assert made.eviction == Evict.show_click(beta=2.0, decay=0.9).expiring(share=0.1, every=5)
    as_code = replace(asked, compat="upstream")
    made = HashEmbeddingConfig(**TABLE, max_rows=99, admit_and_evict_config=as_code)
    assert made.admission == Admit.show_click_of_step(threshold=0.5, beta=2.0)
    order = Evict.show_click_totals(beta=2.0, decay=0.9)
    assert made.eviction == order.expiring(share=0.1, every=5)


def test_what_ids_without_a_row_read() -> None:
    for value, threshold, default in (
        (0.5, 9, Default.constant(0.5)),
        (0.0, 9, Default.zeros()),
        (0.5, -1, Default.zeros()),
    ):
        asked = AdmitAndEvictConfig(threshold, value)
        made = HashEmbeddingConfig(**TABLE, admit_and_evict_config=asked)
        assert made.default == default
        assert replace(made).default == default


def test_a_rule_that_is_given_twice_is_refused() -> None:
    asked = AdmitAndEvictConfig(admit_threshold=9)
    with pytest.raises(ValueError, match=r"asks for admission=.*n=9.*, and it is .*n=8"):
        HashEmbeddingBagConfig(**TABLE, admission=Admit.count(8), admit_and_evict_config=asked)
    with pytest.raises(ValueError, match=r"policy asks for eviction=.*, and it is"):
        HashEmbeddingBagConfig(
            **TABLE,
            admit_and_evict_config=AdmitAndEvictConfig(**EXPIRES),  # type: ignore[arg-type]
            virtual_table_eviction_policy=TimestampBasedEvictionPolicy(),
        )


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"admit_threshold": -2}, ValueError, "admit_threshold must be at least -1, got -2"),
        ({"evict_threshold": -1}, ValueError, "evict_threshold must be at least 0, got -1"),
        ({"evict_step_interval": -1}, ValueError, "evict_step_interval must be at least 0"),
        ({"evict_threshold": 60}, ValueError, "evict_step_interval must be at least 1, got 0"),
        ({"compat": "v1"}, ValueError, "compat must be 'upstream' or None, got 'v1'"),
        ({"admit_threshold": 1.0}, TypeError, "admit_threshold must be an int, got 1.0"),
        ({"evict_threshold": True}, TypeError, "evict_threshold must be an int"),
        (
            {"not_admitted_default_value": "0"},
            TypeError,
            "not_admitted_default_value must be a num",
        ),
        ({"policy_type": 1}, TypeError, "policy_type must be of AdmitAndEvictPolicyType, got 1"),
        ({"showclick_params": {}}, TypeError, "showclick_params must be of ShowClickParams"),
    ],
)
def test_settings_that_are_none(given: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=f"AdmitAndEvictConfig: {message}"):
        AdmitAndEvictConfig(**given)
    with pytest.raises(TypeError, match="must be an AdmitAndEvictConfig, got dict"):
        HashEmbeddingBagConfig(**TABLE, admit_and_evict_config={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"alpha": "1"}, TypeError, "alpha must be a number, got '1'"),
        (
            {"admit_threshold": -0.1},
            ValueError,
            "admit_threshold must be a finite number from 0 on",
        ),
        ({"evict_percentage": 1.1}, ValueError, "evict_percentage must be 0 to 1, got 1.1"),
        ({"score_decay": -1}, ValueError, "score_decay must be 0 to 1, got -1"),
    ],
)
def test_shows_and_clicks_that_are_none(given: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=f"ShowClickParams: {message}"):
        ShowClickParams(**given)


COUNTED = Evict.lru().expiring(rare_ttl=1, rare_count=15)


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (None, None),
        (NoEvictionPolicy(), None),
        (CountBasedEvictionPolicy(eviction_threshold=0), None),
        (CountBasedEvictionPolicy(eviction_threshold=1), None),
        (CountBasedEvictionPolicy(decay_rate=1.0), COUNTED),
        (TimestampBasedEvictionPolicy(eviction_ttl_mins=0), None),
        (TimestampBasedEvictionPolicy(), BY_TIME.expiring(ttl=86_400)),
        (CountTimestampMixedEvictionPolicy(eviction_threshold=0, eviction_ttl_mins=0), None),
        (CountTimestampMixedEvictionPolicy(eviction_ttl_mins=0), None),
        (
            CountTimestampMixedEvictionPolicy(
                eviction_threshold=3, eviction_ttl_mins=2, decay_rate=1.0
            ),
            BY_TIME.expiring(rare_ttl=120, rare_count=3),
        ),
        (FeatureL2NormBasedEvictionPolicy(), None),
        (FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.5), Evict.low_norm(below=0.5)),
        (FeatureScoreBasedEvictionPolicy(enable_eviction=False), None),
    ],
    ids=repr,
)
def test_policies_of_virtual_tables(policy: Any, rule: Evict | None) -> None:
    for kind in (EmbeddingBagConfig, HashEmbeddingBagConfig):
        module = HashEmbeddingBagCollection([kind(**TABLE, virtual_table_eviction_policy=policy)])
        assert module.embedding_bag_configs()[0].eviction == rule


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        (CountBasedEvictionPolicy(), "decay_rate=0.99 is of each look"),
        (CountTimestampMixedEvictionPolicy(), "decay_rate=0.99 is of each look"),
        (
            FeatureL2NormBasedEvictionPolicy(
                eviction_threshold=0.5, inference_eviction_threshold=0.25
            ),
            "chosen for serving when",
        ),
        (FeatureScoreBasedEvictionPolicy(), r"Evict.score\(\)"),
        (VirtualTableEvictionPolicy(), "say by eviction="),
        (
            TimestampBasedEvictionPolicy(training_id_eviction_trigger_count=5),
            "training_id_eviction_trigger_count=5 is of a rank",
        ),
        (TimestampBasedEvictionPolicy(inference_eviction_ttl_mins=5), "chosen for serving when"),
    ],
    ids=repr,
)
def test_policies_of_virtual_tables_that_are_refused(policy: Any, advice: str) -> None:
    assert_refused(policy, advice)


@pytest.mark.skipif(
    Version(metadata.version("torchrec")) < Version("1.8"),
    reason="torchrec 1.7 has no max_inference_id_num_per_rank by time",
)
def test_a_limit_of_ids_of_a_rank_is_refused() -> None:
    policy = TimestampBasedEvictionPolicy(max_inference_id_num_per_rank=5)
    assert_refused(policy, "max_inference_id_num_per_rank=5 is of a rank")


def assert_refused(policy: Any, advice: str) -> None:
    for kind in (EmbeddingBagConfig, HashEmbeddingBagConfig):
        name = type(policy).__name__
        with pytest.raises(ValueError, match=f"table 'user': .*policy is a {name}: .*{advice}"):
            HashEmbeddingBagCollection([kind(**TABLE, virtual_table_eviction_policy=policy)])
