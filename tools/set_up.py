"""Sets up .venv: torch, what the packages run on, the tools, and the three packages from source.

    python3 tools/set_up.py PROFILE        demo | test | test-full | cpp | bench | docs | all

Every step leaves a stamp of what it was made from, so that a second run does only what changed,
and an interrupted run goes on where it stopped. Standard library only: this runs before anything
is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  someone may have an older python3
    got = sys.version.split()[0]
    sys.exit(
        f"Python {got} is too old: 3.10 or later is needed; name one: PYTHON=python3.11 make ..."
    )

import debian
import torch_wheel

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
LOG = BUILD / "set_up.log"
ENGINE = BUILD / "cpp"
"""Where the engine is built, once: for the Python extension, and for the C++ tests."""
STAMPS = VENV / "recsdk-stamps.json"
CONSTRAINTS = "requirements/constraints.txt"
NOT_SOURCES = {"__pycache__", "build", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
PACKAGES = ("recsdk-core", "recsdk-sharding", "recsdk-pipeline")
SIMULATED_NPU = "recsdk-npusim"
IMPORTED_BY_TESTS = (
    *("pytest", "hypothesis.stateful", "pyarrow.dataset", "matplotlib.pyplot"),
    *("torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.utils.tensorboard"),
    *("torchrec.distributed.model_parallel", "torchrec.distributed.train_pipeline"),
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a command needs."""

    requirements: tuple[str, ...]
    headers: tuple[str, ...] = ()
    programs: tuple[debian.Need, ...] = ()
    packages: bool = True
    simulated_npu: bool = False
    npu_headers: bool = False


PROFILES = {
    "demo": Profile(requirements=("run", "build")),
    "test": Profile(
        requirements=("run", "build", "test"),
        headers=debian.TEST_HEADERS,
        simulated_npu=True,
        npu_headers=True,
    ),
    "test-full": Profile(
        requirements=("run", "build", "test", "loops"),
        headers=debian.FULL_TEST_HEADERS,
        programs=(debian.program("prometheus", purpose="runs the dashboard's queries"),),
        simulated_npu=True,
        npu_headers=True,
    ),
    "cpp": Profile(requirements=("build",), headers=debian.TEST_HEADERS, packages=False),
    "bench": Profile(
        requirements=("run", "build", "bench"),
        headers=debian.BENCH_HEADERS,
        simulated_npu=True,
        npu_headers=True,
    ),
    "docs": Profile(requirements=("run", "build", "test", "docs")),
    "all": Profile(
        requirements=("run", "build", "test", "lint", "docs"),
        headers=debian.TEST_HEADERS,
        simulated_npu=True,
        npu_headers=True,
    ),
}


class SetUpError(Exception):
    """A step failed; the message says which and where its output is."""


def say(line: str) -> None:
    print(f"set-up: {line}", flush=True)


# ---- running things ----------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """The environment of every command: the tools of .venv first."""
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    jobs = str(len(os.sched_getaffinity(0)))
    wanted = {"CMAKE_BUILD_PARALLEL_LEVEL": jobs, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env = {**wanted, **os.environ, "PATH": path, "VIRTUAL_ENV": str(VENV)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes import the same
    return env


def without_password(url: str) -> str:
    """The address without `user:password@`."""
    return re.sub(r"(?<=://)[^/\s]*@", "", url)


def shown(command: Sequence[str]) -> str:
    """The command as it may be logged."""
    return " ".join(map(without_password, command))


def run(command: Sequence[str], *, show: bool = False) -> None:
    """Runs a step in the repository's root; its output goes to the log, or to the terminal."""
    if show:
        done = subprocess.run(command, cwd=ROOT, env=environment(), check=False)
    else:
        with LOG.open("ab") as log:
            log.write(f"\n$ {shown(command)}\n".encode())
            log.flush()
            done = subprocess.run(
                command, cwd=ROOT, env=environment(), check=False, stdout=log, stderr=log
            )
    if done.returncode:
        tail = "" if show else "\n".join(LOG.read_text(errors="replace").splitlines()[-30:]) + "\n"
        raise SetUpError(
            f"{tail}this command failed with exit status {done.returncode} (all output: {LOG}):\n"
            f"  {shown(command)}"
        )


def pip(*args: str) -> list[str]:
    return [str(VENV / "bin" / "python"), "-m", "pip", *args]


def install(*args: str, show: bool = False) -> None:
    """Leaves bytecode to imports: of 11,000 modules a third are ever imported."""
    run(pip("install", "--no-compile", "--constraint", CONSTRAINTS, *args), show=show)


# ---- stamps ------------------------------------------------------------------------------------


def digest(parts: Iterable[str | bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def digest_of_files(paths: Iterable[Path]) -> str:
    """Of names and contents; not of Python's contents, which editable installs read in place."""
    parts: list[str | bytes] = []
    for path in sorted(paths):
        parts.append(str(path.relative_to(ROOT)))
        parts.append(b"" if path.suffix in (".py", ".pyi") else path.read_bytes())
    return digest(parts)


def read_stamps() -> dict[str, str]:
    try:
        stamps: dict[str, str] = json.loads(STAMPS.read_text())
    except (OSError, ValueError):
        return {}
    return stamps


def write_stamp(name: str, value: str) -> None:
    part = STAMPS.with_suffix(".part")
    part.write_text(json.dumps({**read_stamps(), name: value}, indent=1))
    part.replace(STAMPS)


def step(name: str, wanted: str, what: str, act: Callable[[], None]) -> None:
    """Does `act` unless the stamp says that it was done from the same input."""
    if read_stamps().get(name) == wanted:
        return
    say(what)
    start = time.monotonic()
    act()
    write_stamp(name, wanted)
    if (seconds := time.monotonic() - start) > 2:
        say(f"  done in {seconds:.0f} s")


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Does `act` beside what the block does."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        yield
        done.result()


# ---- steps -------------------------------------------------------------------------------------


def venv_works() -> bool:
    """Whether .venv is a complete environment that was made at this place."""
    probe = "import sys, pip; print(sys.prefix)"
    try:
        done = subprocess.run(
            [str(VENV / "bin" / "python"), "-c", probe], capture_output=True, text=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0 and Path(done.stdout.strip()) == VENV


def make_venv() -> None:
    if venv_works():
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    run([sys.executable, "-m", "venv", "--clear", str(VENV)])


def pinned(name: str) -> str:
    """The line `name==version` of the constraints."""
    for line in (ROOT / CONSTRAINTS).read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line
    raise SetUpError(f"{CONSTRAINTS} pins no {name}")


def upgrade_pip() -> None:
    """Debian's pip would download all of torch to read its metadata; later ones do not."""
    wanted = pinned("pip")
    step("pip", wanted, f"upgrading pip to {wanted.partition('==')[2]}", lambda: install("pip"))


def install_torch() -> None:
    """Torch from plain pip, or from $TORCH_INDEX; kept until the pin or the index changes."""
    index = os.environ.get("TORCH_INDEX", "")
    before = read_stamps().get("torch", "")
    wanted = f"{pinned('torch')} {without_password(index)}".strip()
    if before == wanted or (not index and before.startswith(f"{pinned('torch')} ")):
        return
    source = ["--index-url", index, "--no-deps"] if index else []
    fresh = ["--force-reinstall"] if before and index else []
    announce_torch(source)
    step("torch", wanted, "installing torch", lambda: install(*source, *fresh, "torch", show=True))


def announce_torch(source: Sequence[str]) -> None:
    """Prints which torch pip would take and how much that is."""
    flags = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    command = pip("install", *flags, *source, pinned("torch"))
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SetUpError(
            f"{without_password(done.stderr)}pip finds no {pinned('torch')} for {sys.version}"
        )
    wheel = torch_wheel.parse_report(done.stdout)
    for line in torch_wheel.announcement(wheel, is_default_index=not source):
        say(line)


def install_requirements(name: str) -> None:
    path = ROOT / "requirements" / f"{name}.txt"
    shim = ROOT / "packaging" / "fbgemm-gpu-shim" / "pyproject.toml"
    wanted = digest_of_files([path, ROOT / CONSTRAINTS, shim])
    relative = str(path.relative_to(ROOT))
    step(f"requirements-{name}", wanted, f"installing {relative}", lambda: install("-r", relative))


def home_of(package: str) -> Path:
    """The folder of a package."""
    return ROOT / "tools" / "npusim" if package == SIMULATED_NPU else ROOT / "packages" / package


def sources_of(package: str) -> Iterator[Path]:
    """What an editable install of a package is made from."""
    home = home_of(package)
    yield from (
        path for path in (home / "pyproject.toml", home / "CMakeLists.txt") if path.exists()
    )
    folders = [home / "src"]
    if (home / "cpp").exists():
        yield ROOT / "cpp" / "CMakeLists.txt"
        folders += [ROOT / "cpp" / name for name in ("include", "src", "backends", "cmake")]
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and NOT_SOURCES.isdisjoint(path.relative_to(folder).parts):
                yield path


def build_engine() -> None:
    """The engine's static library, incrementally."""
    configure = ["cmake", "-S", "cpp", "-B", str(ENGINE), "-G", "Ninja"]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DRECSDK_WERROR=ON"]
    run([*configure, *options])
    run(["cmake", "--build", str(ENGINE), "--target", "recsdk", "recsdk_serving"])


def build_settings(package: str) -> list[str]:
    """The options of a build in the tree, whose objects are kept."""
    settings = [f"-Cbuild-dir={BUILD / package}"]
    if (home_of(package) / "cpp").exists():
        settings += [f"-Ccmake.define.recsdk_DIR={ENGINE}", "-Ccmake.define.RECSDK_WERROR=ON"]
    return settings


def install_package(package: str) -> None:
    """Editable, from source; the C++ part rebuilds incrementally in build/."""
    wanted = digest_of_files(sources_of(package))
    home = home_of(package)
    has_engine = (home / "cpp").exists()
    args = ["--no-build-isolation", "--editable", str(home.relative_to(ROOT))]
    if (home / "CMakeLists.txt").exists():
        args += build_settings(package)

    def build() -> None:
        if has_engine:
            build_engine()
        install(*args)

    step(f"package-{package}", wanted, f"building {package} from source", build)


@contextmanager
def engine_meanwhile() -> Iterator[None]:
    """Builds the engine, which needs only the tools of builds, while packages are installed."""
    wanted = digest_of_files(sources_of("recsdk-core"))
    if read_stamps().get("package-recsdk-core") == wanted:
        yield
        return
    install_requirements("build")
    say("building the engine meanwhile")
    with meanwhile(build_engine):
        yield


@contextmanager
def imports_meanwhile() -> Iterator[None]:
    """Imports what nearly all tests do, once: else many would compile it at the same time."""
    wanted = digest_of_files([ROOT / CONSTRAINTS])
    if read_stamps().get("imports") == wanted:
        yield
        return
    say("compiling what tests import meanwhile")
    # Torch would load the simulated NPU, which may be half installed.
    apart = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; "
    code = f"{apart}import {', '.join(IMPORTED_BY_TESTS)}"
    with meanwhile(lambda: run([str(VENV / "bin" / "python"), "-c", code])):
        yield
    write_stamp("imports", wanted)


def fetch_npu_headers() -> None:
    """The torch_npu wheel (44 MB), of which a test reads headers; it is skipped without it."""
    version = pinned("torch_npu").partition("==")[2]
    if any((BUILD / "wheels").glob(f"torch_npu-{version}-*.whl")):
        return
    say("downloading the headers of torch_npu")
    try:
        run([str(VENV / "bin" / "python"), "tools/check_acl_headers.py", "--only-fetch"])
    except SetUpError:
        say(f"  no torch_npu wheel to be had (see {LOG}); the test of its headers is skipped")


@contextmanager
def alone() -> Iterator[None]:
    """One set-up at a time in a working tree."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / "set_up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up in this folder")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up(name: str) -> None:
    """Brings the machine and .venv to what the profile needs."""
    profile = PROFILES[name]
    debian.ensure_system(profile.headers, profile.programs, say=say)
    with alone():
        make_venv()
        upgrade_pip()
        with engine_meanwhile() if profile.packages else nullcontext():
            if "run" in profile.requirements:
                install_torch()
            for requirements in profile.requirements:
                install_requirements(requirements)
        if profile.packages:
            for package in PACKAGES:
                install_package(package)
        with imports_meanwhile() if "test" in profile.requirements else nullcontext():
            if profile.simulated_npu:
                install_package(SIMULATED_NPU)
        if profile.npu_headers:
            fetch_npu_headers()


def report_errors(act: Callable[[], None]) -> int:
    """Runs `act`; what goes wrong is said in a line, not a traceback. Returns an exit status."""
    try:
        act()
    except (SetUpError, debian.MissingPackagesError) as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profile", choices=sorted(PROFILES))
    profile = parser.parse_args().profile
    return report_errors(lambda: set_up(profile))


if __name__ == "__main__":
    sys.exit(main())
