"""The page for users of Rec SDK Torch: its rows are held by tests, its script is the seven steps.

Other tests of its tables are in the other file of this name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from claims import Page, assert_all_are_held, assert_ten_things_are_explained, holds
from public_names import public_names
from warm_scripts import start_scripts, statuses_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = Page(ROOT / "docs" / "coming_from" / "rec_sdk.md")
TEXT = PAGE.path.read_text()
SCRIPT = "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
ONE_PROCESS = 'backend="gloo", store=dist.HashStore(), rank=0, world_size=1'
UNDER_TORCHRUN = 'backend="gloo"'
FOR_NPU = (
    ("import torch\n", "import torch, torch_npu\n"),
    ('torch.device("cpu")', 'torch.device("npu")'),
)
WORDS = {
    *("same", "renamed", "looser", "stricter", "differs"),
    *("refused", "no effect", "not here"),
}
SECONDS_TO_END = 600
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_the_first_section_names_what_the_rest_explains() -> None:
    assert_ten_things_are_explained(PAGE)


def test_every_row_is_held_by_a_test() -> None:
    assert_all_are_held(PAGE, HERE.glob("test_coming_from_rec_sdk*.py"))


def test_rows_say_it_in_the_words_that_the_page_explains() -> None:
    assert {claim.here for claim in PAGE.claims} == WORDS
    assert set(re.findall(r"\*\*([a-z ]+)\*\*", TEXT)) == WORDS


def test_a_script_changes_in_its_imports_only() -> None:
    before, *_ = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    after, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {
        name.strip()
        for text in (before, after)
        for line in text.splitlines()
        if line.startswith("from ")
        for name in line.partition(" import ")[2].split(",")
    }
    assert all(f"import {name}" in after or f", {name}" in after for name in names)
    assert {line.split()[1] for line in after.splitlines()} == {
        "recsdk_sharding",
        "recsdk_pipeline",
    }


STEPS = (
    r"class Batch\(Pipelineable\):.*def to\(.*def pin_memory\(.*def record_stream\(",
    r"class \w+\(IterableDataset\)",
    r"device = torch.device\(.*dist.init_process_group\(backend=",
    r'host_gp = dist.new_group\(backend="gloo"\)',
    r"host_env = ShardingEnv\(world_size=world_size, rank=rank, pg=host_gp\)",
    r"HashEmbeddingBagConfig\(.*HashEmbeddingBagCollection\(device=.*tables=\[table\]\)",
    r"apply_optimizer_in_backward\(\s*torch.optim.Adagrad, model.ebc.parameters\(\), optimizer_kw",
    r"sharders = get_default_hybrid_sharders\(host_env=host_env\)",
    r"EmbeddingShardingPlanner\(\s*topology=Topology\(.*constraints=constraints",
    r"planner.collective_plan\(model, sharders, dist.GroupMember.WORLD\)",
    r"DistributedModelParallel\(model, device=device, plan=plan, sharders=sharders\)",
    r"KeyedOptimizerWrapper\(\s*dict\(in_backward_optimizer_filter\(ddp_model.named_parameters\(\)\)\)",
    r"CombinedOptimizer\(\[ddp_model.fused_optimizer, dense_optimizer\]\)",
    r"HybridTrainPipelineSparseDist\(ddp_model, optimizer, device, execute_all_batches=True\)",
    r"pipeline.progress\(iterator\)",
)


def test_its_script_is_the_seven_steps_in_their_order() -> None:
    assert re.search(".*".join(STEPS), SCRIPT, re.DOTALL)
    assert re.findall(r"^# (\d)\.", SCRIPT, re.MULTILINE) == list("1234567")


def run(script: str, folder: Path, **variables: str) -> tuple[int | None, str]:
    """The exit status of a script in a process of its own, and what it prints."""
    path, output = folder / "script.py", folder / "printed"
    path.write_text(script)
    output.unlink(missing_ok=True)
    [status] = statuses_of(start_scripts([str(path)], output, [variables]), SECONDS_TO_END)
    return status, output.read_text(errors="replace")


@holds("Environment variables", "same", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
@holds("Environment variables", "same", "GLOO_SOCKET_IFNAME")
def test_it_runs_by_the_variables_of_torch(tmp_path: Path) -> None:
    assert SCRIPT.count(ONE_PROCESS) == 1
    script = SCRIPT.replace(ONE_PROCESS, UNDER_TORCHRUN)
    status, printed = run(script, tmp_path, **ONE_RANK, GLOO_SOCKET_IFNAME="lo")
    assert status == 0, printed
    status, printed = run(script, tmp_path, **ONE_RANK, GLOO_SOCKET_IFNAME="no-such-name")
    assert status != 0
    assert "no-such-name" in printed


@holds("torchrec's classes, as it limits them", "looser", 'Topology(compute_device="npu")')
def test_it_runs_on_a_simulated_npu(tmp_path: Path) -> None:
    script = SCRIPT.replace(ONE_PROCESS, 'backend="hccl"')
    for before, after in FOR_NPU:
        assert script.count(before) == 1
        script = script.replace(before, after)
    status, printed = run(
        script, tmp_path, **ONE_RANK, RECSDK_SIM_NPU="1", RECSDK_SIM_NPU_ASYNC="1"
    )
    assert status == 0, printed


SOURCES = [
    path
    for folder in ("cpp", "packages")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cc", ".h", ".inc") and "tests" not in path.parts
]
NOT_READ = (
    *("EMBCACHE_SIZE_ON_DEVICE_MEM", "LOCAL_UNIQUE_PARALLEL_BATCH_NUM", "DO_EC_LOCAL_UNIQUE"),
    *("ENABLE_PARALLEL_GLOBAL_UNIQUE", "ENABLE_FAST_HASHMAP", "FAST_HASHMAP_RESERVE_BUCKET_NUM"),
    *("EMB_MEMORY_POOL_SIZE", "EMB_MEMORY_POOL_THREAD_NUM", "GLOG_stderrthreshold"),
    "LIB_FBGEMM_NPU_API_SO_PATH",
)
OF_ASCEND = (
    *("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "ASCEND_OPP_PATH"),
    "PYTORCH_NPU_ALLOC_CONF",
)


@holds("Environment variables", "no effect", *NOT_READ)
@holds("Environment variables", "same", *OF_ASCEND)
def test_variables_that_recsdk_does_not_read() -> None:
    assert len(SOURCES) > 100
    sources = [path.read_text() for path in SOURCES]
    assert [
        name for name in (*NOT_READ, *OF_ASCEND) if any(f'"{name}"' in text for text in sources)
    ] == []


CLASSES = "Classes and functions"
SECOND, OPTIONS = "dynamic_emb", "DynamicEmbTableOptions"
ABSENT = {
    CLASSES: (
        *("EmbCacheEmbeddingBagConfig", "EmbCacheEmbeddingConfig"),
        *("EmbCacheEmbeddingBagCollection", "EmbCacheEmbeddingCollection"),
        *("EmbCacheEmbeddingBagCollectionSharder", "EmbCacheEmbeddingCollectionSharder"),
        *("EmbCacheTrainPipelineSparseDist", "InitializerType"),
    ),
    "EmbCacheTrainPipelineSparseDist": ("wait_pipeline_compute_swapinfo",),
    SECOND: (
        *("DynamicEmbeddingCollectionSharder", "DynamicEmbeddingBagCollectionSharder"),
        *("DynamicEmbParameterConstraints", "DynamicEmbeddingEnumerator"),
        *("DynamicEmbeddingShardingPlanner", "DynamicEmbTableOptions"),
        *("DynamicEmbInitializerArgs", "DynamicEmbInitializerMode", "DynamicEmbScoreStrategy"),
        *("set_score", "get_score", "DynamicEmbCheckMode", "EmbOptimType", "DynamicEmbDump"),
        *("DynamicEmbLoad", "incremental_dump", "ConstructTwinModule"),
    ),
}


@holds(CLASSES, "not here", *ABSENT[CLASSES])
@holds("EmbCacheTrainPipelineSparseDist", "not here", "wait_pipeline_compute_swapinfo")
@holds(SECOND, "not here", *ABSENT[SECOND])
@pytest.mark.parametrize("table", ABSENT)
def test_names_that_are_not_here(table: str) -> None:
    packages = ("recsdk_core", "recsdk_sharding", "recsdk_pipeline")
    names = {name for package in packages for name in public_names(package)}
    assert names & set(ABSENT[table]) == set()
