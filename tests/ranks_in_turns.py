"""Ranks of one process that take turns: each runs up to its next collective, then the next one.

All that a rank runs is real but for the transfer itself, so that collectives, their adjoints and
joint graphs are tried without processes. Reductions add one rank after another, rounded each time
to the tensors' type, as rings of gloo and NCCL do. One rank runs at a time, with a mesh and a
random state of its own; nothing depends on how threads are scheduled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from merak.core import mesh as meshes
from merak.core.mesh import Mesh

T = TypeVar("T")

Combine = Callable[[list[Any]], Sequence[Any]]


class _Stopped(Exception):
    """Another rank has failed."""


class RanksInTurns:
    """Ranks along one axis in this process.

    Args:
        degree: the number of ranks.
        axis: tp or cp.
    """

    def __init__(self, degree: int, axis: str = "tp") -> None:
        self.degree = degree
        self._axis = axis
        self._changed = threading.Condition()
        self._turn = 0
        self._given: list[tuple[str, Any]] = []
        self._results: Sequence[Any] = ()
        self._error: BaseException | None = None

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Run a function of a rank on all ranks, which begin with this process's random state.

        Args:
            function: of the rank.

        Returns:
            What it returns, per rank.

        Raises:
            AssertionError: ranks run different collectives, or draw differently often.
        """
        self._turn, self._given, self._error = 0, [], None
        begin, found, states = torch.get_rng_state(), [None] * self.degree, [None] * self.degree

        def run_rank(rank: int) -> None:
            try:
                self._wait_for(rank, begin)
                found[rank] = function(rank)
                assert not self._given, f"rank {rank} ends where others run {self._given}"
                states[rank] = torch.get_rng_state()
                self._pass_on(rank)
            except _Stopped:
                pass
            except BaseException as error:
                self._fail(error)

        threads = [threading.Thread(target=run_rank, args=(n,)) for n in range(self.degree)]
        with self._stand_ins():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        assert all(torch.equal(states[0], state) for state in states), "ranks draw unevenly"
        return found

    def _wait_for(self, rank: int, state: torch.Tensor) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
        if self._error is not None:
            raise _Stopped
        torch.set_rng_state(state)
        place = Mesh(1, 1, 1, rank, torch.device("cpu"), _DeviceMesh(self, rank))
        meshes.set_mesh(replace(place, **{self._axis: self.degree}))

    def _pass_on(self, rank: int) -> None:
        with self._changed:
            self._turn = (rank + 1) % self.degree
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def exchange(self, rank: int, what: str, given: Any, combine: Combine) -> Any:
        """Wait until all ranks have given something; the rank's own result of them together."""
        assert all(what == other for other, _ in self._given), (what, self._given)
        self._given.append((what, given))
        if rank == self.degree - 1:
            self._results = combine([own for _, own in self._given])
            self._given = []
        state = torch.get_rng_state()
        self._pass_on(rank)
        self._wait_for(rank, state)
        return self._results[rank]

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(meshes, "_current", []))
            for name, function in _COLLECTIVES.items():
                stack.enter_context(mock.patch.object(dist, name, function, create=True))
            yield


class _DeviceMesh:
    """Gives the one group of all ranks."""

    def __init__(self, ranks: RanksInTurns, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def get_group(self, axis: str) -> _DeviceMesh:
        return self

    def exchange(self, what: str, given: Any, combine: Combine) -> Any:
        return self.ranks.exchange(self.rank, what, given, combine)


class _Done:
    """What was asynchronous is over already."""

    def wait(self) -> None:
        pass


def _all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    *,
    group: _DeviceMesh,
    async_op: bool = False,
) -> _Done | None:
    def combine(given: list[torch.Tensor]) -> list[torch.Tensor]:
        total = reduce(torch.maximum if op == dist.ReduceOp.MAX else torch.add, given)
        return [total] * len(given)

    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX) and tensor.is_contiguous()
    with torch.no_grad():
        given = tensor.detach().clone()
        tensor.copy_(group.exchange(f"all_reduce {op} {tuple(tensor.shape)}", given, combine))
    return _Done() if async_op else None


def _all_gather(output: torch.Tensor, own: torch.Tensor, *, group: _DeviceMesh) -> None:
    def combine(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(given)] * len(given)

    with torch.no_grad():
        gathered = group.exchange(f"all_gather {tuple(own.shape)}", own.detach(), combine)
        output.copy_(gathered.view(output.shape))


def _reduce_scatter(output: torch.Tensor, own: torch.Tensor, *, group: _DeviceMesh) -> None:
    def combine(given: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return reduce(torch.add, given).chunk(len(given))

    with torch.no_grad():
        scattered = group.exchange(f"reduce_scatter {tuple(own.shape)}", own.detach(), combine)
        output.copy_(scattered.view(output.shape))


def _all_to_all(
    output: torch.Tensor,
    own: torch.Tensor,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
    *,
    group: _DeviceMesh,
    async_op: bool = False,
) -> _Done | None:
    def combine(given: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        return [torch.cat(pieces) for pieces in zip(*given, strict=True)]

    with torch.no_grad():
        pieces = own.detach().chunk(group.ranks.degree) if sent is None else own.split(list(sent))
        arrived = group.exchange("all_to_all", pieces, combine)
        assert received is None or sum(received) == len(arrived)
        output.copy_(arrived)
    return _Done() if async_op else None


_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather_single": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_single": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
"""torch's collectives, by name, and what stands for them."""
