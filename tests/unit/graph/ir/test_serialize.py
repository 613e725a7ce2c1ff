"""Graphs as plain data and back."""

from __future__ import annotations

import json
import operator
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn
from transformers.utils import ModelOutput

from merak.core.tensor_meta import TensorMeta
from merak.graph.cache.json_values import NotStorable, Reader, Writer
from merak.graph.cache.value_file import ValueFile, write_values
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.serialize import Ref, find_operator, pack, pack_model, unpack, unpack_model
from merak.graph.trace.opaque.pytree import Slot
from tests.unit.graph import families, odd_models
from tests.unit.graph.stages import Pipeline, built


def through_json(value: Any) -> Any:
    writer = Writer()
    written = json.loads(json.dumps(writer.write(value)))
    return Reader(writer.tensors, writer.metas).read(written)


def through_file(graph: ModelGraph) -> ModelGraph:
    return unpack_model(ValueFile(write_values({"graph": pack_model(graph)}))["graph"])


def text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.format_node()} {n.meta}" for n in graph.nodes)


def test_arguments_of_every_kind() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["tensor"] = 3
    many = graph.call_function(torch.ops.aten.split.Tensor, (x, 2), {"dim": -1})
    one = graph.call_function(operator.getitem, (many, slice(0, 1, None)))
    made = graph.call_function(
        torch.ops.aten.full.default,
        ([2, 3], float("inf")),
        {"dtype": torch.bfloat16, "device": torch.device("cpu"), "pin_memory": None},
    )
    listed = graph.call_function(torch.ops.aten.index.Tensor, (made, [None, x, one]))
    graph.output((listed, x))
    again = unpack(through_json(pack(graph)))
    again.lint()
    assert text(again) == text(graph)


def test_a_path_of_numbers_is_no_path_of_a_file() -> None:
    """Operators on files are not called; an einsum's path is the order of its products."""
    assert find_operator("aten.einsum.default") is torch.ops.aten.einsum.default
    assert find_operator("aten.from_file.default") is None


@pytest.mark.parametrize(
    "kind", [odd_models.ResNet, odd_models.PlainTensors, odd_models.OwnBackward]
)
def test_models_come_back_whole(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    batch = odd_models.BATCHES.get(kind, odd_models.rows)()
    graph = built(model, batch)
    again = through_file(graph)
    for one, other in zip(
        (graph.prologue, *graph.segments), (again.prologue, *again.segments), strict=True
    ):
        assert text(one.graph) == text(other.graph)
        assert (one.index, one.name, one.parameters) == (other.index, other.name, other.parameters)
    assert (again.values, again.parameters, again.tied) == (
        graph.values,
        graph.parameters,
        graph.tied,
    )
    assert again.boundaries() == graph.boundaries()
    assert torch.equal(Pipeline(again, model).train(batch), Pipeline(graph, model).train(batch))


def test_packing_leaves_the_graph_alone() -> None:
    graph = built(families.gpt2(1), families.batch_for("gpt2"))
    before = [text(segment.graph) for segment in graph.segments]
    unpack_model(pack_model(graph))
    assert [text(segment.graph) for segment in graph.segments] == before


class Shade(Enum):
    DARK = "dark"


class Pair(NamedTuple):
    left: int
    right: Any


@dataclass
class Box:
    content: Any

    def __post_init__(self) -> None:
        self.content = "made"


@dataclass
class Output(ModelOutput):
    first: Any = None
    second: Any = None


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, -0.5, float("inf"), 1 + 2j, "text", (), (1, [2, (3,)]), {"a": (1,), 2: None},
        slice(1, None, 2), range(2, 9, 3), torch.bfloat16, torch.device("cuda", 1),
        torch.channels_last, torch.strided, frozenset({1, 3}), {"x", "y"}, Shade.DARK,
        Pair(1, [2]), Output(first=(1, 2)), TensorMeta((2, 3), torch.float32, True), Slot(2),
        OrderedDict([("b", 1), ("a", 2)]), Ref(4),
    ],
    ids=lambda value: type(value).__name__,  # the same in every process
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    again = through_json((value, value))
    assert again == (value, value)
    assert type(again[0]) is type(value)


def test_no_constructor_runs() -> None:
    box = Box(3)
    box.content = [1]
    assert through_json(box).content == [1]


@pytest.mark.parametrize("value", [object(), lambda: 3, nn.Linear(1, 1), b"bytes"])
def test_what_is_no_data_is_not_written(value: Any) -> None:
    with pytest.raises(NotStorable):
        Writer().write([value])


def test_a_class_in_a_function_is_not_written() -> None:
    @dataclass
    class Hidden:
        a: int = 1

    with pytest.raises(NotStorable, match="Hidden"):
        Writer().write(Hidden())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 2), torch.randn(3, 2).t(), torch.tensor(7), torch.randn(2, 1).expand(2, 5),
        torch.randn(2, dtype=torch.complex64).conj(), torch.randn(3).to(torch.float8_e4m3fn),
        torch.tensor([True, False]), torch.empty(0, 3), nn.Parameter(torch.randn(2)),
        torch.randn(4).to(torch.bfloat16), torch.arange(6)[1:], torch.empty(2, device="meta"),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",  # the same in every process
)  # fmt: skip
def test_a_constant_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    meta = TensorMeta((), torch.float32)
    nothing = Segment(-1, "", fx.Graph(), (), (), (), (), ())
    held = {"one": tensor, "same": tensor}
    graph = ModelGraph((), nothing, {"loss": meta}, {}, {}, held, {}, {"loss": "loss"}, "loss")
    again = through_file(graph).constants
    assert again["one"] is again["same"]
    found = again["one"]
    assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert (type(found), found.requires_grad) == (type(tensor), tensor.requires_grad)
    assert found.stride() == tensor.stride()
    if not tensor.is_meta:
        assert torch.equal(
            found.float() if found.itemsize == 1 else found,
            tensor.float() if found.itemsize == 1 else tensor,
        )


def test_operators_on_files_are_not_found() -> None:
    """One that takes a path of a contraction is none of them."""
    assert find_operator("aten.from_file.default") is None
    assert find_operator("aten.einsum.default") is torch.ops.aten.einsum.default
