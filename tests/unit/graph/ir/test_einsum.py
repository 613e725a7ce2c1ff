"""Labels of einsums."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.einsum import einsum_labels

Labels = tuple[str, ...]


def labels_of(equation: str, *dims: int) -> tuple[list[Labels], Labels] | None:
    graph = fx.Graph()
    tensors = []
    for number, num_dims in enumerate(dims):
        tensors.append(graph.placeholder(f"x{number}"))
        tensors[-1].meta["tensor"] = TensorMeta((2,) * num_dims, torch.float32, False)
    return einsum_labels(graph.call_function(torch.ops.aten.einsum.default, (equation, tensors)))


@pytest.mark.parametrize(
    "equation,dims,expected",
    [
        ("ibh, hnd -> ibnd", (3, 3), (["ibh", "hnd"], "ibnd")),
        ("bj,ak", (2, 2), (["bj", "ak"], "abjk")),  # of no result: what is there once, sorted
        ("ba,ac", (2, 2), (["ba", "ac"], "bc")),
        ("ij->", (2,), (["ij"], "")),
    ],
)
def test_letters(equation: str, dims: tuple[int, ...], expected: tuple[list[str], str]) -> None:
    terms, result = expected
    assert labels_of(equation, *dims) == ([tuple(term) for term in terms], tuple(result))


def test_dims_of_an_ellipsis_are_counted_from_behind() -> None:
    found = labels_of("...qd,k...d->...qk", 4, 3)
    two = ("...2", "...1")
    assert found == ([(*two, "q", "d"), ("k", "...1", "d")], (*two, "q", "k"))
    assert labels_of("i...,...j", 3, 2) == ([("i", *two), ("...1", "j")], (*two, "i", "j"))


def test_diagonals_have_no_labels() -> None:
    assert labels_of("ii->i", 2) is None
