"""Versions of packages."""

from __future__ import annotations

from merak.core.packages import installed_version


def test_a_package_that_runs_from_its_sources_has_an_unknown_version() -> None:
    assert installed_version("merak-that-nobody-installed") == "unknown"
    assert installed_version("torch")[0].isdigit()
