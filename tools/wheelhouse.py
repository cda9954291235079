"""Puts into build/wheelhouse what a machine without network needs beside its own torch and numpy.

    .venv/bin/python tools/wheelhouse.py [--python 3.12] [--torch 2.11] [--fbgemm fbgemm-gpu-cpu]

The three packages are built from these sources, after `make setup`; the rest is downloaded: the
torchrec and fbgemm that fit that torch, what they import, and pytest. On the machine,
`make test-cuda` and `make bench-cuda` use the folder.
"""

from __future__ import annotations

import argparse
import shutil
import sys

import older_versions
import set_up

WHEELS = set_up.BUILD / "wheelhouse"
FITTING = {
    **{
        pair.torch.rpartition(".")[0]: (pair.torchrec, pair.fbgemm) for pair in older_versions.PAIRS
    },
    "2.13": (set_up.pinned("torchrec").partition("==")[2],) * 2,
}
"""The torchrec and fbgemm of each torch."""
NEEDS = (
    *("tensordict", "cloudpickle", "pyvers", "orjson", "importlib-metadata", "zipp"),
    *("torchmetrics==1.0.3", "lightning-utilities", "tqdm", "iopath", "portalocker"),
    *("pyre-extensions", "typing-inspect", "mypy-extensions", "typing-extensions"),
    *("click", "nanobind-backend", "rich", "markdown-it-py", "mdurl", "pygments", "packaging"),
    *("hypothesis", "sortedcontainers", "pytest", "pytest-timeout", "iniconfig", "pluggy"),
    *("fsspec", "safetensors", "xxhash", "zstandard"),
)
"""What torchrec, the packages, their tests and the benchmark import, with what that imports."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def build() -> None:
    """Wheels of the three packages."""
    older_versions.build_core()
    for wheel in older_versions.WHEELS.glob("recsdk_core-*.whl"):
        shutil.copy(wheel, WHEELS)
    flags = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(WHEELS)]
    set_up.run(set_up.pip("wheel", *flags, "packages/recsdk-sharding", "packages/recsdk-pipeline"))


def download(python: str, torch: str, fbgemm: str) -> None:
    torchrec_version, fbgemm_version = FITTING[torch]
    own = (f"torchrec=={torchrec_version}", f"{fbgemm}=={fbgemm_version}")
    target = ["--python-version", python, "--implementation", "cp"]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    for abi in (f"cp{python.replace('.', '')}", "abi3", "none"):
        target += ["--abi", abi]
    flags = ["--no-deps", "--only-binary=:all:", "--dest", str(WHEELS), *target]
    constraints = ["--constraint", str(older_versions.constraints())]
    set_up.run(set_up.pip("download", *flags, *constraints, *own, *NEEDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--torch", default="2.11", choices=sorted(FITTING), help="of the machine")
    parser.add_argument(
        "--fbgemm",
        default="fbgemm-gpu",
        choices=("fbgemm-gpu", "fbgemm-gpu-cpu"),
        help="the CUDA build is large, and only the benchmark needs it",
    )
    args = parser.parse_args()

    def act() -> None:
        shutil.rmtree(WHEELS, ignore_errors=True)
        for folder in (WHEELS, older_versions.FOLDER):
            folder.mkdir(parents=True, exist_ok=True)
        build()
        download(args.python, args.torch, args.fbgemm)
        size = sum(wheel.stat().st_size for wheel in WHEELS.iterdir())
        set_up.say(f"{len(list(WHEELS.iterdir()))} wheels, {size >> 20} MiB, in {WHEELS}")

    return set_up.report_errors(act)


if __name__ == "__main__":
    sys.exit(main())
