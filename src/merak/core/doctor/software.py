"""Versions of Python and of the packages that Merak needs, against its own requirements."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from merak.core.doctor.finding import Judgement, System, fine, problem, warning

DISTRIBUTION = "merak-train"

SHOWN = ("torch", "transformers", "accelerate", "safetensors", "datasets")
"""Packages whose versions are shown where nothing is wrong."""


@dataclass(frozen=True, slots=True)
class Software:
    """Versions that are installed, and those that Merak supports.

    Args:
        merak: its version; empty where it is not installed, but run from its sources.
        python: version of this Python.
        python_range: that Merak supports, as of PEP 440.
        versions: of the installed packages, by name.
        ranges: that Merak supports, of all packages that it needs.
    """

    merak: str
    python: str
    python_range: str
    versions: Mapping[str, str]
    ranges: Mapping[str, str]


def read_software(system: System) -> Software:
    """Read versions from the metadata of the installed packages.

    Args:
        system: not read; packages are those of this process.
    """
    try:
        own = metadata.metadata(DISTRIBUTION)
        required = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        found = {name: v for name in SHOWN if (v := _version(name))}
        return Software("", platform.python_version(), "", found, {})
    needed = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return Software(
        merak=own["Version"],
        python=platform.python_version(),
        python_range=own["Requires-Python"] or "",
        versions={one.name: v for one in needed if (v := _version(one.name))},
        ranges={one.name: str(one.specifier) for one in needed},
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_python(software: Software) -> Iterator[Judgement]:
    """Check the version of Python."""
    if _is_in(software.python, software.python_range):
        yield fine(f"Python {software.python}")
    else:
        yield problem(
            f"Python {software.python}, but Merak needs {software.python_range}",
            f"make an environment with a Python {software.python_range}",
        )


def check_packages(software: Software) -> Iterator[Judgement]:
    """Check that every package is there, in a version that Merak supports."""
    if not software.merak:
        yield warning(
            f"{DISTRIBUTION} is not installed, so the versions that it supports are not known "
            f"({_listed(software)})",
            "install it in this environment, from its sources with `pip install -e .`",
        )
        return
    wrong = 0
    for name, wanted in software.ranges.items():
        version = software.versions.get(name, "")
        if version and _is_in(version, wanted):
            continue
        wrong += 1
        there = f"{name} {version}" if version else f"{name} is not installed"
        fix = f"pip install '{name}{wanted}'"
        if not version:
            yield problem(there, fix)
        else:
            yield problem(f"{there}, but Merak {software.merak} needs {wanted}", fix)
    if not wrong:
        yield fine(f"Merak {software.merak} with {_listed(software)}")


def _listed(software: Software) -> str:
    versions = software.versions
    return ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)


def _is_in(version: str, wanted: str) -> bool:
    return SpecifierSet(wanted).contains(version, prereleases=True)
