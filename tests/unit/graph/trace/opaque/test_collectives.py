"""Collectives in a model's own code: refused with the line, in every way that torch offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.trace import trace
from tests.tiers import one_in
from tests.unit.graph.odd_models import WIDTH, Layers
from tests.unit.graph.stages import Pipeline, built

COLUMNS = {"x": TensorMeta((4, WIDTH), torch.float32)}


@pytest.fixture(params=[2])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A job's ranks, of which this process is the first and the others do not exist."""
    num_ranks: int = request.param
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    yield num_ranks
    dist.destroy_process_group()


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def later(x: Tensor) -> Tensor:
    x = x.clone()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def waits(x: Tensor) -> Tensor:
    dist.barrier()
    return x


def gathered(x: Tensor) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return parts[0] + parts[1]


def into_one(x: Tensor) -> Tensor:
    whole = x.new_zeros(2 * len(x), WIDTH)
    dist.all_gather_into_tensor(whole, x)
    return x + whole.sum()


def objects(x: Tensor) -> Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"a": 1})
    return x


def sent(x: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        dist.send(x.contiguous(), 1)
    return x


def known_value(x: Tensor) -> Tensor:
    count = torch.full((), 4.0)
    dist.all_reduce(count)
    return x * count


def caught(x: Tensor) -> Tensor:
    try:
        return summed(x)
    except Exception:
        return x


def by_value(x: Tensor) -> Tensor:
    return summed(x) if x.sum() > -1e9 else x


def hooked(x: Tensor) -> Tensor:
    x = x.clone()
    if x.requires_grad:
        x.register_hook(summed)
    return x


def of_shards(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", [0, 1])
    return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor().sum() + x


def world() -> Any:
    group: Any = dist.group.WORLD
    return group


COMMUNICATING: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": summed,
    "in the background": later,
    "barrier": waits,
    "all_gather": gathered,
    "into one tensor": into_one,
    "objects": objects,
    "a send of one rank": sent,
    "a value that the trace knows": known_value,
    "a refusal that is caught": caught,
    "behind a condition on values": by_value,
    "a hook on a gradient": hooked,
    "functional": lambda x: functional.all_reduce(x, "sum", world()),
    "with gradients": lambda x: with_gradients.all_reduce(x),
    "a method of a group": lambda x: (x, world().allreduce([x.clone()]).wait())[0],
    "a backward of one's own": lambda x: SumOfGradients.apply(x),
    "no gradient": lambda x: x - summed(x.detach().mean()),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(summed, x, use_reentrant=False),
}


class Calling(nn.Module):
    """A layer, and a function of what it returns."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.tanh(self.layer(x)))


class Around(Layers):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inner(self.a(x))).pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@one_in(4)
@pytest.mark.parametrize("kind", COMMUNICATING)
def test_a_collective_is_refused_with_its_line(ranks: int, kind: str) -> None:
    with pytest.raises(TraceError) as refused:
        trace(Around(Calling(COMMUNICATING[kind])), COLUMNS)
    assert type(refused.value) is TraceError
    said = str(refused.value)
    assert f"{__file__}:" in said.partition(" ")[0], said
    assert "communicates with other ranks" in said and "Leave it out" in said


def test_one_that_no_probe_comes_to_is_refused_when_it_runs(ranks: int) -> None:
    inner = Calling(lambda x: summed(x) if x.sum() > 0.99 * x.numel() else x)
    model, batch = Around(inner), {"x": torch.randn(4, WIDTH)}
    pipeline = Pipeline(built(model, batch), model)
    pipeline.train(batch)
    nn.init.constant_(inner.layer.bias, 100.0)
    with pytest.raises(TraceError, match="communicates with other ranks"):
        pipeline.train(batch)


def test_so_is_one_in_a_loss_function(ranks: int) -> None:
    with pytest.raises(TraceError, match=r"communicates with other ranks \(all_reduce\)"):
        trace(Calling(torch.relu), COLUMNS, loss_fn=lambda out, batch: summed(out.mean()))


def test_so_are_collectives_of_dtensors(ranks: int) -> None:
    with pytest.raises(TraceError, match=r"full_tensor.*communicates with other ranks"):
        trace(Around(Calling(of_shards)), COLUMNS)


def test_so_is_a_new_group_for_which_all_ranks_would_meet(ranks: int) -> None:
    with pytest.raises(TraceError, match="makes a process group while the model runs"):
        trace(Around(Calling(lambda x: (dist.new_group([0]), x)[1])), COLUMNS)


def test_a_group_of_ones_own_is_refused_where_it_is_used(ranks: int) -> None:
    inner = Calling(lambda x: x)
    inner.group = dist.new_group([0, 1])  # type: ignore[assignment]
    trace(Around(inner), COLUMNS)  # only held
    inner.function = lambda x: (dist.all_reduce(x.clone(), group=inner.group), x)[1]  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="communicates with other ranks"):
        trace(Around(inner), COLUMNS)


def test_modules_that_communicate_are_named(ranks: int) -> None:
    norm = "inner is a SyncBatchNorm, .*use BatchNorm, which normalizes each microbatch"
    with pytest.raises(TraceError, match=norm):
        trace(Around(nn.SyncBatchNorm(WIDTH)), COLUMNS)
    trace(Around(nn.SyncBatchNorm(WIDTH)).eval(), COLUMNS)
    wrapped = nn.parallel.DistributedDataParallel(Around(nn.Identity()))
    with pytest.raises(TraceError, match=r"the model is a DistributedDataParallel, .*inside it"):
        trace(wrapped, COLUMNS)


def test_a_rank_may_ask_which_it_is(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    def speaks(x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            print("rank 0 of", dist.get_world_size())
        return x

    trace(Around(Calling(speaks)), COLUMNS)
    assert "rank 0 of 2" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_without_other_ranks_nothing_is_refused(ranks: int) -> None:
    trace(Around(Calling(summed)), COLUMNS)
    trace(Around(nn.SyncBatchNorm(WIDTH)).eval(), COLUMNS)
