"""Each package as a user gets it: built by the release script, installed where nothing else is.

Builds the sdists and from them the wheels, once a run, and installs the wheels into environments
that cannot see the source tree. The full profile compiles the core's sdist; else its wheel is built
of the objects that the set-up has made of the same files.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import release
import sampling
import set_up
from environments import Environment, find_interpreter, link_distributions

LAYERS = release.LAYERS
CPP = set_up.ROOT / "cpp"
BUILT_FROM = ("cpp/", "src/", "CMakeLists.txt", "pyproject.toml")
TEST_TOOLS = (
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "fsspec",
    "pyarrow",
    "safetensors",
    "xxhash",
)
TEST_TOOLS_OF_UPPER_LAYERS = ("matplotlib", "torchdata")  # torchdata brings torch
NUM_SAMPLED = 2
SAMPLED_FROM = ("table", "configs", "package")
"""Of a package's own tests some in these rooms, which start no ranks; the full profile runs all,
each as `make test` does. The core's of these rooms need no torch, and run where there is none."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14") if sampling.IS_FULL else ("3.10", "3.13")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel of every package."""
    folder = tmp_path_factory.mktemp("dist")
    for layer in LAYERS:
        takes_built = layer == "core" and not sampling.IS_FULL
        settings = set_up.build_settings("recsdk-core") if takes_built else None
        release.build(release.Package(layer), folder, settings)
    return folder


def sdist_of(dist: Path, layer: str) -> Path:
    (path,) = dist.glob(f"recsdk_{layer}-*.tar.gz")
    return path


def wheel_of(dist: Path, layer: str) -> Path:
    (path,) = dist.glob(f"recsdk_{layer}-*.whl")
    return path


def unpack_tests(dist: Path, layer: str, folder: Path) -> Path:
    """The sdist without its sources: the package's own tests and the settings they run under."""
    with tarfile.open(sdist_of(dist, layer)) as archive:
        home = Path(archive.getnames()[0]).parts[0]
        sources = (f"{home}/src/", f"{home}/cpp/")
        wanted = [m for m in archive.getmembers() if not m.name.startswith(sources)]
        archive.extractall(folder / "packages", members=wanted)
    return folder / "packages" / home


def run_own_tests(environment: Environment, home: Path, *options: str) -> None:
    """Collects tests, which imports what they test, and runs a sample of them.

    Each has run from the source tree already: what can differ here is what was packaged.
    """
    shutil.copy(sampling.__file__, home)
    (home / "sample_plugin.py").write_text(SAMPLE_PLUGIN)
    command = ("-m", "pytest", "-q", "-ra", "-p", "sample_plugin", *options)
    print(environment.run(*command, cwd=home))


def own_tests_of(layer: str) -> Iterator[str]:
    """The files of a package's own tests, as they are named in its sdist."""
    home = set_up.home_of(f"recsdk-{layer}")
    for path in (home / "tests").rglob("*"):
        name = path.relative_to(home)
        is_of_the_repository = "torchrec_" in path.name  # makes or checks a page in docs/
        is_source = path.is_file() and set_up.NOT_SOURCES.isdisjoint(name.parts)
        if is_source and not is_of_the_repository:
            yield str(name)


@pytest.mark.parametrize("layer", LAYERS)
def test_an_sdist_is_complete(dist: Path, layer: str) -> None:
    with tarfile.open(sdist_of(dist, layer)) as archive:
        members = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"):
        assert members[name].isreg()
    assert {name for name in members if name.startswith("tests/")} >= set(own_tests_of(layer))
    assert f"src/recsdk_{layer}/py.typed" in members
    assert not [name for name in members if name.startswith(("build/", "dist/", ".venv"))]


def test_the_core_sdist_brings_all_that_a_build_takes(dist: Path) -> None:
    brought = {}
    with tarfile.open(sdist_of(dist, "core")) as archive:
        for member in archive.getmembers():
            name = member.name.partition("/")[2]
            if name.startswith(BUILT_FROM) and (file := archive.extractfile(member)):
                brought[name] = file.read()
    home = set_up.home_of("recsdk-core")
    sources = {
        str(path.relative_to(CPP.parent if CPP in path.parents else home)): path.read_bytes()
        for path in set_up.sources_of("recsdk-core")
    }
    assert brought == sources


def test_the_core_wheel_serves_every_python_from_3_10(dist: Path) -> None:
    wheel = wheel_of(dist, "core")
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "recsdk_core/_ext.abi3.so" in names
    assert {"recsdk_core/py.typed", "recsdk_core/_ext.pyi"} <= set(names)
    assert not [name for name in names if not name.startswith("recsdk_core")]


@pytest.mark.parametrize("layer", ["sharding", "pipeline"])
def test_the_upper_wheels_are_pure_python(dist: Path, layer: str) -> None:
    assert wheel_of(dist, layer).name.endswith("-py3-none-any.whl")


@pytest.fixture(scope="session")
def core_only(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Just the wheel of recsdk-core and what it declares to need."""
    environment = Environment(tmp_path_factory.mktemp("core_only"))
    environment.install(wheel_of(dist, "core"))
    return environment


def test_core_needs_only_three_others(core_only: Environment) -> None:
    listed = core_only.pip("list", "--format=freeze").splitlines()
    names = {line.partition("==")[0].partition(" ")[0] for line in listed}
    assert names == {"click", "nanobind-backend", "numpy", "recsdk-core"}
    core_only.pip("check")


def test_core_works_without_torch(core_only: Environment, tmp_path: Path) -> None:
    core_only.run("-c", SMOKE, cwd=tmp_path)


def test_the_command_works_without_torch(core_only: Environment, tmp_path: Path) -> None:
    assert "doctor" in core_only.script("recsdk", "--help", cwd=tmp_path)
    assert "recsdk-core" in core_only.script("recsdk", "doctor", cwd=tmp_path)


def test_core_passes_its_own_tests_without_torch(
    core_only: Environment, dist: Path, tmp_path: Path
) -> None:
    link_distributions(TEST_TOOLS, core_only.site_packages(tmp_path))
    core_only.run(
        "-c", "import importlib.util as u; assert u.find_spec('torch') is None", cwd=tmp_path
    )
    home = unpack_tests(dist, "core", tmp_path)
    run_own_tests(core_only, home, "--ignore=tests/nn")


@pytest.mark.parametrize("version", PYTHONS)
def test_the_one_core_wheel_works_on(version: str, dist: Path, tmp_path: Path) -> None:
    interpreter = find_interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = Environment(tmp_path / "venv", interpreter)
    environment.install(wheel_of(dist, "core"))
    assert f"passed on Python {version}." in environment.run("-c", SMOKE, cwd=tmp_path)


@pytest.fixture(scope="session")
def all_layers(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The three wheels on top of the pinned torch, torchrec and fbgemm, and the test tools."""
    folder = tmp_path_factory.mktemp("all_layers")
    environment = Environment(folder)
    wanted = ["torch", "torchrec", "fbgemm-gpu", set_up.SIMULATED_NPU]
    wanted += [*TEST_TOOLS, *TEST_TOOLS_OF_UPPER_LAYERS]
    link_distributions(wanted, environment.site_packages(folder))
    environment.install("--find-links", dist, *(wheel_of(dist, layer) for layer in LAYERS))
    environment.pip("check")
    return environment


@pytest.mark.parametrize("layer", LAYERS if sampling.IS_FULL else LAYERS[1:])
def test_a_package_passes_its_own_tests_once_installed(
    all_layers: Environment, dist: Path, tmp_path: Path, layer: str
) -> None:
    home = unpack_tests(dist, layer, tmp_path)
    rooms = [f"tests/{room}" for room in SAMPLED_FROM if (home / "tests" / room).is_dir()]
    run_own_tests(all_layers, home, *([] if sampling.IS_FULL else rooms))


def test_each_layer_adds_its_commands(all_layers: Environment, tmp_path: Path) -> None:
    text = all_layers.script("recsdk", "--help", cwd=tmp_path)
    assert "doctor" in text
    assert "demo" in text


SAMPLE_PLUGIN = f"""
import os
os.environ["RECSDK_TEST_PROFILE"] = "ci"
import sampling

def pytest_collection_modifyitems(config, items):
    found = [item for item in items if item.path.parent.name in {SAMPLED_FROM}]
    chosen = items if {sampling.IS_FULL} else sampling.sampled(found, {NUM_SAMPLED})
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
"""

SMOKE = """
import importlib.util, sys
assert importlib.util.find_spec("torch") is None
import numpy as np
import recsdk_core
table = recsdk_core.Table(4, name="users", seed=1)
keys = np.array([-(2**63), -1, 0, 2**63 - 1, -1])
values = table.find_or_insert(keys)
assert values.shape == (5, 4) and len(table) == 4
assert np.array_equal(values[1], values[4])
table.apply_gradients(keys, np.ones((5, 4), np.float32))
assert not np.array_equal(table.lookup(keys), values)
assert "torch" not in sys.modules
print("smoke test passed on Python", sys.version.split()[0])
"""
