"""Holds our declarations of Ascend's runtime against the headers that a torch_npu wheel carries.

    .venv/bin/python tools/check_acl_headers.py [--wheel FILE] [--only-fetch]

The wheel is unpacked, not installed and not imported; without --wheel it is downloaded by pip to
build/wheels, once. What cpp/backends/npu/acl_api.h declares is compiled beside the headers, and
signatures and values are compared by static_assert. The descriptors of aclnn are compared with the
function types that the wheel's other headers name; its operators are declared nowhere in it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import set_up

WHEELS = set_up.BUILD / "wheels"
ACL = "torch_npu/include/third_party/acl/inc/"
FUNCTION_TYPES = "torch_npu/include/third_party/op-plugin/op_plugin/utils/op_api_common_base.h"
CHECK = set_up.ROOT / "cpp" / "tests" / "headers" / "acl_headers_check.cc"
CXX = shlex.split(os.environ.get("CXX", "c++"))


class CheckError(Exception):
    """The wheel could not be had, or the declarations differ; the message says which."""


def fetched() -> Path | None:
    """The wheel of the pinned torch_npu, if it is there."""
    version = set_up.pinned("torch_npu").partition("==")[2]
    return next(iter(sorted(WHEELS.glob(f"torch_npu-{version}-*.whl"))), None)


def fetch() -> Path:
    """The same, downloaded if need be."""
    if found := fetched():
        return found
    requirement = set_up.pinned("torch_npu")
    WHEELS.mkdir(parents=True, exist_ok=True)
    # Any wheel will do: its headers are the same for every Python and machine.
    target = ["--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]
    flags = ["--no-deps", "--only-binary=:all:", *target, "--dest", str(WHEELS), requirement]
    done = subprocess.run(
        set_up.pip("download", "--quiet", *flags),
        capture_output=True,
        text=True,
        check=False,
        env=set_up.environment(),
    )
    found = fetched()
    if done.returncode or found is None:
        raise CheckError(f"pip could not download {requirement}:\n{done.stderr.strip()}")
    return found


def unpack(wheel: Path, folder: Path) -> None:
    """Takes the headers out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(ACL)]
        if not names or FUNCTION_TYPES not in archive.namelist():
            raise CheckError(f"{wheel.name} has not the headers that are expected: {ACL}")
        archive.extractall(folder, [*names, FUNCTION_TYPES])


def function_types(header: str) -> str:
    """The lines of a header that name opaque types and types of functions of aclnn.

    The header as a whole needs torch.
    """
    structs = re.findall(r"^typedef struct acl\w+ acl\w+;", header, re.MULTILINE)
    functions = re.findall(r"^typedef [\w *]+\(\*_acl\w+\)\([^;]*\);", header, re.MULTILINE)
    return "\n".join([*structs, *functions]) + "\n"


def compile_check(folder: Path, declarations: Path = set_up.ROOT / "cpp") -> str:
    """Compiles the comparison; returns what the compiler says, "" if all is well.

    `declarations` is where `backends/npu/acl_api.h` lies.
    """
    types = function_types((folder / FUNCTION_TYPES).read_text())
    (folder / "aclnn_function_types.h").write_text(types)
    includes = ["-I", str(declarations), "-isystem", str(folder)]
    includes += ["-isystem", str(folder / ACL)]
    command = [*CXX, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", *includes]
    done = subprocess.run([*command, str(CHECK)], capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def check(wheel: Path) -> None:
    """Raises CheckError with the compiler's words if a declaration differs."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(wheel, Path(folder))
        if complaint := compile_check(Path(folder)):
            raise CheckError(f"our declarations differ from those in {wheel.name}:\n{complaint}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheel", type=Path, help="a torch_npu wheel to take the headers from")
    parser.add_argument("--only-fetch", action="store_true", help="download the wheel, no more")
    args = parser.parse_args()
    try:
        wheel = args.wheel or fetch()
        if not args.only_fetch:
            check(wheel)
    except CheckError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{wheel.name}: {'there' if args.only_fetch else 'the declarations agree'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
