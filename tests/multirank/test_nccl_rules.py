"""The process group that keeps NCCL's rules finds what breaks them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests import nccl_rules
from tests.multirank.ranks import RankError, RankPool
from tests.tiers import slow

pytestmark = pytest.mark.nccl_rules


def unconnected() -> None:
    """Both ranks send first, and receive afterwards."""
    nccl_rules.FIRST_USE = timedelta(seconds=2)
    other = 1 - dist.get_rank()
    sent = dist.isend(torch.ones(2), other)
    dist.recv(torch.empty(2), other)
    sent.wait()


def crossing() -> None:
    """As `unconnected`, on ranks that are connected: one communicator runs one at a time."""
    meet()
    other = 1 - dist.get_rank()
    sent, received = dist.isend(torch.ones(2), other), dist.irecv(torch.empty(2), other)
    if not received._operation.done.wait(2):  # type: ignore[attr-defined]
        raise nccl_rules.RuleError("two sends wait for their receives, which wait behind them")
    sent.wait()


def meet() -> None:
    """Connect both ranks in both directions."""
    other, number = 1 - dist.get_rank(), torch.zeros(1)
    both = [
        dist.P2POp(dist.isend, number, other),
        dist.P2POp(dist.irecv, number.clone(), other),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def early() -> None:
    """Read what was not waited for."""
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    if not tensor.isnan().all():
        raise AssertionError("a result is there before it was waited for")
    work.wait()
    if tensor.tolist() != [2.0, 2.0]:
        raise AssertionError(tensor)
    raise nccl_rules.RuleError("read too early")


def changed() -> None:
    """Write to what is sent."""
    meet()
    tensor, other = torch.ones(2), 1 - dist.get_rank()
    if other:
        work = dist.isend(tensor, other)
        tensor.add_(1)
        work.wait()
    dist.recv(torch.empty(2), other)


def short_integers() -> None:
    """Send what NCCL has no type for."""
    dist.all_reduce(torch.ones(2, dtype=torch.int16))


def strided() -> None:
    """Reduce every second number of a tensor."""
    dist.all_reduce(torch.ones(4)[::2])


def overlapping() -> None:
    """Gather into places that lie over one another."""
    places = torch.ones(3)
    dist.all_gather([places[:2], places[1:]], torch.ones(2))


def different() -> None:
    """Reduce sums on one rank, and the largest number on the other."""
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    dist.all_reduce(torch.ones(2), op=kinds[dist.get_rank()])


def dropped() -> None:
    """Lose a work that nobody has waited for."""
    dist.all_reduce(torch.ones(2), async_op=True)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (unconnected, "waits for ever in its first"),
        slow(crossing, "two sends wait for their receives"),
        slow(early, "read too early"),
        (changed, "was changed before it was sent"),
        slow(short_integers, "torch.int16"),
        slow(strided, r"\(2,\)"),
        slow(overlapping, "lie over one another"),
        (different, "ranks 0 and 1 of 0 call"),
        slow(dropped, "dropped before they were waited for"),
    ],
)
def test_what_nccl_would_not_forgive(
    pool: RankPool, broken: Callable[[], None], sentence: str
) -> None:
    with pytest.raises(RankError, match=sentence):
        pool.run(broken, 2)


def exchanged() -> list[list[float]]:
    """What operations give that keep the rules."""
    own, other = dist.get_rank(), 1 - dist.get_rank()
    meet()
    tensor = torch.full((2,), float(own + 1))
    gathered, part, received = torch.empty(4), torch.empty(2), torch.empty(2)
    dist.all_gather_into_tensor(gathered, tensor)
    dist.reduce_scatter_tensor(part, gathered)
    if own:
        dist.recv(received, other)
    dist.send(tensor, other)
    if not own:
        dist.recv(received, other)
    return [gathered.tolist(), part.tolist(), received.tolist()]


def test_what_keeps_the_rules(pool: RankPool) -> None:
    first, second = pool.run(exchanged, 2)
    assert first == [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    assert second == [[1.0, 1.0, 2.0, 2.0], [4.0, 4.0], [1.0, 1.0]]
