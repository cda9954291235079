from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

import older_versions
import set_up


def test_venvs_of_older_releases_have_what_the_packages_need() -> None:
    there = {Requirement(each).name for each in older_versions.NEEDS}
    there |= {*set_up.PACKAGES, *older_versions.PINS_OF_PAIR}
    for package in set_up.PACKAGES:
        needed = map(Requirement, metadata.requires(package) or ())
        assert {each.name for each in needed if each.marker is None} <= there
