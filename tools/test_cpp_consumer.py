"""Uses the installed C++ library as a stranger would, static and shared.

    python3 tools/test_cpp_consumer.py [--build-dir DIR]

Installs the static libraries of the C++ tests, and shared ones of the same objects. Moves the
installed tree, and there: builds and runs examples/c_minimal.c and admission.c with the flags of
recsdk.pc, and examples/serve.c with those of recsdk_serving.pc, builds and runs examples/embed with
find_package(recsdk), a program with find_package(recsdk_serving), one with both, and a project that
has the library by add_subdirectory, compiles headers alone, with RECSDK_TEST_PROFILE=full every
one, and looks at what the shared libraries show, how large the one for serving is, and whether the
other stays after dlclose.
Ends with one line, `N passed, M failed`. Standard library only; needs what the C++ tests need.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cpp_tests
import set_up

ROOT = Path(__file__).resolve().parent.parent
CPP = ROOT / "cpp"
CC = shlex.split(os.environ.get("CC", "cc"))
CXX = shlex.split(os.environ.get("CXX", "c++"))
LIBRARIES = ("recsdk", "recsdk_serving")
MOST_SERVING_BYTES = 10**6
WHOLE = Path("recsdk/recsdk.h")
NUM_HEADERS = 8
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
# What a shared library may show: the interface, and templates and typeinfo of the standard library,
# which every program shares. The members of an Impl go with their class; nobody can name its type.
SHARED_NAMES = re.compile(r"^(recsdk_|_Z\w*6recsdk|_ZN?K?\w*St|_ZT[ISV]|_init$|_fini$)")
INSIDE = re.compile(r"^_ZNK?6recsdk(8internal|5c_api)")


class CheckFailed(Exception):
    """A command or a claim that did not hold, with what it printed."""


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Runs a command; returns what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CheckFailed(f"$ {shlex.join(words)}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """An installed tree and a folder for what is built against it."""

    kind: str
    prefix: Path
    scratch: Path

    def one(self, pattern: str) -> Path:
        """The one file of the tree that the pattern names."""
        found = sorted(self.prefix.glob(pattern))
        if len(found) != 1:
            raise CheckFailed(f"{pattern} names {len(found)} installed files, not one")
        return found[0]

    @property
    def package_config(self) -> Path:
        return self.one("lib*/**/recsdk.pc")

    @property
    def headers(self) -> list[Path]:
        """All headers, by their paths below the folder that programs include them from."""
        include = self.prefix / "include"
        return sorted(path.relative_to(include) for path in include.rglob("*.h"))

    @property
    def library_path(self) -> dict[str, str]:
        """The environment in which a program finds the shared library."""
        return {"LD_LIBRARY_PATH": str(self.package_config.parent.parent)}


def build(kind: str, folder: Path) -> Path:
    """Builds the library; returns where.

    The static one where the C++ tests have built it already; the shared one in `folder`, of the
    static one's objects.
    """
    tests = cpp_tests.Variant()
    configure = cpp_tests.configure(tests)
    if kind == "shared":
        configure = ["cmake", "-S", str(CPP), "-B", str(folder), "-G", "Ninja"]
        configure += ["-DBUILD_SHARED_LIBS=ON", f"-DRECSDK_OBJECTS={tests.path}"]
    else:
        folder = tests.path
    run(*configure, env=set_up.environment())
    run("cmake", "--build", folder, "--target", *LIBRARIES, env=set_up.environment())
    return folder


def install(kind: str, build_dir: Path, scratch: Path) -> Installed:
    """Builds and installs the library, then moves it: nothing in it may name its first place."""
    first = scratch / "installed"
    run("cmake", "--install", build(kind, build_dir), "--prefix", first)
    moved = scratch / "moved"
    first.rename(moved)
    return Installed(kind, moved, scratch)


def package_flags(package_config: Path, *, static: bool) -> list[str]:
    """What `pkg-config --cflags --libs [--static]` prints, read without pkg-config."""
    names = {"pcfiledir": str(package_config.parent)}
    fields: dict[str, str] = {}
    for line in package_config.read_text(encoding="ascii").splitlines():
        value = re.sub(r"\$\{(\w+)\}", lambda m: names[m.group(1)], line)
        if match := re.fullmatch(r"(\w+)=(.*)", value):
            names[match.group(1)] = match.group(2)
        elif match := re.fullmatch(r"([\w.]+): (.*)", value):
            fields[match.group(1)] = match.group(2)
    private = fields["Libs.private"] if static else ""
    return shlex.split(f"{fields['Cflags']} {fields['Libs']} {private}")


def check_c_program(tree: Installed, name: str) -> None:
    program = tree.scratch / name
    flags = package_flags(tree.package_config, static=tree.kind == "static")
    source = CPP / "examples" / f"{name}.c"
    run(*CC, "-std=c11", *STRICT, source, "-o", program, *flags)
    run(program, env=tree.library_path)


def check_server(tree: Installed) -> None:
    """The example of serving, with nothing of what trains."""
    program = tree.scratch / "serve"
    flags = package_flags(tree.one("lib*/**/recsdk_serving.pc"), static=tree.kind == "static")
    run(*CC, "-std=c11", *STRICT, CPP / "examples" / "serve.c", "-o", program, *flags)
    printed = run(program, CPP / "tests" / "data" / "version_1.frozen", env=tree.library_path)
    if "table items, 3 rows of width 2" not in printed:
        raise CheckFailed(f"the server says:\n{printed}")


def check_both_libraries(tree: Installed) -> None:
    """One program with both, linked in either order."""
    source = tree.scratch / "both.c"
    source.write_text(
        '#include "recsdk/c_api.h"\n'
        '#include "recsdk/serving/c_api.h"\n'
        "int main(void) {\n"
        "  const char* isa;\n"
        "  recsdk_serving_table* table;\n"
        '  const char* files[] = {"nowhere"};\n'
        "  return recsdk_isa(&isa) != 0 || recsdk_serving_open(files, 1, &table) == 0;\n"
        "}\n",
        encoding="ascii",
    )
    flags = [
        package_flags(tree.one(f"lib*/**/{library}.pc"), static=tree.kind == "static")
        for library in LIBRARIES
    ]
    for first, second in (flags, reversed(flags)):
        run(*CC, "-std=c11", *STRICT, source, "-o", tree.scratch / "both", *first, *second)
        run(tree.scratch / "both", env=tree.library_path)


def check_serving_project(tree: Installed) -> None:
    """find_package(recsdk_serving), from C++."""
    source = tree.scratch / "serving_project"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(serving LANGUAGES CXX)\n"
        "find_package(recsdk_serving 0.1 REQUIRED)\nadd_executable(main main.cc)\n"
        "target_link_libraries(main PRIVATE recsdk::serving)\n",
        encoding="ascii",
    )
    (source / "main.cc").write_text(
        '#include "recsdk/serving/serving_table.h"\n'
        "int main() { return recsdk::serving_shard(5, 1) == 0 ? 0 : 1; }\n",
        encoding="ascii",
    )
    run("cmake", "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={tree.prefix}")
    run("cmake", "--build", source / "build")
    run(source / "build" / "main", env=tree.library_path)


def check_serving_size(tree: Installed) -> None:
    """A shared library for serving is small, and knows no table that trains."""
    library = tree.one("lib*/**/librecsdk_serving.so").resolve()
    size = library.stat().st_size
    print(f"     (librecsdk_serving.so has {size} bytes)")
    if size >= MOST_SERVING_BYTES:
        raise CheckFailed(f"librecsdk_serving.so has {size} bytes; {MOST_SERVING_BYTES} are many")
    if "recsdk5Table" in run("nm", "-C", "-D", library) or "thread_pool" in run("nm", library):
        raise CheckFailed("librecsdk_serving.so has parts of what trains")


def check_pkg_config(tree: Installed) -> None:
    """The real pkg-config, where there is one, reads the same."""
    tool = shutil.which("pkg-config")
    if tool is None:
        print("     (no pkg-config here: its files were read by this script only)")
        return
    env = {"PKG_CONFIG_PATH": str(tree.package_config.parent)}
    for library in LIBRARIES:
        run(tool, "--validate", library, env=env)
        # The last -l of the static flags is found only if every line was understood.
        printed = run(tool, "--cflags", "--libs", "--static", library, env=env).split()
        wanted = package_flags(tree.one(f"lib*/**/{library}.pc"), static=True)
        if list(map(os.path.normpath, printed)) != list(map(os.path.normpath, wanted)):
            raise CheckFailed(f"pkg-config prints {printed}, and {wanted} is expected")


def check_cmake_project(tree: Installed) -> None:
    build = tree.scratch / "embed"
    source = CPP / "examples" / "embed"
    run("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={tree.prefix}")
    run("cmake", "--build", build)
    output = run(build / "embed")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    if len(losses) < 2 or losses[-1] >= losses[0]:
        raise CheckFailed(f"the loss does not go down:\n{output}")
    rows = re.search(r"^([1-9]\d*) rows, (\d+) of them loaded$", output, re.MULTILINE)
    if rows is None or rows[1] != rows[2]:
        raise CheckFailed(f"not all rows were loaded:\n{output}")


def check_subdirectory(tree: Installed) -> None:
    """A project that builds the engine along, by add_subdirectory, under its own build type."""
    source = tree.scratch / "subdirectory"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(whole LANGUAGES CXX)\n"
        f'add_subdirectory("{CPP}" recsdk)\nadd_executable(main main.cc)\n'
        "target_link_libraries(main PRIVATE recsdk::recsdk recsdk::serving)\n",
        encoding="ascii",
    )
    (source / "main.cc").write_text(
        '#include "recsdk/c_api.h"\n#include "recsdk/serving/c_api.h"\n'
        "int main() {\n"
        "  return recsdk_abi_version() == RECSDK_ABI_VERSION &&\n"
        "         recsdk_serving_abi_version() == RECSDK_SERVING_ABI_VERSION ? 0 : 1;\n"
        "}\n",
        encoding="ascii",
    )
    objects = f"-DRECSDK_OBJECTS={cpp_tests.Variant().path}"  # what else is long
    run("cmake", "-S", source, "-B", source / "build", "-DRECSDK_INSTALL=OFF", objects)
    run("cmake", "--build", source / "build")
    run(source / "build" / "main")


def check_other_minor_version(tree: Installed) -> None:
    """find_package refuses a minor version that is not the installed one."""
    source = tree.scratch / "other_version"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(other LANGUAGES CXX)\n"
        "find_package(recsdk 0.999 QUIET)\n"
        'if(recsdk_FOUND)\n  message(FATAL_ERROR "another minor version was taken")\nendif()\n',
        encoding="ascii",
    )
    run("cmake", "-S", source, "-B", source / "build", f"-DCMAKE_PREFIX_PATH={tree.prefix}")


def check_shown_names(tree: Installed) -> None:
    """A shared library shows the interface and nothing of the inside."""
    names = [
        line.split()[0]
        for library in LIBRARIES
        for line in run(
            "nm", "-D", "-P", "--defined-only", tree.one(f"lib*/**/lib{library}.so")
        ).splitlines()
    ]
    inside = [name for name in names if INSIDE.match(name) or not SHARED_NAMES.match(name)]
    if inside:
        raise CheckFailed("the library shows names of its inside:\n" + "\n".join(inside))


def check_closing(tree: Installed) -> None:
    """Threads of the library go on after dlclose, so its code must stay, also that of a copy."""
    library = tree.one("lib*/**/librecsdk.so").resolve()
    copy = tree.scratch / "copy.so"
    shutil.copy(library, copy)
    source = tree.scratch / "closing.c"
    source.write_text(
        "#include <dlfcn.h>\n"
        "#include <stddef.h>\n"
        "int main(int count, char** paths) {\n"
        "  for (int i = 1; i < count; ++i) {\n"
        "    void* const library = dlopen(paths[i], RTLD_NOW);\n"
        "    if (library == NULL || dlclose(library) != 0) return 2;\n"
        "    if (dlopen(paths[i], RTLD_NOW | RTLD_NOLOAD) == NULL) return 1;\n"
        "  }\n"
        "  return 0;\n"
        "}\n",
        encoding="ascii",
    )
    program = tree.scratch / "closing"
    run(*CC, "-std=c11", *STRICT, source, "-o", program, "-ldl")
    run(program, library, copy)


def check_header(tree: Installed, compiler: list[str], standard: str, header: Path) -> None:
    """The header compiles alone, and twice in one file."""
    language = "c++" if "++" in standard else "c"
    include = f'#include "{header}"\n'
    source = tree.scratch / f"{header.as_posix().replace('/', '_')}.{language}"
    # C forbids a file without a declaration.
    source.write_text(f"{include}{include}extern int something;\n", encoding="ascii")
    flags = [f"-std={standard}", *STRICT, "-fsyntax-only", f"-I{tree.prefix / 'include'}"]
    run(*compiler, *flags, "-x", language, source)


def chosen_headers(headers: list[Path]) -> list[Path]:
    """All in the full profile; else what has them all, and some that RECSDK_TEST_SEED draws."""
    if os.environ.get("RECSDK_TEST_PROFILE", "ci") == "full":
        return headers
    seed = int(os.environ.get("RECSDK_TEST_SEED", "0"))
    others = [header for header in headers if header != WHOLE]
    return [WHOLE, *sorted(random.Random(seed).sample(others, NUM_HEADERS))]


def checks_of(tree: Installed) -> Iterator[tuple[str, Callable[[], None]]]:
    for name in ("c_minimal", "admission"):
        yield f"{name}.c", partial(check_c_program, tree, name)
    yield "recsdk.pc", partial(check_pkg_config, tree)
    yield "serve.c", partial(check_server, tree)
    yield "embed", partial(check_cmake_project, tree)
    yield "serving project", partial(check_serving_project, tree)
    yield "both libraries", partial(check_both_libraries, tree)
    yield "version", partial(check_other_minor_version, tree)
    if tree.kind == "shared":
        yield "shown names", partial(check_shown_names, tree)
        yield "dlclose", partial(check_closing, tree)
        yield "size of serving", partial(check_serving_size, tree)
        return  # the headers are those of the static tree
    yield "subdirectory", partial(check_subdirectory, tree)
    for header in chosen_headers(tree.headers):
        yield f"{header} as C++20", partial(check_header, tree, CXX, "c++20", header)
    for name in ("c_api.h", "export.h", "serving/c_api.h"):
        yield f"{name} as C11", partial(check_header, tree, CC, "c11", Path("recsdk", name))


def passes(name: str, check: Callable[[], object]) -> bool:
    try:
        check()
    except CheckFailed as error:
        print(f"FAIL {name}\n{error}", flush=True)
        return False
    print(f"ok   {name}", flush=True)
    return True


def run_kind(kind: str, build_dir: Path) -> list[bool]:
    with tempfile.TemporaryDirectory(prefix="recsdk-consumer-") as folder:
        trees: list[Installed] = []
        results = [
            passes(
                f"{kind}: build and install",
                lambda: trees.append(install(kind, build_dir, Path(folder))),
            )
        ]
        for tree in trees:
            results += [passes(f"{kind}: {name}", check) for name, check in checks_of(tree)]
        return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--build-dir",
        type=Path,
        default=ROOT / "build" / "consumer",
        help="where the shared library is built (default: %(default)s)",
    )
    args = parser.parse_args()
    results = [ok for kind in ("static", "shared") for ok in run_kind(kind, args.build_dir)]
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
