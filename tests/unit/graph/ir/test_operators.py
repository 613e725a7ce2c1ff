"""The table of operator families, and that nobody keeps a list beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import merak
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir import operators
from merak.graph.ir.operators import (
    DROPOUTS,
    GEMM_OPERANDS,
    GEMMS,
    aten_family,
    family,
    is_weight_gemm,
)
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.propagate import weight_dims

FAMILIES = {
    name: value for name, value in vars(operators).items() if name.isupper() and name[0] != "_"
}
OURS = {
    "attend_sharded",
    "grouped_linear",
    "grouped_linear_rows",
    "grouped_mm_fallback",
    "grouped_mm_rows",
    "grouped_values",
    "grouped_values_rows",
    "grouped_mm_fallback_rows",
    "sharded_batch_norm",
    "own_grouped_linear",
    "own_grouped_values",
    "_no_grad_trunc_normal_",
    "sym_constrain_range",
}
"""Names that are functions of Merak, of transformers or of torch.nn.init, not operators of torch.

`sym_constrain_range` is one of torch's, which `torch.ops.aten` yields as well.
"""


@pytest.mark.parametrize("name", [n for n, v in FAMILIES.items() if isinstance(v, frozenset | set)])
def test_every_name_is_an_operator(name: str) -> None:
    missing = {n for n in FAMILIES[name] - OURS if not hasattr(torch.ops.aten, n)}
    assert not missing


def test_operands_are_those_of_the_schemas() -> None:
    for name, operands in GEMM_OPERANDS.items():
        if name in OURS:
            continue
        packet = getattr(torch.ops.aten, name)
        arguments = getattr(packet, packet.overloads()[0])._schema.arguments
        assert "Tensor" in str(arguments[operands.x].type)
        assert "Tensor" in str(arguments[operands.weight].type)
        if operands.bias is not None:
            assert arguments[operands.bias].name in ("bias", "self")
    assert GEMM_OPERANDS.keys() < GEMMS


def test_names_of_other_libraries_are_apart() -> None:
    assert family(torch.ops.aten.add.Tensor) == "add"
    assert aten_family(torch.ops.aten.add.Tensor) == "add"
    assert family(len) == "len"
    assert aten_family(len) == ""


class Through(nn.Module):
    """A product with a weight that is seen through a view."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.zeros(8, 4))
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = {
            "swapdims": lambda w: w.swapdims(0, 1),
            "swapaxes": lambda w: w.swapaxes(0, 1),
            "transpose": lambda w: w.transpose(0, 1),
            "clone": lambda w: w.clone().t(),
            "squeeze": lambda w: w.unsqueeze(0).squeeze(0).t(),
            "flatten": lambda w: w.unflatten(0, (2, 4)).flatten(0, 1).t(),
        }
        return (self.first(x) @ views[self.view](self.weight)).sum()


@pytest.mark.parametrize(
    "view", ["swapdims", "swapaxes", "transpose", "clone", "squeeze", "flatten"]
)
def test_weights_are_seen_through_views(view: str) -> None:
    source = GraphSource(Through(view))
    graph = build_graph(source, {"x": TensorMeta((3, 4), torch.float32)}, training=False)
    nodes = [node for segment in graph.segments for node in segment.graph.nodes]
    assert sum(is_weight_gemm(node) for node in nodes) == 2
    if view not in ("squeeze", "flatten"):  # whose dims tensor parallelism does not follow
        (weight,) = (n for n in nodes if n.op == "placeholder" and n.meta["name"] == "weight")
        assert weight_dims(weight) == ((0, 1),)


@pytest.mark.parametrize(
    "multiply,expected",
    [
        (lambda x, w: torch.einsum("ab,cb->ac", x, w), ((0, 1),)),
        (lambda x, w: torch.einsum("ab,bc->ac", x, torch.einsum("ab->ba", w)), ()),
        (lambda x, w: torch.einsum("ab,bc,cb->ac", x, w.t(), w.t()), ()),
        (lambda x, w: w @ x.t(), ((0, 1),)),
        (lambda x, w: functional.linear(w, x), ()),  # a weight in the place of activations
        (lambda x, w: torch.addmm(x.new_zeros(4), x, w), ((1, 0),)),
    ],
)
def test_dims_of_weights_are_those_of_their_products(
    multiply: Callable[..., torch.Tensor], expected: tuple[tuple[int, int], ...]
) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return multiply(x, self.weight)

    columns = {"x": TensorMeta((3, 4), torch.float32)}
    graph = build_graph(GraphSource(Product()), columns, training=False)
    (weight,) = (
        node
        for segment in graph.segments
        for node in segment.graph.find_nodes(op="placeholder")
        if node.meta["name"] == "weight"
    )
    assert weight_dims(weight) == expected


@pytest.mark.parametrize("name", sorted(DROPOUTS))
def test_dropouts_that_do_nothing_are_left_out(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(torch, name)(x * 2, 0.5, False)

    columns = {"x": TensorMeta((2, 3, 4), torch.float32)}
    graph = build_graph(GraphSource(Model()), columns, training=False)
    nodes = [n for s in (graph.prologue, *graph.segments) for n in s.graph.nodes]
    assert name not in {aten_family(node.target) for node in nodes}


def test_there_is_no_other_list_of_gemms() -> None:
    """What names three GEMMs or more side by side is a list beside the table."""
    root = Path(merak.__file__).parent
    found = {}
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path == Path(operators.__file__) or len(GEMMS & set(re.findall(r"\w+", text))) < 3:
            continue
        for node in ast.walk(ast.parse(text)):
            if len(_literals(node) & GEMMS) > 2:
                found[f"{path.relative_to(root)}:{node.lineno}"] = _literals(node)  # type: ignore[attr-defined]
    # Names of functions of torch.nn.functional and torch, which are no operators.
    allowed = ("graph/trace/modes/packed_sequences.py",)
    assert not {place for place in found if not place.startswith(allowed)}


def _literals(node: ast.AST) -> set[str]:
    """The words that a literal holds, without namespace and overload."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
        words = node.value.split()
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        words = [e.value for e in node.elts if isinstance(e, ast.Constant)]
    elif isinstance(node, ast.Dict):
        words = [e.value for e in node.keys if isinstance(e, ast.Constant)]
    else:
        return set()
    texts = (word for word in words if isinstance(word, str))
    return {text.removeprefix("aten.").partition(".")[0] for text in texts}
