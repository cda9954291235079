from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import release

MARKER = "<!-- towncrier release notes start -->\n"


@pytest.fixture
def package(tmp_path: Path) -> release.Package:
    package = release.Package("core", tmp_path)
    (package.home / "changelog.d").mkdir(parents=True)
    (package.home / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (package.home / "CHANGELOG.md").write_text(f"{MARKER}\n## 0.2.0 (2026-01-02)\n")
    return package


def test_tag_version_and_changelog_agree(package: release.Package) -> None:
    release.check_tag(package, "core-v0.2.0")


@pytest.mark.parametrize("tag", ["core-v0.1.0", "v0.2.0", "sharding-v0.2.0", "core-0.2.0"])
def test_a_tag_that_does_not_fit_is_refused(package: release.Package, tag: str) -> None:
    with pytest.raises(release.ReleaseError, match="tag it core-v0.2.0"):
        release.check_tag(package, tag)


def test_fragments_must_be_collected_first(package: release.Package) -> None:
    (package.home / "changelog.d" / "+tables.added.md").write_text("Tables.\n")
    with pytest.raises(release.ReleaseError, match=r"\+tables.added.md.*towncrier build"):
        release.check_tag(package, "core-v0.2.0")


def test_the_changelog_must_have_the_version(package: release.Package) -> None:
    (package.home / "CHANGELOG.md").write_text(f"{MARKER}\n## 0.2.01\n## 0.1.0\n")
    with pytest.raises(release.ReleaseError, match="no section 0.2.0"):
        release.check_tag(package, "core-v0.2.0")


@pytest.mark.parametrize("layer", release.LAYERS)
def test_every_layer_has_what_a_release_needs(layer: str) -> None:
    package = release.Package(layer)
    assert package.version
    assert MARKER in (package.home / "CHANGELOG.md").read_text()
    assert (package.home / "LICENSE").read_text() == (release.ROOT / "LICENSE").read_text()


def sdist_with(folder: Path, name: str) -> Path:
    """An sdist of one file."""
    home = folder / name / "recsdk_core-0.2.0"
    home.mkdir(parents=True)
    (home / name).touch()
    return Path(shutil.make_archive(str(folder / name), "gztar", home.parent, home.name))


def test_every_sdist_is_unpacked_at_one_place(package: release.Package, tmp_path: Path) -> None:
    first = release.unpack(package, sdist_with(tmp_path, "first"))
    assert [path.name for path in first.iterdir()] == ["first"]
    assert release.unpack(package, sdist_with(tmp_path, "second")) == first
    assert [path.name for path in first.iterdir()] == ["second"]
