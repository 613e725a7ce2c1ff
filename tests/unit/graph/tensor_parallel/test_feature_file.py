"""Feature dicts as JSON, and as objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.feature_file import parse_features
from merak.graph.tensor_parallel.features import Column, Replicate, Row


def test_written_in_json() -> None:
    written = json.loads(
        '{"*.attn.c_attn": {"column": [1, 1, 1]}, "*.c_proj": "row", "*.c_fc": "column",'
        ' "*.gate": "replicate", "*.down": {"row": [2, 1]}}'
    )
    assert parse_features(written) == {
        "*.attn.c_attn": Column(parts=(1, 1, 1)),
        "*.c_proj": Row(),
        "*.c_fc": Column(),
        "*.gate": Replicate(),
        "*.down": Row(parts=(2, 1)),
    }


def test_objects_stay_as_they_are_in_their_order() -> None:
    given = {"b": Row(), "a": Column(parts=(3, 1))}
    assert list(parse_features(given).items()) == list(given.items())
    assert parse_features({}) == {}


@pytest.mark.parametrize(
    "value",
    [
        "columns",
        3,
        None,
        ["column"],
        {},
        {"column": [1], "row": [1]},
        {"column": []},
        {"column": [0, 1]},
        {"column": [1.5]},
        {"column": 3},
        {"replicate": [1]},
        {"diagonal": [1]},
    ],
)
def test_attributes_that_are_none(value: Any) -> None:
    with pytest.raises(ShardError) as caught:
        parse_features({"*.c_fc": value})
    assert f"the feature dict gives '*.c_fc' the attribute {value!r}; write 'column'" in str(
        caught.value
    )
