"""Objects made of JSON: the types of all that is in them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from merak.core.kinds import fits, from_fields, kind_names


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    parts: tuple[Inner, ...]
    counts: dict[str, int]
    pair: tuple[int, float] = (1, 2.0)


WHOLE = {"name": "a", "parts": [{"size": 1}, {"size": 2, "ratio": 3}], "counts": {"b": 4}}


def test_fields_become_an_object() -> None:
    found = from_fields(Outer, {**WHOLE, "pair": [5, 6], "unknown": 7})
    assert found == Outer("a", (Inner(1), Inner(2, 3.0)), {"b": 4}, (5, 6.0))
    assert isinstance(found.parts[1].ratio, float)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"name": None}, "name is None, not a text"),
        ({"name": 1}, "name is 1, not a text"),
        ({"parts": {}}, "parts is {}, not a list"),
        ({"parts": [1]}, "parts[0] is 1, not named fields"),
        ({"parts": [{}]}, "parts[0].size is missing"),
        ({"parts": [{"size": "1"}]}, "parts[0].size is '1', not a whole number"),
        ({"parts": [{"size": True}]}, "parts[0].size is True, not a whole number"),
        ({"parts": [{"size": 1, "ratio": "x"}]}, "parts[0].ratio is 'x', not a number"),
        ({"counts": {"b": 1.5}}, "counts.b is 1.5, not a whole number"),
        ({"counts": []}, "counts is [], not named fields"),
        ({"pair": [1]}, "pair has 1 values, not 2"),
    ],
)
def test_a_field_of_another_type_is_named(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_fields(Outer, WHOLE | changed)
    assert str(caught.value) == sentence


def test_a_number_that_no_float_has() -> None:
    with pytest.raises(OverflowError):
        from_fields(Outer, WHOLE | {"pair": [1, 10**400]})


def test_names_of_types() -> None:
    assert fits(1, float) and not fits(True, float) and fits(None, int | None)
    assert kind_names(int | float | None) == ["a whole number", "a number", "null"]
