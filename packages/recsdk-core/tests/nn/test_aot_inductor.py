"""Models with frozen tables as packages of AOTInductor, in Python and in a program without it.

Compilers of C++ take their time, so only the full profile runs these.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from recsdk_core import Default, init
from recsdk_core.nn import HashEmbedding, HashEmbeddingBag, freeze
from recsdk_core.serving import open_frozen

IS_FULL = os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full"
pytestmark = pytest.mark.skipif(not IS_FULL, reason="compiles C++; RECSDK_TEST_PROFILE=full")

ROOT = Path(__file__).resolve().parents[4]
ENGINE = ROOT / "build" / "cpp"
TORCH = Path(torch.__file__).parent
PADDING = 6
KNOWN = torch.tensor([5, PADDING, 7, -1, 2**62, -(2**63)])


class Model(nn.Module):
    """Tables of sequences and of bags, whose missing keys read a constant or rows they share."""

    def __init__(self) -> None:
        super().__init__()
        first: dict[str, Any] = {"initializer": init.Normal(), "default": Default.constant(-0.25)}
        self.items = HashEmbedding(4, name="items", padding_idx=PADDING, **first)
        self.means = HashEmbeddingBag(4, name="means", mode="mean", padding_idx=PADDING, **first)
        self.most = HashEmbeddingBag(
            4, name="most", mode="max", padding_idx=PADDING, include_last_offset=True, **first
        )
        shared: dict[str, Any] = {"initializer": init.Normal(), "default": Default.shared_rows(5)}
        self.shared_items = HashEmbedding(4, name="shared items", **shared)
        self.shared_bags = HashEmbeddingBag(4, name="shared bags", mode="sum", **shared)
        self.head = nn.Linear(4, 3)
        tables = self.items, self.means, self.most, self.shared_items, self.shared_bags
        for each in tables:
            each.table.find_or_insert(KNOWN)

    def forward(
        self, keys: torch.Tensor, weights: torch.Tensor, flat: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weighted = self.means(keys, per_sample_weights=weights)
        bags = self.means(flat, ends[:-1].int()), self.shared_bags(flat, ends[:-1])
        items = self.items(keys).sum(1) + self.shared_items(keys).sum(1)
        return self.head(items + weighted), torch.cat(bags), self.most(flat, ends)


def inputs(num_bags: int, length: int, lengths: list[int]) -> tuple[torch.Tensor, ...]:
    """(B, L) keys and weights, and bags of these lengths; some keys have no row."""
    some = torch.cat([KNOWN, torch.tensor([404, 405])])
    keys = some[torch.arange(num_bags * length) % len(some)].view(num_bags, length)
    flat = some[torch.arange(sum(lengths)) * 3 % len(some)]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return keys, torch.linspace(-1, 1, num_bags * length).view(num_bags, length), flat, ends


EXAMPLE = inputs(3, 2, [2, 0, 3])
OTHERS = [inputs(5, 7, [0, 9, 1, 0, 4, 2]), inputs(2, 3, [1, 1]), inputs(4, 2, [0, 0, 8])]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("frozen") / "served"
    return freeze(Model(), folder, num_shards=2).requires_grad_(False)


@pytest.fixture(scope="module", params=[False, True], ids=["not_strict", "strict"])
def package(
    request: pytest.FixtureRequest, served: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},) * 2 + ({0: Dim.DYNAMIC},) * 2
    program = export(served, EXAMPLE, dynamic_shapes=dynamic, strict=request.param)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    inductor: Any = torch._inductor
    return Path(inductor.aoti_compile_and_package(program, package_path=str(path)))


def same(got: Any, wanted: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_a_package_gives_what_the_model_gives(served: Any, package: Path) -> None:
    inductor: Any = torch._inductor
    run = inductor.aoti_load_package(str(package))
    for args in (EXAMPLE, *OTHERS):
        assert same(run(*args), served(*args))


def build_torch_library(*targets: str) -> Path:
    """Builds librecsdk_serving_torch; returns the folder."""
    if not (ENGINE / "recsdk_servingConfig.cmake").exists():
        pytest.skip(f"the engine is not built in {ENGINE}; tools/set_up.py builds it")
    if not any(Path(folder, "boost/json/src.hpp").exists() for folder in ("/usr/include",)):
        pytest.skip("there is no boost/json/src.hpp; libboost1.81-dev has it")
    tools = Path(shutil.which("python") or "").parent, *os.environ["PATH"].split(os.pathsep)
    folder = ROOT / "build" / "serving_torch"
    configure = ["cmake", "-S", "cpp/torch", "-B", str(folder), "-G", "Ninja"]
    configure += [f"-Drecsdk_serving_DIR={ENGINE}", f"-DRECSDK_TORCH={TORCH}"]
    env = {**os.environ, "PATH": os.pathsep.join(map(str, tools))}
    build = ["cmake", "--build", str(folder), "--target", *targets]
    for command in ([*configure, "-DRECSDK_BUILD_TESTS=ON"], build):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def program() -> Path:
    """A program without Python, beside librecsdk_serving_torch."""
    return build_torch_library("run_package") / "run_package"


def ran(program: Path, package: Path, folder: Path, args: Any, wanted: Any, *moved: str) -> Any:
    torch.save(list(args), folder / "inputs.pt")
    torch.save(list(wanted), folder / "outputs.pt")
    command = [program, package, folder / "inputs.pt", folder / "outputs.pt", *moved]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_program_without_python_runs_it(
    served: Any, package: Path, program: Path, tmp_path: Path
) -> None:
    for args in (EXAMPLE, *OTHERS):
        done = ran(program, package, tmp_path, args, served(*args))
        assert (done.returncode, done.stdout) == (0, "3 outputs are equal\n"), done.stderr


def test_a_program_says_what_is_wrong_with_its_files(
    served: Any, package: Path, program: Path, tmp_path: Path
) -> None:
    """And reads the table that it gives itself, wherever the files lie."""
    folder = Path(served.items.table.path)
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    damages = {
        b"": "is no JSON",
        whole.replace(b"recsdk-frozen", b"recsdk-thawed"): "is no manifest of frozen tables",
        whole.replace(b'"name":"items"', b'"name":"other"'): "has no table 'items'",
        whole.replace(b'"name":"means"', b'"name":"items"'): "names table 'items' twice",
        whole.replace(b'"token":"', b'"token":"../'): "its token is damaged",
        whole.replace(b'"dim"', b'"dam"').replace(b'"files":', b'"files":3,"a":'): "is no list",
    }
    try:
        for damaged, message in damages.items():
            manifest.write_bytes(damaged)
            done = ran(program, package, tmp_path, EXAMPLE, served(*EXAMPLE))
            assert done.returncode < 0
            assert message in done.stderr
        manifest.write_bytes(whole)
        one = freeze(HashEmbedding(5, name="wide"), tmp_path / "wide").table
        [file] = open_frozen(one.path).tables[0].files
        moved = (str(Path(one.path, file.path)), str(folder), "items")
        done = ran(program, package, tmp_path, EXAMPLE, served(*EXAMPLE), *moved)
        assert "table 'wide' has width 5, and the program was exported for 4" in done.stderr
    finally:
        manifest.write_bytes(whole)


ONE_FREEZE = """
import ctypes, json, sys
from pathlib import Path
import numpy as np, torch
from recsdk_core import Table
from recsdk_core.serving import freeze_tables, open_frozen

library, folder = Path(sys.argv[1]), Path(sys.argv[2])
torch.ops.load_library(library)
own = ctypes.CDLL(str(library))
assert "recsdk_core.nn" not in sys.modules

def froze(value):
    tables = [Table(dim=2, name=name) for name in "abc"]
    for table in tables:
        table.upsert(np.arange(4), np.full((4, 2), value, np.float32))
    freeze_tables(tables, folder, overwrite=True)

def file_of(name):
    return folder / open_frozen(folder).table(name, "")[1].files[0].path

def read(name, group="one"):
    place = json.dumps(("elsewhere", 7, str(folder), name, None, group))
    try:
        rows = torch.ops.recsdk.serving_lookup(torch.arange(4), 2, place, None)
    except RuntimeError as error:
        return str(error).partition(chr(10))[0]
    return float(rows.unique())

def is_open(token):
    return token in Path("/proc/self/maps").read_text()

froze(1.0)
path, whole = file_of("b"), file_of("b").read_bytes()
path.write_bytes(whole[:-1])
assert path.name in read("b")  # nothing is open yet
froze(2.0)
path, whole = file_of("b"), file_of("b").read_bytes()
path.write_bytes(whole[:-1])
assert read("a") == 2.0
assert str(path) in read("b")
path.write_bytes(whole)
assert read("b") == 2.0
froze(3.0)
assert [read(name) for name in "abc"] == [2.0] * 3
assert read("d").endswith("has no table 'd'")
file_of("c").unlink()
token = open_frozen(folder).token
assert [read(name, "two") for name in "ab"] == [3.0] * 2
froze(4.0)
assert "another freeze has replaced the one whose tables are open" in read("c", "two")
assert read("c", "three") == 4.0
assert is_open(token)
assert own.recsdk_serving_torch_close(None) == 1
assert own.recsdk_serving_torch_close(b"elsewhere") == 0
assert is_open(token)
assert own.recsdk_serving_torch_close(str(folder).encode()) == 0
assert not is_open(token)
assert [read(name, "two") for name in "abc"] == [4.0] * 3
"""


def test_tables_without_python_are_of_one_freeze(tmp_path: Path) -> None:
    """Those that cannot be opened are refused where they are read, and all are let go of."""
    library = build_torch_library("recsdk_serving_torch") / "librecsdk_serving_torch.so"
    command = [sys.executable, "-c", ONE_FREEZE, library, tmp_path / "served"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_library_needs_nothing_of_torch_but_its_stable_interface(program: Path) -> None:
    """So that it is compiled once, and not for each torch."""
    library = program.parent / "librecsdk_serving_torch.so"
    listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True)
    names = [line.split()[1] for line in listed.stdout.decode().splitlines()]
    assert "torch_library_impl" in names
    system = re.compile(r"@(GLIBC|CXXABI|GCC)|^(_ITM|__gmon|__cxa)|^_Z\w*(St|std)")
    own = [name for name in names if not system.search(name)]
    assert [name for name in own if not re.match("(aoti_)?torch_", name)] == []
