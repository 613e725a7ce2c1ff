"""Collectives of a model as operators over the replicas: what each becomes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from accelerate import Accelerator
from accelerate.utils import gather, reduce
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from merak.arguments.single_process import fresh_state
from merak.core import mesh as meshes
from merak.core.errors import TraceError
from merak.core.mesh import Mesh
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.replicas import REPLICA_ROWS, REPLICA_SUM
from merak.graph.trace.calls.call import calls_model
from merak.graph.trace.calls.eager_loss import eager_loss
from merak.graph.trace.opaque.operator import is_opaque
from merak.graph.trace.trace import trace
from merak.graph.trace.traced import Trace
from tests.tiers import one_in
from tests.unit.graph.trace.opaque.test_collectives import SumOfGradients

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

WIDTH = 4
COLUMNS = {"x": TensorMeta((3, WIDTH), torch.float32)}
INPUT = {"input": TensorMeta((3, WIDTH), torch.float32)}
Use = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    """A job of dp=2 and pp=2, of which this is the second replica's last stage."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    connected: Any = object()
    laid = Mesh(2, 1, 2, 3, torch.device("cpu"), connected)
    meshes.set_mesh(laid)
    yield laid
    meshes.reset()
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.use(self.linear(x)).square().mean()}


def traced(use: Use, training: bool = True) -> Trace:
    return trace(Net(use).train(training), COLUMNS)


def targets(found: Trace) -> list[Any]:
    return [n.target for n in found.graph.nodes if n.target in (REPLICA_ROWS, REPLICA_SUM)]


def group(*ranks: int) -> Any:
    return dist.new_group(list(ranks))


def known_count(x: Tensor) -> Tensor:
    count = torch.full((), 3.0)
    dist.all_reduce(count)
    return x / count


def in_a_list(number: int) -> Use:
    def gathered(x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x) for _ in range(number)]
        dist.all_gather(parts, x)
        return torch.cat(parts) + x.sum()

    return gathered


def in_place(x: Tensor) -> Tensor:
    x = x * 2
    dist.all_reduce(x)
    return x


def of_objects(x: Tensor) -> Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"a": 1})
    return x


def sent(x: Tensor) -> Tensor:
    received = torch.zeros_like(x)
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, received, 0)]
    )
    for request in requests:
        request.wait()
    return x + received


def by_largest(x: Tensor) -> Tensor:
    return with_gradients.all_reduce(x, dist.ReduceOp.MAX)


def test_what_is_written_is_read_from_the_operator() -> None:
    assert targets(traced(lambda x: x / with_gradients.all_reduce(x))) == [REPLICA_SUM]
    found = traced(in_a_list(2))
    assert targets(found) == [REPLICA_ROWS]
    assert not [n for n in found.graph.nodes if "copy_" in str(n.target) or "zeros" in str(n)]


def test_functions_of_accelerate_meet_replicas() -> None:
    fresh_state()
    assert targets(traced(lambda x: x / reduce(x.detach()))) == [REPLICA_SUM]
    assert targets(traced(lambda x: x - gather(x.detach()).mean(0))) == [REPLICA_ROWS]
    assert targets(traced(lambda x: x / Accelerator(cpu=True).reduce(x.detach()))) == []
    assert targets(traced(lambda x: x / reduce(x.detach()), training=False)) == []


def test_known_numbers_are_counted_on_every_replica() -> None:
    assert targets(traced(known_count)) == [REPLICA_SUM]


def test_an_evaluations_batch_is_one_replicas() -> None:
    assert targets(traced(known_count, training=False)) == []
    with pytest.raises(TraceError, match=r"gathers a list of 2 ranks .*; 1 replicas have"):
        traced(in_a_list(2), training=False)


def test_the_replicas_own_group_may_be_named(mesh: Mesh) -> None:
    own = group(2, 3)  # the replicas of the last stage
    found = traced(lambda x: x / with_gradients.all_reduce(x.detach(), group=own))
    assert targets(found) == [REPLICA_SUM]


def test_errors_of_the_models_own_are_told() -> None:
    with pytest.raises(TraceError, match=r"x \+ torch\.cat.*RuntimeError"):
        traced(lambda x: x + torch.cat(with_gradients.all_gather(x)))


def test_the_rank_may_say_which_rows_are_its_own() -> None:
    def own(x: Tensor) -> Tensor:
        rows = torch.cat(with_gradients.all_gather(x))
        return x @ rows.T - torch.arange(6) - len(x) * dist.get_rank()

    found = traced(own)
    assert 3 in [a for n in found.graph.nodes for a in n.args] and found.is_of_replica


REFUSED: dict[str, tuple[Use, str]] = {
    "other length": (
        in_a_list(4),
        r"gathers a list of 4 ranks .*; 2 replicas have .*mesh\.dp",
    ),
    "with gradient": (in_place, r"writes into a tensor that has a gradient \(all_reduce\)"),
    "objects": (of_objects, r"communicates with other ranks \(all_gather_object\)"),
    "neighbours": (sent, "communicates with other ranks .*all_gather"),
    "largest": (by_largest, "takes the gradient of an all_reduce by max"),
    "a backward": (lambda x: SumOfGradients.apply(x), "communicates with other ranks"),
    "barrier": (lambda x: (dist.barrier(), x)[1], "communicates with other ranks"),
}


@one_in(3)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_followed_is_refused_with_its_line(kind: str) -> None:
    use, said = REFUSED[kind]
    with pytest.raises(TraceError, match=said) as refused:
        traced(use)
    assert str(refused.value).startswith(__file__) or kind == "a backward"


def eager(use: Use) -> Any:
    """A loss that runs as Python and calls the model itself."""

    def compute(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Any]:
        loss = use(model(**batch)).square().sum()
        return (loss * 2 if loss.item() > 1 else loss), {}

    return eager_loss(calls_model(compute))


def test_a_loss_that_runs_as_python_is_known_to_meet_them() -> None:
    uses: tuple[tuple[Use, bool], ...] = (
        (lambda x: torch.cat(with_gradients.all_gather(x)), True),
        (lambda x: x / dist.get_world_size(), False),
    )
    for use, meets in uses:
        graph = trace(nn.Linear(WIDTH, WIDTH), INPUT, loss_fn=eager(use)).graph
        assert [node.meta["opaque"].meets_replicas for node in graph.nodes if is_opaque(node)] == [
            meets
        ]


def test_what_such_a_loss_cannot_do_among_them_is_refused() -> None:
    uses: tuple[tuple[Use, str], ...] = (
        (lambda x: with_gradients.all_reduce(x) * dist.get_rank(), "asks for the rank of the proc"),
        (REFUSED["barrier"][0], r"communicates with other ranks \(barrier\)"),
    )
    for use, said in uses:
        with pytest.raises(TraceError, match=said):
            trace(nn.Linear(WIDTH, WIDTH), INPUT, loss_fn=eager(use))


def test_so_is_a_group_of_other_ranks() -> None:
    pipeline = group(1, 3)
    with pytest.raises(TraceError, match=r"uses a process group of ranks 1, 3 .*here ranks 2, 3"):
        traced(lambda x: x / with_gradients.all_reduce(x.detach(), group=pipeline))


class Counting(nn.Module):
    """Divides by a number of ranks that its script has read."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.linear, self.world_size = nn.Linear(WIDTH, WIDTH), world_size

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = x.new_full((), len(x))
        if self.world_size > 1:
            dist.all_reduce(total)
        return {"loss": self.linear(x).square().sum() / (total / self.world_size)}


def test_a_number_of_ranks_from_outside_is_that_of_replicas_where_it_counts() -> None:
    assert targets(trace(Counting(2), COLUMNS)) == [REPLICA_SUM]
    with pytest.raises(TraceError, match=r"Counting\.world_size=4, .*meet 2 replicas"):
        trace(Counting(4), COLUMNS)


def test_in_an_evaluation_it_is_one_and_ranks_are_zero() -> None:
    model = Counting(2).eval()
    found = trace(model, COLUMNS)
    assert targets(found) == [] and model.world_size == 2
    assert not [n for n in found.graph.nodes if 2 in n.args and "div" in str(n.target)]
    inner = Placed(1)

    def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = inner(outputs["loss"] * batch["x"])
        return found

    assert targets(trace(Net(torch.tanh), COLUMNS, loss_fn=loss)) == [REPLICA_ROWS]
    found = trace(Net(torch.tanh).eval(), COLUMNS, loss_fn=loss)
    assert [n for n in found.graph.nodes if 0 in n.args and "mul" in str(n.target)]
    assert inner.rank == 1


class Placed(nn.Module):
    """Reads its own rows of all by a rank that its script has given it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat(with_gradients.all_gather(x))
        return (x - rows.sum(0) * self.rank).square().mean()
