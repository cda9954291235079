from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

import debian


class Machine:
    """Packages present on a machine, and what was said and installed."""

    def __init__(self, *present: str) -> None:
        self.present = set(present)
        self.said: list[str] = []
        self.asked: list[str] = []

    def need(self, package: str) -> debian.Need:
        return debian.Need(
            package=package, purpose="testing", is_present=lambda: package in self.present
        )

    def install(self, packages: Sequence[str]) -> None:
        self.asked += packages
        self.present |= set(packages)


def test_nothing_missing_installs_nothing() -> None:
    machine = Machine("g++")
    debian.ensure([machine.need("g++")], is_root=True, install=machine.install, say=print)
    assert machine.asked == []


def test_root_installs_only_what_is_missing() -> None:
    machine = Machine("g++")
    wanted = [machine.need("g++"), machine.need("libgtest-dev")]
    debian.ensure(wanted, is_root=True, install=machine.install, say=machine.said.append)
    assert machine.asked == ["libgtest-dev"]
    assert "libgtest-dev" in machine.said[0]


@pytest.mark.parametrize("is_root", [False, True])
def test_without_root_or_apt_the_packages_are_named(is_root: bool) -> None:
    machine = Machine()
    install = None if is_root else machine.install
    wanted = [machine.need("g++"), machine.need("python3-venv")]
    with pytest.raises(debian.MissingPackagesError, match=r"apt-get install g\+\+ python3-venv"):
        debian.ensure(wanted, is_root=is_root, install=install, say=print)
    assert machine.asked == []


def test_a_failed_installation_names_the_packages() -> None:
    machine = Machine()

    def fail(packages: Sequence[str]) -> None:
        raise subprocess.CalledProcessError(100, ["apt-get", "update"])

    with pytest.raises(debian.MissingPackagesError, match="apt-get install g"):
        debian.ensure([machine.need("g++")], is_root=True, install=fail, say=machine.said.append)


def test_installing_that_does_not_help_is_an_error() -> None:
    machine = Machine()
    with pytest.raises(debian.MissingPackagesError, match="still missing"):
        debian.ensure([machine.need("x")], is_root=True, install=lambda _: None, say=print)


def test_headers_are_looked_for_with_the_compiler() -> None:
    assert debian.has_header("vector")
    assert not debian.has_header("no/such/header.h")


def test_profiles_ask_for_what_they_build() -> None:
    demo = {need.package for need in debian.needs([])}
    test = {need.package for need in debian.needs(debian.TEST_HEADERS)}
    assert demo == {"g++", "python3-venv", "python3-dev", "libxxhash-dev", "libzstd-dev"}
    assert test - demo == {"libgtest-dev"}
