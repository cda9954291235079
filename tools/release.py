"""Builds the sdist and the wheel of one package, or checks that a tag may be released.

    .venv/bin/python tools/release.py core [--tag core-v0.1.0] [--output dist]

The wheel is built from the sdist. With --tag the version in the tag, in pyproject.toml and in the
changelog must be the same, and no changelog fragment may be left over.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("core", "sharding", "pipeline")


class ReleaseError(Exception):
    """The package is not ready to be released; the message says what to do."""


@dataclass(frozen=True)
class Package:
    """One of the distributions of this repository."""

    layer: str
    root: Path = ROOT

    @property
    def home(self) -> Path:
        return self.root / "packages" / f"recsdk-{self.layer}"

    def stated_version(self) -> tuple[Path, str]:
        """The file that states the version, and the version: the metadata, or what they read."""
        module = self.home / "src" / f"recsdk_{self.layer}" / "_internal" / "version.py"
        for path in (self.home / "pyproject.toml", module):
            pattern = r'^(?:__version__|version) = "([^"]+)"$'
            if found := re.search(pattern, path.read_text(), re.MULTILINE):
                return path, found.group(1)
        raise ReleaseError(f"neither {self.home}/pyproject.toml nor {module} states a version")

    @property
    def version(self) -> str:
        return self.stated_version()[1]

    def fragments(self) -> list[str]:
        """Changelog fragments that towncrier has not collected yet."""
        return sorted(path.name for path in (self.home / "changelog.d").glob("*.md"))


def check_tag(package: Package, tag: str) -> None:
    """Raises ReleaseError unless tag, version and changelog agree."""
    wanted = f"{package.layer}-v{package.version}"
    if tag != wanted:
        raise ReleaseError(
            f"tag {tag} does not fit version {package.version}: tag it {wanted}, or change the"
            f" version in {package.stated_version()[0].relative_to(package.root)}"
        )
    home = package.home.relative_to(package.root)
    where = f"--dir {home} --config {home}/pyproject.toml"
    collect = f"towncrier build --yes --version {package.version} {where}"
    if package.fragments():
        left = ", ".join(package.fragments())
        raise ReleaseError(f"changelog fragments are left over ({left}); run: {collect}")
    changelog = (package.home / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(package.version)}\b", changelog, re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no section {package.version}; run: {collect}")


def build(package: Package, output: Path, settings: Sequence[str] | None = None) -> list[Path]:
    """Builds the sdist and from it the wheel, with the tools of this environment; returns both.

    `settings`: those with which the package was built in the tree; the wheel is then built there
    too, from the objects that are there, instead of from the sdist. For tests.
    """
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as fresh:
        call_build(package, package.home, "--sdist", fresh)
        [sdist] = Path(fresh).iterdir()
        source = unpack(package, sdist) if settings is None else package.home
        call_build(package, source, "--wheel", fresh, *settings or ())
        return sorted(path.replace(output / path.name) for path in Path(fresh).iterdir())


def unpack(package: Package, sdist: Path) -> Path:
    """The unpacked sdist, always at one place: elsewhere a compiler's cache would know nothing."""
    place = package.root / "build" / "release" / package.layer
    shutil.rmtree(place, ignore_errors=True)
    shutil.unpack_archive(sdist, place)
    [home] = place.iterdir()
    return home


def call_build(package: Package, source: Path, what: str, output: str, *settings: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", what, "--outdir", output, *settings]
    done = subprocess.run(
        [*command, str(source)],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise ReleaseError(f"{done.stdout}\nbuilding recsdk-{package.layer} failed, see above")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layer", choices=LAYERS)
    parser.add_argument("--tag", help="check that this tag may be released")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    package = Package(args.layer)
    try:
        if args.tag:
            check_tag(package, args.tag)
        for path in build(package, args.output):
            print(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
