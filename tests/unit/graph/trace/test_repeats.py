"""Copies of equal blocks in a trace: the graph is that of a trace in which every block runs."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.repeats.region import Region
from tests.tiers import one_in
from tests.unit.graph.architectures import ARCHITECTURES

WIDTH, DEPTH = 8, 4
COUNTS = [0]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the blocks that have been copied."""
    found: list[str] = []
    copy = Region.copy

    def noted(self: Region, graph: fx.Graph, instead: Any, paths: tuple[str, str]) -> Any:
        found.append(paths[1])
        return copy(self, graph, instead, paths)

    monkeypatch.setattr(Region, "copy", noted)
    return found


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return x + self.inner(self.norm(x)).relu()


class ByIndex(Block):
    """Its index decides what runs."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return super().forward(x) if self.index % 2 else super().forward(x) * 2


class ByDict(Block):
    """The same, read in a way that nothing sees."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return super().forward(x) if vars(self)["index"] % 2 else super().forward(x) * 2


class ByGlobal(Block):
    """It counts calls in a global, which decides what runs."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        COUNTS[0] += 1
        return super().forward(x) if COUNTS[0] % 2 else super().forward(x) * 2


class Leaving(Block):
    """It leaves a tensor on its class, which the model reads at its end."""

    left: torch.Tensor

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        made = self.inner(self.norm(x))
        type(self).left = made * 2
        return x + made.relu()


class Appending(Block):
    """It appends to the list that it is given."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        made = super().forward(x)
        given.append(made.mean())
        return made


class Writing(Block):
    """It writes into a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Returning(Block):
    """It returns a view of what it is given."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return x.view_as(x) if self.training else super().forward(x)


class Skipped(Block):
    """It runs by chance."""

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        return x if random.random() < 0.1 else super().forward(x)


class Model(nn.Module):
    def __init__(self, kind: type[Block], depth: int = DEPTH) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(kind, range(depth)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x, given = self.first(x), []
        for block in self.blocks:
            x = block(x, given)
        loss = (x**2).mean() + sum(given)
        if isinstance(block, Leaving):
            loss = loss + block.left.mean()
        return {"loss": loss}


def every_node(graph: ModelGraph) -> list[tuple[Any, ...]]:
    segments = (graph.prologue, *graph.segments)
    return [
        (s.name, n.name, n.op, str(n.target), repr(n.args), repr(n.kwargs), repr(n.meta))
        for s in segments
        for n in s.graph.nodes
    ]


def assert_equal(source: Callable[[], GraphSource], columns: dict[str, TensorMeta]) -> None:
    copied = build_graph(source(), columns, training=True, copies_blocks=True)
    COUNTS[0] = 0
    whole = build_graph(source(), columns, training=True)
    assert every_node(copied) == every_node(whole)
    assert list(copied.parameters.items()) == list(whole.parameters.items())
    assert copied.values == whole.values


def check(make: Callable[[], nn.Module], **options: Any) -> None:
    COUNTS[0] = 0
    assert_equal(
        lambda: GraphSource(make(), **options), {"x": TensorMeta((2, WIDTH), torch.float32)}
    )


def test_equal_blocks_are_copied(copies: list[str]) -> None:
    check(lambda: Model(Block))
    assert len(copies) == DEPTH - 1
    assert copies[-1].endswith(f"blocks.{DEPTH - 1}")


def test_blocks_are_copied_under_autocast(copies: list[str]) -> None:
    check(lambda: Model(Block), autocast=torch.bfloat16)
    assert copies


@one_in(3)
@pytest.mark.parametrize(
    "kind", [ByIndex, ByDict, ByGlobal, Appending, Writing, Returning, Skipped]
)
def test_blocks_that_may_differ_run(kind: type[Block], copies: list[str]) -> None:
    check(lambda: Model(kind))
    assert not copies


def test_a_value_that_is_read_outside_ends_the_copies(copies: list[str]) -> None:
    check(lambda: Model(Leaving))
    assert copies  # in a trace that was given up


def test_a_block_with_a_hook_runs(copies: list[str]) -> None:
    def make() -> nn.Module:
        model = Model(Block)
        model.blocks[2].inner.register_forward_hook(lambda module, given, made: made * 3)
        return model

    check(make)
    assert [path.rpartition(".")[2] for path in copies] == ["1", "3"]


def change_number(block: Any) -> None:
    block.norm.eps = 1.0


def freeze(block: Any) -> None:
    block.inner.weight.requires_grad_(False)


def drop_bias(block: Any) -> None:
    block.inner.bias = None


def share_inside(block: Any) -> None:
    block.norm.weight = block.norm.bias


def exchange_function(block: Any) -> None:
    block.inner.forward = lambda x: x * 2


@one_in(3)
@pytest.mark.parametrize(
    "change", [change_number, freeze, drop_bias, share_inside, exchange_function]
)
def test_another_block_runs_and_its_like_are_copied(
    change: Callable[[Any], None], copies: list[str]
) -> None:
    def make() -> nn.Module:
        model = Model(Block)
        change(model.blocks[1])
        return model

    check(make)
    assert [path.rpartition(".")[2] for path in copies] == ["2", "3"]


def test_blocks_that_share_a_weight_are_copied_with_it(copies: list[str]) -> None:
    def make() -> nn.Module:
        model = Model(Block)
        for block in model.blocks:
            block.inner.weight = model.blocks[0].inner.weight
        return model

    check(make)
    assert len(copies) == DEPTH - 1


def test_reads_of_copied_blocks_are_noted() -> None:
    sources = [GraphSource(Model(Block)) for _ in range(2)]
    columns = {"x": TensorMeta((2, WIDTH), torch.float32)}
    found = [
        build_graph(source, columns, training=True, copies_blocks=copied)
        for source, copied in zip(sources, (True, False), strict=True)
    ]
    copied, whole = ({(r.root, r.path, r.steps) for r in graph.reads} for graph in found)
    assert copied == whole


@one_in(2)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_architectures_have_the_same_graphs(name: str, copies: list[str]) -> None:
    architecture = ARCHITECTURES[name]

    def source() -> GraphSource:
        model = architecture.build(num_hidden_layers=DEPTH)
        model.config.use_cache = False
        return GraphSource(model)

    batch = architecture.batch()
    assert_equal(source, {n: TensorMeta(tuple(v.shape), v.dtype) for n, v in batch.items()})
    assert copies
