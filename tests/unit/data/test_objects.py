"""Lists of objects become columns that are tensors, and come back as they were."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from transformers import BatchFeature

from merak.core.errors import DataError
from merak.data import objects
from merak.data.microbatches import listed, split_batch


def boxes(number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "boxes": torch.randn(number, 4, generator=generator),
        "class_labels": torch.arange(number),
        "area": torch.randn(number, generator=generator).to(torch.bfloat16),
        "crowd": [torch.tensor(number > 2), f"image {number}", None],
    }


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert found.keys() == expected.keys()
    for name in ("boxes", "class_labels", "area"):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name])
    assert found["crowd"][1:] == expected["crowd"][1:]
    assert torch.equal(found["crowd"][0], expected["crowd"][0])


def test_they_come_back_from_any_process_and_any_part_of_a_batch() -> None:
    given = [boxes(number) for number in (3, 0, 60, 1)]
    given[1] = BatchFeature(given[1])
    batch = {"pixels": torch.zeros(4, 2), "labels": given, "temperature": 2.0}
    (packed,) = listed(batch)
    labels = packed["labels"]
    assert labels.shape == (4, 128) and packed["temperature"] == 2.0
    labels = pickle.loads(pickle.dumps(labels))
    parts = split_batch({"pixels": packed["pixels"], "labels": labels}, 2)
    found = [one for part in parts for one in objects.unpack_objects(part)["labels"]]
    for one, expected in zip(found, given, strict=True):
        assert_same(one, expected)


def test_few_shapes_have_room_for_all() -> None:
    words = {objects.packed([boxes(number)]).shape[1] for number in range(50)}
    assert words == {64, 128}


def test_an_example_fits_into_any_shape() -> None:
    rows = objects.packed([boxes(60), boxes(5)])
    smaller, larger = objects.fitted(rows, 3, 64), objects.fitted(rows, 1, 1024)
    assert smaller.shape == (3, 64) and larger.shape == (1, 1024)
    sizes = [len(one["boxes"]) for one in objects.unpacked(smaller)]
    assert 0 < sizes[0] < 60 and sizes[2] == sizes[0]
    for one in objects.unpacked(smaller):
        assert len(one["boxes"]) == len(one["class_labels"]) == len(one["area"])
    assert_same(objects.unpacked(larger)[0], boxes(60))


def test_layouts_have_no_values() -> None:
    given = [boxes(number) for number in (2, 40)]
    text = objects.layouts_of(given)
    assert len(text) < 1000
    made = objects.of_layouts(text, torch.device("meta"))
    assert [one["boxes"].shape for one in made] == [(2, 4), (40, 4)]
    assert [t.dtype for t in objects.tensors_in(made)] == [
        t.dtype for t in objects.tensors_in(given)
    ]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ({"x": torch.zeros(2, 2, dtype=objects.OBJECTS)}, "'x' .* torch.complex128.*complex64"),
        ({"x": [{"lock": threading.Lock()}]}, "cannot be sent to other processes .*lock"),
    ],
)
def test_what_cannot_be_packed_is_refused(batch: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        objects.pack_objects(batch)
