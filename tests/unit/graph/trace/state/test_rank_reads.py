"""A forward that reads its process's rank: refused where it computes with it, else traced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.state.rank_reads import RankReads
from merak.graph.trace.trace import trace
from tests.tiers import one_in

COLUMNS = {"x": TensorMeta((4, 4), torch.float32)}
Use = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of four ranks, of which this process is rank 2 and the others do not exist."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "2")
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.use(self.linear(x)).square().mean()}


def process() -> PartialState:
    state = object.__new__(PartialState)
    vars(state).update(process_index=2, distributed_type=DistributedType.MULTI_CPU)
    return state


PROCESS = process()


def scaled(x: Tensor) -> Tensor:
    return x * (1 + dist.get_rank())


def on_rank_0_alone(x: Tensor) -> Tensor:
    return 2 * x if get_rank() == 0 else x


def of_a_group(x: Tensor) -> Tensor:
    assert dist.group.WORLD is not None
    return x + dist.group.WORLD.rank()


def of_the_environment(x: Tensor) -> Tensor:
    return x * int(os.environ["RANK"])


def of_the_environment_or_none(x: Tensor) -> Tensor:
    return x if os.getenv("LOCAL_RANK", "0") == "0" else -x


def of_accelerate(x: Tensor) -> Tensor:
    return 2 * x if PROCESS.is_main_process else x


COMPUTE = [
    scaled,
    on_rank_0_alone,
    of_a_group,
    of_the_environment,
    of_the_environment_or_none,
    of_accelerate,
]


@one_in(3)
@pytest.mark.parametrize("use", COMPUTE, ids=lambda use: use.__name__)
def test_what_computes_with_the_rank_is_refused_with_its_line(use: Use) -> None:
    with pytest.raises(TraceError, match="reads the rank of the process, and rank 0 would") as told:
        build_graph(GraphSource(Net(use)), COLUMNS, training=True)
    line = use.__code__.co_firstlineno + (2 if use is of_a_group else 1)
    assert str(told.value).startswith(f"{__file__}:{line}: `return ")


def prints(x: Tensor) -> Tensor:
    if dist.get_rank() == 0 and os.environ["RANK"] != "1" and PROCESS.is_main_process:
        print("hello")
    return x


def lists_variables(x: Tensor) -> Tensor:
    return x * len([1 for name, _ in os.environ.items() if name == "RANK"])


@pytest.mark.parametrize("use", [prints, lists_variables], ids=lambda use: use.__name__)
def test_what_only_prints_on_a_rank_is_traced(use: Use) -> None:
    graph = build_graph(GraphSource(Net(use)), COLUMNS, training=True)
    assert graph.loss is not None
    assert (dist.get_rank(), os.environ["RANK"], PROCESS.process_index) == (2, "2", 2)


def test_what_other_ranks_compute_may_be_unknown() -> None:
    def fails_elsewhere(x: Tensor) -> Tensor:
        return x if dist.get_rank() == 2 else x[9, 9]

    assert trace(Net(fails_elsewhere), COLUMNS).is_warned_of
    assert not trace(Net(prints), COLUMNS).is_warned_of


def test_merak_itself_finds_the_true_rank() -> None:
    reads = RankReads(7)
    with reads.recorded():
        assert (get_rank(), os.environ["RANK"]) == (7, "7")
        found = GraphSource(Net(prints)).device
    assert found.type == "cpu" and get_rank() == 2 and len(reads.lines) == 1
