"""Settings of others for who gets a row and who loses it: translated, or refused by their names."""

from __future__ import annotations

from typing import Any

import pytest
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

from recsdk_sharding import (
    AdmitAndEvictConfig,
    AdmitAndEvictPolicyType,
    HashEmbeddingBagCollection,
    HashEmbeddingBagConfig,
    ShowClickParams,
)

TABLE: dict[str, Any] = {"name": "user", "embedding_dim": 4, "num_embeddings": 9}
NONE, COUNT, SHOWCLICK = AdmitAndEvictPolicyType


def test_defaults_are_rec_sdks_and_ask_for_nothing() -> None:
    config = AdmitAndEvictConfig()
    assert (config.admit_threshold, config.not_admitted_default_value) == (-1, 0.0)
    assert (config.evict_threshold, config.evict_step_interval) == (0, 0)
    assert config.showclick_params == ShowClickParams(
        alpha=1.0, beta=0.0, admit_threshold=0.0, evict_percentage=0.0, score_decay=1.0
    )
    assert config.policy_type == COUNT
    assert [each.value for each in AdmitAndEvictPolicyType] == [0, 1, 2]
    assert not config.is_feature_filter_enabled()
    assert HashEmbeddingBagConfig(**TABLE, admit_and_evict_config=config).eviction is None


@pytest.mark.parametrize(
    ("given", "enabled", "message"),
    [
        ({"admit_threshold": 0}, (True, False), "admit_threshold=0, and every id has a row from"),
        ({"evict_threshold": 1}, (False, True), r"evict_threshold=1, .*eviction=Evict.lru\(by="),
        ({"admit_threshold": 9, "evict_threshold": 1}, (True, True), "admit_threshold=9"),
        ({"policy_type": SHOWCLICK}, (False, False), "policy_type=POLICY_SHOWCLICK, .*Type.NONE"),
        ({"policy_type": NONE, "admit_threshold": 9}, (False, False), None),
        ({"evict_step_interval": 100}, (False, False), None),
    ],
)
def test_what_is_asked_for_is_refused_by_name(
    given: dict[str, Any], enabled: tuple[bool, bool], message: str | None
) -> None:
    asked = AdmitAndEvictConfig(**given)
    assert (asked.is_feature_admit_enabled(), asked.is_feature_evict_enabled()) == enabled
    assert asked.is_feature_filter_enabled() == (message is not None)
    if message is None:
        assert HashEmbeddingBagConfig(**TABLE, admit_and_evict_config=asked)
        return
    with pytest.raises(ValueError, match=f"table 'user': admit_and_evict_config has {message}"):
        HashEmbeddingBagConfig(**TABLE, admit_and_evict_config=asked)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"admit_threshold": -2}, ValueError, "admit_threshold must be at least -1, got -2"),
        ({"evict_threshold": -1}, ValueError, "evict_threshold must be at least 0, got -1"),
        ({"evict_step_interval": -1}, ValueError, "evict_step_interval must be at least 0"),
        ({"admit_threshold": 1.0}, TypeError, "admit_threshold must be an int, got 1.0"),
        ({"evict_threshold": True}, TypeError, "evict_threshold must be an int"),
        ({"not_admitted_default_value": 0}, TypeError, "not_admitted_default_value must be of flo"),
        ({"policy_type": 1}, TypeError, "policy_type must be of AdmitAndEvictPolicyType, got 1"),
        ({"showclick_params": {}}, TypeError, "showclick_params must be of ShowClickParams"),
    ],
)
def test_settings_that_are_none(given: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=f"AdmitAndEvictConfig: {message}"):
        AdmitAndEvictConfig(**given)
    with pytest.raises(TypeError, match="alpha must be a number, got '1'"):
        ShowClickParams(alpha="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an AdmitAndEvictConfig, got dict"):
        HashEmbeddingBagConfig(**TABLE, admit_and_evict_config={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "advice"),
    [
        (None, None),
        (NoEvictionPolicy(), None),
        (CountBasedEvictionPolicy(eviction_threshold=0), None),
        (CountBasedEvictionPolicy(), r"Evict\.lfu\(half_life"),
        (TimestampBasedEvictionPolicy(eviction_ttl_mins=0), None),
        (TimestampBasedEvictionPolicy(), r"Evict\.lru\(by="),
        (CountTimestampMixedEvictionPolicy(eviction_threshold=0, eviction_ttl_mins=0), None),
        (CountTimestampMixedEvictionPolicy(eviction_threshold=0), r"Evict\.lfu.*Evict\.lru"),
        (FeatureL2NormBasedEvictionPolicy(), None),
        (FeatureL2NormBasedEvictionPolicy(eviction_threshold=0.5), "the norm of its row"),
        (FeatureScoreBasedEvictionPolicy(enable_eviction=False), None),
        (FeatureScoreBasedEvictionPolicy(), "batches carry no scores"),
        (VirtualTableEvictionPolicy(), r"Evict\.lru\(\) or"),
    ],
    ids=repr,
)
def test_policies_of_virtual_tables(policy: Any, advice: str | None) -> None:
    for kind in (EmbeddingBagConfig, HashEmbeddingBagConfig):
        stock = {**TABLE, "virtual_table_eviction_policy": policy}
        if advice is None:
            module = HashEmbeddingBagCollection([kind(**stock)])
            assert module.embedding_bag_configs()[0].eviction is None
            continue
        name = type(policy).__name__
        with pytest.raises(ValueError, match=f"table 'user': .*policy is a {name}, .*{advice}"):
            HashEmbeddingBagCollection([kind(**stock)])
