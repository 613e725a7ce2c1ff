"""Opaque modules: their gradients, their writes, and what is refused."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from merak.core.errors import PlanError, TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.cache.value_file import ValueFile, write_values
from merak.graph.ir.serialize import pack_model, unpack_model
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.opaque import record
from merak.graph.trace.opaque.operator import OpaqueCall, connect_modules, opaque_calls
from merak.graph.trace.opaque.pytree import fill, flatten
from merak.graph.trace.opaque.report import opaque_cause, opaque_lines, report_opaque
from merak.plan.layout import check_stages
from tests.tiers import one_in
from tests.unit.graph.stages import Pipeline, assert_like_eager

COLUMNS = {
    "x": TensorMeta((6, 8), torch.float32),
    "labels": TensorMeta((6,), torch.int64),
}


class Branch(nn.Module):
    """Doubles what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return 2 * y if y.max() > 0.5 else y


class Experts(nn.Module):
    """Loops over the experts that were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            result[rows] = self.experts[number](x[rows]) * weights[rows, None]
            result = 2 * result  # so that the order of experts counts
        return result


class Range(nn.Module):
    """Keeps the largest number it has seen, and passes on what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("top", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if x.max() > self.top:
            self.top = x.detach().max()
        else:
            self.top = 0.9 * self.top
        return x, None


class Ranged(nn.Module):
    """A linear layer and a range."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.range = Range()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.range(self.linear(x))
        return torch.tanh(y)


class Noted(Ranged):
    """Notes in its first call what kind of batches it gets, for which further calls are traced."""

    kind: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "rows"
        return super().forward(x)


class Writes(nn.Module):
    """Adds into what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.clone())
        x += 1.0 if y.max() > 0.5 else 2.0
        return y


class Written(nn.Module):
    """Reads what its part has written into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.part = Writes()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.part(y) * y


class Model(nn.Module):
    """Some blocks, of which one runs twice, and a loss."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


@pytest.mark.parametrize("block", [Branch, Experts, Ranged, Noted, Written])
@one_in(2)
@pytest.mark.parametrize("scale", [0.01, 5.0])
def test_gradients_and_buffers_are_those_of_eager_code(
    block: type[nn.Module], scale: float
) -> None:
    torch.manual_seed(0)
    model = Model(block)
    batch = {"x": scale * torch.randn(6, 8), "labels": torch.randint(0, 3, (6,))}
    graph = build_graph(GraphSource(model), COLUMNS, training=True)
    assert len(opaque_calls(graph)) == 3
    assert_like_eager(graph, model, batch)  # an expert that nobody chose has no gradient in either


def test_only_the_innermost_module_is_opaque_and_the_line_is_named() -> None:
    source = GraphSource(Model(Ranged))
    build_graph(source, COLUMNS, training=True)
    assert list(source.opaque.modules) == ["blocks.0.range", "blocks.1.range"]
    assert "if x.max() > self.top:" in source.opaque.modules["blocks.0.range"]


def test_a_graph_that_was_written_down_calls_the_modules_of_the_model_it_is_read_for() -> None:
    torch.manual_seed(0)
    model = Model(Branch)
    graph = build_graph(GraphSource(model), COLUMNS, training=True)
    batch = {"x": torch.randn(6, 8), "labels": torch.randint(0, 3, (6,))}
    written = write_values({"graph": pack_model(graph)})
    read = unpack_model(ValueFile(written)["graph"])
    assert all(call.ref.module is None for call in opaque_calls(read))
    connect_modules(read, model)
    assert_like_eager(read, model, batch)


class Picks(nn.Module):
    """Returns as many rows as are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y[:, 0] > 0].mean(0) if y.max() > 100.0 else y[y[:, 0] > 0]


class Picked(nn.Module):
    """Hands those rows on to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.picks = Picks()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.picks(x).sum()}


def test_sizes_that_depend_on_values_are_refused() -> None:
    columns = {"x": COLUMNS["x"]}
    with pytest.raises(TraceError, match="picks cannot be opaque: what it returns has sizes"):
        build_graph(GraphSource(Picked()), columns, training=True)


class Kinds(nn.Module):
    """Returns numbers without gradients beside others, and does less in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x) * scale
        top = y.argmax(-1)
        if self.training and int(top.max()) > 3:
            y = y * 1.5
        return {"y": y, "top": top, "weight": y.detach().softmax(-1), "large": y > 0}


class Shares(nn.Module):
    """One module under two names, called with gradients and without, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = Kinds()
        self.again = self.kinds
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.kinds(self.head(x), self.frozen)
        with torch.no_grad():
            target = self.again(x, scale=self.frozen)["y"]
        picked = nn.functional.embedding(found["top"], self.kinds.linear.weight)
        y = found["y"] + picked * found["weight"] * found["large"]
        return {"loss": (self.again(y, self.frozen)["y"] - target).square().mean(), "y": y}


def test_results_of_every_kind_shared_modules_and_no_grad() -> None:
    torch.manual_seed(0)
    model = Shares()
    eager = copy.deepcopy(model)
    batch = {"x": torch.randn(6, 8)}
    source = GraphSource(model)
    graph = build_graph(source, {"x": COLUMNS["x"]}, training=True)
    assert [call.grad for call in opaque_calls(graph)] == [True, False, True]
    assert_like_eager(graph, model, batch)
    evaluated = build_graph(source, {"x": COLUMNS["x"]}, training=False)
    with torch.no_grad():
        found = Pipeline(evaluated, model).evaluate(batch)
        torch.testing.assert_close(found["y"], eager.eval()(**batch)["y"])
    assert model.training and model.kinds.training


class Jagged(nn.Module):
    """The sum of the norms of samples, as a jagged tensor has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = int(x.shape[0] + x.max() * 0)
        ends = torch.arange(count + 1) * x.shape[1]
        rows = torch.nested.nested_tensor_from_jagged(x.flatten(), ends)
        return torch.stack([row.norm() for row in rows.unbind()]).sum()


def test_jagged_tensors_inside_are_those_of_eager_code() -> None:
    """torch refuses to make them while it traces, which an opaque module is no part of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Jagged())
    graph = build_graph(GraphSource(model), {"input": COLUMNS["x"]}, training=True)
    assert len(opaque_calls(graph)) == 1
    assert_like_eager(graph, model, {"input": torch.randn(6, 8)})


def test_opaque_modules_are_reported_once_for_modules_that_are_alike() -> None:
    graph = build_graph(GraphSource(Model(Experts)), COLUMNS, training=True)
    first, second = report_opaque(graph)
    assert (first.module, first.class_name, first.calls) == ("blocks.0", "Experts", 2)
    assert (second.module, second.calls) == ("blocks.1", 1)
    assert first.parameters == 8 * 3 + 3 + 3 * (8 * 8 + 8)
    (line,) = opaque_lines([first, second])
    assert line.startswith("opaque: blocks.0 and 1 more (Experts, 486 parameters): ")
    assert f"{__file__}:" in line
    assert "chosen.unique().tolist()" in line


def test_of_modules_that_are_alike_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    probe = record.probe

    def counted(call: OpaqueCall, *others: Any) -> Any:
        tried.append(call.ref.path)
        return probe(call, *others)

    monkeypatch.setattr(record, "probe", counted)
    build_graph(GraphSource(Model(Experts)), COLUMNS, training=True)
    # The first call's argument is the batch, without a gradient; the last two calls are alike.
    assert tried == ["blocks.0", "blocks.1"]
    tried.clear()
    build_graph(GraphSource(Model(Ranged)), COLUMNS, training=True)
    assert tried == ["blocks.0.range", "blocks.1.range"]  # whose buffers hold numbers of their own


SEEN: SimpleQueue[weakref.ref[torch.Tensor]] = SimpleQueue()
"""Activations of modules that fail; a list would be as before once the trace ends."""


class Fails(nn.Module):
    """Computes something, and fails for what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).softmax(-1)  # whose gradient is computed from its own result
        if not isinstance(y, FakeTensor):
            SEEN.put(weakref.ref(y))
        places = (y > 0).nonzero().tolist()
        return y * places[y.numel()][0]


class Surrounded(nn.Module):
    """A model with such a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Fails()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inner(x), labels)


def test_a_failed_call_lets_go_of_what_it_has_computed() -> None:
    with pytest.raises(TraceError, match="it fails on synthetic values") as caught:
        build_graph(GraphSource(Surrounded()), COLUMNS, training=True)
    seen = [SEEN.get_nowait() for _ in range(SEEN.qsize())]
    assert seen and all(ref() is None for ref in seen), caught


def test_tensors_of_a_call_go_with_its_last_use() -> None:
    tensor = torch.zeros(3)
    seen = weakref.ref(tensor)
    gc.disable()
    try:
        found, structure = flatten({"x": [tensor, (tensor,)]})
        filled = fill(structure, found)
        assert len(found) == 1 and filled["x"][1][0] is tensor
        del tensor, found, filled
        assert seen() is None
    finally:
        gc.enable()


class _Packed(torch.autograd.Function):
    """A product with packed weights, whose kernel asks for the memory that it reads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed)
        return x @ _unpacked(packed).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ _unpacked(ctx.saved_tensors[0]), None


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    halves = torch.stack((packed & 15, packed >> 4), -1).reshape(8, 8)
    # As a kernel does, which is given the address of its operand.
    out = torch.empty(8, 8)
    torch.empty(0).set_(out.untyped_storage()).resize_(64).copy_(halves.flatten() / 8 - 1)
    if packed.is_meta or isinstance(packed, FakeTensor):
        raise RuntimeError("Attempted to set the storage of a tensor on another device")
    return out


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randint(0, 256, (32,), generator=generator, dtype=torch.uint8)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Packed.apply(x, self.weight) + self.bias  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Frozen packed products, with weights to train beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.ModuleList(Packed() for _ in range(2))
        self.beside = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for packed, beside in zip(self.packed, self.beside, strict=True):
            x = torch.tanh(packed(x) + beside(x))
        return nn.functional.cross_entropy(x, labels)


def test_a_kernel_that_fails_on_fake_tensors_is_opaque() -> None:
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("torch._subclasses.fake_tensor").addHandler(handler)
    torch.manual_seed(0)
    source = GraphSource(Adapted())
    graph = build_graph(source, COLUMNS, training=True)
    logging.getLogger("torch._subclasses.fake_tensor").removeHandler(handler)
    assert sorted(source.opaque.modules) == ["packed.0", "packed.1"]
    assert not said  # what torch logs of a trace that is followed by another
    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(6, 8, generator=generator),
        "labels": torch.randint(8, (6,), generator=generator),
    }
    assert_like_eager(graph, source.model, batch)


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean()  # type: ignore[no-any-return]


def test_what_fails_on_real_values_too_is_the_models_fault() -> None:
    with pytest.raises(TraceError, match="Wrong fails in its own forward, traced or not, at"):
        build_graph(GraphSource(Wrong()), COLUMNS, training=True)


class Params4bit(nn.Parameter):
    """Packed values with a state beside them, as of bitsandbytes."""

    scale = 0.5


def test_weights_of_a_class_of_their_own_are_refused() -> None:
    model = Adapted()
    model.packed[0].weight = Params4bit(model.packed[0].weight.detach(), requires_grad=False)
    with pytest.raises(TraceError, match=r"packed.0.weight of Adapted is a Params4bit, a class"):
        GraphSource(model)


def test_too_few_segments_and_no_shards_name_the_module_and_its_line() -> None:
    graph = build_graph(GraphSource(OneBranch()), COLUMNS, training=True)
    said = opaque_cause(graph)
    assert said.startswith("inner (Branch) is opaque, one operator that is neither cut nor split")
    assert "`return 2 * y if y.max() > 0.5 else y`" in said
    with pytest.raises(PlanError, match=r"cannot fill 9 stages \(pp=9\): inner \(Branch\) is"):
        check_stages(graph, 9, 9)


class OneBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branch()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.inner(x), labels)
