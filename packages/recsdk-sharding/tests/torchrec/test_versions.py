"""What does not fit is said at import, with the line to install."""

from __future__ import annotations

import types
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rank_pool import MODULES
from torch import __version__ as torch_version

from recsdk_sharding._compat.private import _Attribute, _Method, check_private_interfaces
from recsdk_sharding._compat.requirements import (
    REQUIREMENTS,
    check_requirements,
    say_what_was_found,
)
from warm_scripts import start_scripts, statuses_of

FITTING = {"recsdk-core": "0.1.3", "torch": "2.13.1+cpu", "torchrec": "1.8.0"}


def test_versions_that_fit_pass() -> None:
    check_requirements(FITTING.get)
    check_requirements()
    for torch, torchrec in (("2.11.0+cu130", "1.6.1"), ("2.12.1", "1.7.0"), ("2.11.0", "1.8.0")):
        check_requirements({**FITTING, "torch": torch, "torchrec": torchrec}.get)


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [
        ("recsdk-core", "0.2.0", r"needs recsdk-core>=0.1,<0.2; found 0.2.0; install it with: pip"),
        ("torch", "2.10.0", r'found 2.10.0; install it with: pip install "torch==2.13.\*"'),
        ("torch", "3.0.0", "needs torch>=2.11,<2.14; found 3.0.0"),
        ("torchrec", "1.5.1", "needs torchrec>=1.6,<1.9; found 1.5.1"),
        ("torchrec", "1.9.0", r'found 1.9.0; install it with: pip install "torchrec==1.8.\*"'),
        ("torchrec", None, "it is not installed; install it with: pip install"),
    ],
)
def test_versions_that_do_not_fit(name: str, version: str | None, text: str) -> None:
    with pytest.raises(ImportError, match=text):
        check_requirements({**FITTING, name: version}.get)


def test_what_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "recsdk_sharding"):
        say_what_was_found()
    [said] = caplog.messages
    for name in (*FITTING, "fbgemm-gpu-cpu"):
        assert f"{name} {metadata.version(name)}" in said
    assert "fbgemm-gpu " not in said


def test_every_dependency_is_checked() -> None:
    assert {requirement.name for requirement in REQUIREMENTS} == set(FITTING)


def test_another_torchrec_is_refused_by_its_interfaces() -> None:
    class Changed:
        def __init__(self, module: object) -> None:
            self.kept = module

        def renamed(self, other: object) -> None: ...

    space = types.SimpleNamespace(__name__="space", function=lambda a, b: None)
    fits = [
        _Method(Changed, "__init__", ("module",)),
        _Method(Changed, "renamed", ("other",)),
        _Method(space, "function", ("a",)),
        _Attribute(Changed, "kept"),
    ]
    check_private_interfaces(fits)
    broken = [_Method(Changed, "method", ()), _Attribute(Changed, "_pg")]
    with pytest.raises(ImportError, match=r"Changed.method is gone; Changed._pg is gone; install"):
        check_private_interfaces([*fits, *broken])
    with pytest.raises(ImportError, match=r"Changed.renamed takes \('other',\), not \('x',\)"):
        check_private_interfaces([_Method(Changed, "renamed", ("x",))])


NPU_SCRIPT = """
import warnings

warnings.filterwarnings("ignore")
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from recsdk_sharding import *

dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
host_env = ShardingEnv(world_size=1, rank=0, pg=dist.new_group(backend="gloo"))
table = HashEmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=100)
model = torch.nn.Sequential(HashEmbeddingBagCollection([table], device="meta"))
sharders = get_default_hybrid_sharders(host_env=host_env)
topology = Topology(world_size=1, compute_device="npu")
plan = EmbeddingShardingPlanner(topology=topology).plan(model, sharders)
(shard,) = plan.plan["0"]["t"].sharding_spec.shards
print(shard.placement)

npu = torch.device("npu")
world = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
good = {"device": npu, "plan": plan, "sharders": sharders}
for change in (
    {"env": world},
    {"init_data_parallel": False},
    {"init_parameters": False},
    {"data_parallel_wrapper": object()},
    {"model_tracker_configs": object()},
    {"sharders": None},
    {"sharders": sharders[1:]},
    {"sharders": [*sharders, object()]},
    {"device": "npu:0", "env": world},
):
    try:
        DistributedModelParallel(model, **{**good, **change})
        print("no error", change)
    except ValueError as error:
        print(error)
for change in ({"host_env": world}, {"rank_rule": "by hand"}):
    try:
        get_default_hybrid_sharders(**{"host_env": host_env, **change})
        print("no error", change)
    except ValueError as error:
        print(error)
DistributedModelParallel(model, **good)
print("a model with the defaults is sharded")
"""


def test_the_rules_for_npu(tmp_path: Path) -> None:
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(NPU_SCRIPT)
    simulated = {"RECSDK_SIM_NPU": "1", "RECSDK_SIM_NPU_ASYNC": "1"}  # as in the fixture `npus`
    [status] = statuses_of(start_scripts([str(script)], output, [simulated], modules=MODULES), 400)
    lines = [line for line in output.read_text().splitlines() if line]
    assert status == 0, lines
    rule = "DistributedModelParallel on npu: "
    expected = [
        "rank:0/npu:0",
        f"{rule}env must be None, got",
        f"{rule}init_data_parallel must be True, got False; leave it out",
        f"{rule}init_parameters must be True, got False; leave it out",
        f"{rule}data_parallel_wrapper must be None or a recsdk_sharding.tensor_parallel",
        f"{rule}model_tracker_configs must be None, got",
        f"{rule}sharders must be those of recsdk_sharding.get_default_hybrid_sharders",
        f"{rule}sharders must be those of",
        f"{rule}sharders must be those of",
        f"{rule}env must be None, got",
        "host_env must be on a gloo group",
        "rank_rule must be",
        "a model with the defaults is sharded",
    ]
    assert len(lines) == len(expected), lines
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_the_extra_for_npus_brings_the_torch_npu_that_fits_torch() -> None:
    needs = [Requirement(line) for line in metadata.requires("recsdk-sharding") or []]
    found = {need.name.replace("_", "-"): need for need in needs}
    torch, torch_npu = found["torch"], found["torch-npu"]
    assert torch.marker is None
    assert torch_npu.marker is not None
    assert torch_npu.marker.evaluate({"extra": "npu"})
    assert not torch_npu.marker.evaluate({"extra": ""})
    assert torch_npu.specifier == torch.specifier
    assert torch_npu.specifier.contains(torch_version.split("+")[0])
