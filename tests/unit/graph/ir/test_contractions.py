"""Labels of the dims of products."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.contractions import contraction

Labels = tuple[str | None, ...]

aten = torch.ops.aten


def placeholder(graph: fx.Graph, *shape: int) -> fx.Node:
    node = graph.placeholder("x")
    node.meta["tensor"] = TensorMeta(shape, torch.float32, False)
    return node


def labels_in(node: fx.Node) -> tuple[list[Labels], Labels] | None:
    found = contraction(node)
    return None if found is None else ([tuple(n) for _, n in found.operands], found.result)


def labels_of(equation: str, *dims: int) -> tuple[list[Labels], Labels] | None:
    graph = fx.Graph()
    tensors = [placeholder(graph, *(2,) * num_dims) for num_dims in dims]
    return labels_in(graph.call_function(aten.einsum.default, (equation, tensors)))


@pytest.mark.parametrize(
    "target,shapes,factors,summand,result",
    [
        # the weight of a linear layer is (outputs, inputs)
        (aten.linear.default, ((3, 4, 5), (6, 5), (6,)), "b0 r i, o i", "o", "b0 r o"),
        (aten.addmm.default, ((1, 6), (4, 5), (5, 6)), "r i, i o", "- o", "r o"),
        (aten.matmul.default, ((2, 1, 4, 5), (3, 5, 6)), "b0 - r i, b1 i o", None, "b0 b1 r o"),
        (aten.matmul.default, ((5,), (5, 6)), "i, i o", None, "o"),
        (aten.baddbmm.default, ((6,), (2, 4, 5), (2, 5, 6)), "b0 r i, b0 i o", "o", "b0 r o"),
        (aten.conv1d.default, ((2, 4, 8), (6, 4, 3), (6,)), "r i p, o i k", "o", "r o p"),
        (aten.conv_transpose1d.default, ((2, 4, 8), (4, 6, 3)), "r i p, i o k", None, "r o p"),
        (aten._grouped_mm.default, ((8, 4), (3, 4, 6)), "r i, g i o", None, "r o"),
    ],
)
def test_products_of_two(
    target: object,
    shapes: tuple[tuple[int, ...], ...],
    factors: str,
    summand: str | None,
    result: str,
) -> None:
    graph = fx.Graph()
    assert callable(target)
    found = contraction(
        graph.call_function(target, tuple(placeholder(graph, *shape) for shape in shapes))
    )
    assert found is not None
    short = {"batch0": "b0", "batch1": "b1", "pixel0": "p", "kernel of pixel0": "k", None: "-"}

    def said(labels: Sequence[str | None]) -> str:
        return " ".join(short.get(label, str(label)[:1]) for label in labels)

    assert ", ".join(said(labels) for _, labels in found.factors) == factors
    assert (found.summand and said(found.summand[1])) == summand
    assert said(found.result) == result


def test_weights_of_groups_that_are_a_list_count_one_by_one() -> None:
    graph = fx.Graph()
    rows, *weights = (placeholder(graph, *shape) for shape in ((8, 4), (6, 4), (6, 4)))
    args = (rows, weights, placeholder(graph, 2), True, True)
    node = graph.call_function(torch.ops.merak.grouped_linear.default, args)
    assert labels_in(node) == ([("row", "in"), ("out", "in"), ("out", "in")], ("row", "out"))


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
