from __future__ import annotations

import inspect

import pytest

import merak
from merak.core.packages import installed_version


@pytest.mark.parametrize("name", merak.__all__)
def test_a_public_name_is_the_same_thing_each_time(name: str) -> None:
    first, second = getattr(merak, name), getattr(merak, name)
    assert first is second
    assert not inspect.ismodule(first)  # a submodule of that name would take its place


def test_other_names_are_unknown() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = merak.nonsense  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_distribution() -> None:
    assert merak.__version__ == installed_version("merak-train")
