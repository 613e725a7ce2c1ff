"""Gradients of tied parameters: those that several segments read, on one stage or on several.

Each rank sums what its own segments give. The sums of a microbatch then travel from the rank of the
last reader to the rank of the first, each adding its own: the order in which one process's autograd
adds them, so the result is the same to the last bit. The first reader's rank owns the parameter: it
reduces the gradient with its stage's others, over all replicas of the stage, and sends it back to
the other readers before the optimizer steps. Where a schedule lays several pipes over the ranks,
each has a chain of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from merak.core.gradients import add_gradient, dense, gradient_dtype, no_gradient
from merak.core.mesh import Mesh
from merak.engine.comm.p2p import Route, as_carried, pipeline_group, started
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.engine.tensors_by_name import LeafGradients, ParamLeaves
from merak.graph.program.program import SegmentProgram
from merak.plan.tied_parameters import Holder

Orders = Callable[[int], Sequence[int]]
"""Gives the order in which a stage's microbatches of one pipe go backward in the step that runs."""

Holders = Mapping[str, tuple[Holder, ...]]
"""The holders of each shared parameter in one pipe, last reader first; the last one owns it."""


class Leaf(Protocol):
    """A leaf of a stage's autograd graphs for a tied parameter, which gains its gradient."""

    grad: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """The tied parameters of this rank.

    Args:
        parameters: this rank's parameters by name, or its shards of them.
        leaves: its leaves of each shared one, one per stage that reads it.
        final: by name where the final gradients are: the parameters, or what a sharded optimizer
            steps of them.
        every_microbatch: exchange after every microbatch, as exact as one process; else once a
            step, with less traffic and another order of summing.
        progress: reports every wait.
        oom_guard: aborts the step where there is no memory for a sum.
        route: of the sums.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    leaves: Mapping[str, Sequence[Leaf]]
    final: Mapping[str, torch.nn.Parameter]
    every_microbatch: bool
    progress: Progress
    oom_guard: OomGuard
    route: Route


class TiedGradients:
    """Collects the gradients of tied parameters on one rank, and exchanges them.

    Args:
        mesh: the grid of ranks.
        pipes: per pipe the holders as `find_holders` gives them, the same on every rank.
        tied: this rank's part.
    """

    def __init__(self, mesh: Mesh, pipes: Sequence[Holders], tied: TiedParameters) -> None:
        self._final = tied.final
        self._oom_guard = tied.oom_guard
        self._chains = [Chain(mesh, holders, tied) for holders in pipes]
        names = list(pipes[0]) if pipes else []
        self._deliveries = {name: _deliveries([p[name] for p in pipes]) for name in names}
        self._rank = mesh.pp_rank

    def start_step(
        self,
        orders: Callable[[int, int], Sequence[int]],
        open_sends: Callable[[int, int, int], int],
    ) -> None:
        """Prepare for the microbatches of a step.

        Args:
            orders: the order in which a pipe's (first) stage's (second) microbatches go backward.
            open_sends: in a pipe (first), how many sums of a stage (second) to another (third) may
                be under way at a time.
        """
        for pipe, chain in enumerate(self._chains):
            chain.start_step(partial(orders, pipe), partial(open_sends, pipe))

    def begin(
        self, pipe: int, microbatch: int, segment: SegmentProgram, leaves: ParamLeaves
    ) -> LeafGradients:
        """The gradients that enter a segment's backward; see `Chain.begin`."""
        return self._chains[pipe].begin(segment, microbatch, leaves) if self._chains else ()

    def collect(self, segment: SegmentProgram, pipe: int, microbatch: int) -> None:
        """Collect the gradients that a segment's backward has left on its leaves."""
        if self._chains:
            self._chains[pipe].collect(segment, microbatch)

    def finish(self) -> None:
        """Send the owner's gradient to every holder, after the owner has reduced it."""
        arriving = []
        for name, deliveries in self._deliveries.items():
            parameter = self._final.get(name)
            if parameter is None or not parameter.requires_grad or not parameter.numel():
                continue
            for pipe, owner, taker in deliveries:
                if self._rank == owner:
                    gradient = self._oom_guard.allocate(partial(_gradient_of, parameter))
                    self._chains[pipe].send(name, gradient, taker)
                elif self._rank == taker:
                    chain = self._chains[pipe]
                    arriving.append((chain, name, owner, *chain.receive(name, owner, parameter)))
        for chain, name, owner, work, gradient in arriving:
            chain.wait(work, f"the gradient of tied {name} from", owner)
            self._final[name].grad = chain.arrived(gradient)
        for chain in self._chains:
            chain.finish()

    def forget(self) -> None:
        """Free the gradients of a step that failed."""
        for chain in self._chains:
            chain.forget()


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = no_gradient(parameter)
    return parameter.grad.contiguous()


def _deliveries(pipes: Sequence[Sequence[Holder]]) -> list[tuple[int, int, int]]:
    """The senders and receivers of a final gradient: (pipe, owner, taker), each taker once."""
    owners = {holders[-1].rank for holders in pipes}
    found: dict[int, tuple[int, int, int]] = {}
    for pipe, holders in enumerate(pipes):
        for holder in holders[:-1]:
            if holder.rank not in owners:
                found.setdefault(holder.rank, (pipe, holders[-1].rank, holder.rank))
    return list(found.values())


def _pairs(holders: Sequence[Holder]) -> set[tuple[int, int]]:
    """Senders and receivers of sums on their way to the owner, and of the owner's gradient."""
    ranks = [holder.rank for holder in holders]
    pairs = {*pairwise(ranks), *((ranks[-1], rank) for rank in ranks)}
    return {pair for pair in pairs if pair[0] != pair[1]}


class Chain:
    """The tied parameters of one pipe, whose sums travel from the last reader to the first.

    Args:
        mesh: the grid of ranks.
        holders: of the pipe.
        tied: this rank's part.
    """

    def __init__(self, mesh: Mesh, holders: Holders, tied: TiedParameters) -> None:
        self._mesh = mesh
        self._holders = holders
        self._leaves = tied.leaves
        self._parameters = tied.parameters
        self._every_microbatch = tied.every_microbatch
        self._progress = tied.progress
        self._oom_guard = tied.oom_guard
        self._route = tied.route
        self._own = {
            name: holder
            for name, found in holders.items()
            for holder in found
            if holder.rank == mesh.pp_rank
            and tied.parameters[name].requires_grad
            and tied.parameters[name].numel()  # a shard may have no rows
        }
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        # Where the sum of the holder before has been taken, before this rank's own is complete.
        self._taken: set[tuple[str, int]] = set()
        self._sent: dict[str, deque[tuple[int, dist.Work, torch.Tensor]]] = {}
        self._most_open: dict[str, int] = {}
        self._arriving: dict[str, deque[tuple[int, dist.Work, torch.Tensor]]] = {}
        self._expected: dict[str, deque[int]] = {}
        self._orders: Orders = lambda stage: ()
        # One for each parameter alone, so that it never waits behind other traffic.
        self._groups = {
            name: pipeline_group(mesh, _pairs(found))
            for name, found in holders.items()
            if len(found) > 1
        }

    def start_step(self, orders: Orders, open_sends: Callable[[int, int], int]) -> None:
        """Prepare for the microbatches of a step; arguments as of `TiedGradients.start_step`."""
        self._orders = orders
        self._most_open = {
            name: open_sends(holder.stage, after.stage)
            for name, holder in self._own.items()
            if (after := self._after(name)) is not None and orders(holder.stage)
        }
        self._expected = {
            name: deque(orders(before.stage) if self._every_microbatch else (0,))
            for name in self._own
            if (before := self._before(name)) is not None and orders(before.stage)
        }
        self._arriving = {name: deque() for name in self._expected}

    def begin(self, segment: SegmentProgram, microbatch: int, leaves: ParamLeaves) -> LeafGradients:
        """The sums of later readers, for the parameters that a segment reads several times.

        Where they enter its backward, it adds what each of its own readers gives one by one, as
        one process's autograd does; else it would add the sum of its own readers.
        """
        found = []
        for name in segment.repeated:
            if name not in self._own or not self._every_microbatch:
                continue
            # Shards have leaves of their own, and sums of a lower precision's are not its type.
            leaf = next((own for own in self._leaves[name] if own is leaves[name]), None)
            if leaf is None or gradient_dtype(leaf) != leaf.dtype:
                continue
            known = self._known(name, microbatch)
            if known is not None:
                self._sums.pop((name, microbatch), None)
                found.append((leaf, known))
        return found

    def collect(self, segment: SegmentProgram, microbatch: int) -> None:
        """Collect the gradients that a segment's backward has left on its leaves."""
        if self._own.keys().isdisjoint(segment.segment.parameters):
            return
        for name in segment.segment.parameters:
            holder = self._own.get(name)
            if holder is None:
                continue
            key = microbatch if self._every_microbatch else 0
            for leaf in self._leaves[name]:
                if leaf.grad is not None:
                    self._add(name, key, dense(leaf.grad))
                    leaf.grad = None
            is_last = microbatch == self._orders(holder.stage)[-1]
            if segment.segment.index == holder.first and (self._every_microbatch or is_last):
                self._pass_on(name, key)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for name in self._sent:
            self._close(name, 0)
        self._sent.clear()

    def wait(self, work: dist.Work, what: str, pp_rank: int) -> None:
        """Wait for a transfer; `what` it is ends in a preposition that "rank 3" can follow."""
        with self._progress.waiting(what, (self._mesh.rank_at(pp_rank),)):
            work.wait()

    def arrived(self, buffer: torch.Tensor) -> torch.Tensor:
        """The gradient that has arrived in a buffer."""
        return self._oom_guard.allocate(partial(self._route.arrived, buffer))

    def forget(self) -> None:
        """Free the gradients of a step that failed."""
        self._sums.clear()
        self._taken.clear()
        self._sent.clear()
        self._arriving.clear()
        self._expected.clear()

    def _add(self, name: str, key: int, gradient: torch.Tensor) -> None:
        self._sums[name, key] = self._sum(gradient, self._known(name, key))

    def _known(self, name: str, key: int) -> torch.Tensor | None:
        """The sum of earlier readers' gradients; None if there is none or it has been used."""
        known = self._sums.get((name, key))
        if known is None and self._comes_first(name) and (name, key) not in self._taken:
            self._taken.add((name, key))
            known = self._take(name, key)
        return known

    def _pass_on(self, name: str, key: int) -> None:
        parameter = self._parameters[name]
        total = self._sums.pop((name, key), None)
        if name in self._expected and (name, key) not in self._taken:
            received = self._take(name, key)
            total = self._sum(total, received)
        self._taken.discard((name, key))
        after = self._after(name)
        if after is not None:
            self.send(name, self._oom_guard.allocate(partial(_whole, total, parameter)), after.rank)
            # By then those before have been taken, or can be without anything more of this rank.
            self._close(name, self._most_open[name])
        elif total is not None:
            self._oom_guard.allocate(partial(add_gradient, parameter, total))

    def _sum(self, own: torch.Tensor | None, before: torch.Tensor | None) -> torch.Tensor:
        """A gradient and the sum before it, in one process's order."""
        if own is None or before is None:
            found = before if own is None else own
            assert found is not None
            return found
        return self._oom_guard.allocate(partial(torch.add, before, own))

    def _close(self, name: str, most_open: int) -> None:
        """Wait for the oldest sends of a parameter's gradients, until so many are open."""
        sends = self._sent[name]
        while len(sends) > most_open:
            to_rank, work, _ = sends.popleft()
            self.wait(work, f"the gradient of tied {name} to be taken by", to_rank)

    def _after(self, name: str) -> Holder | None:
        """The holder that this rank gives its sum to; None for the owner."""
        found = self._holders[name]
        place = found.index(self._own[name])
        return found[place + 1] if place + 1 < len(found) else None

    def _before(self, name: str) -> Holder | None:
        """The holder whose sum comes in before this rank adds its own."""
        found = self._holders[name]
        place = found.index(self._own[name])
        return found[place - 1] if place else None

    def _comes_first(self, name: str) -> bool:
        """Whether the sum of the holder before is complete before this rank's first gradient.

        That of a whole step is not: the holder before needs more of this rank's forwards for it.
        """
        before = self._before(name)
        if not self._every_microbatch or before is None or name not in self._expected:
            return False
        return before.first > self._own[name].last

    def _take(self, name: str, key: int) -> torch.Tensor:
        """The sum for one microbatch; sums arrive in the order they are sent, one posted ahead."""
        before = self._before(name)
        assert before is not None
        arriving, expected = self._arriving[name], self._expected[name]
        while expected and (len(arriving) < 2 or all(k != key for k, _, _ in arriving)):
            parameter = self._parameters[name]
            arriving.append((expected.popleft(), *self.receive(name, before.rank, parameter)))
        number = next(i for i, (k, _, _) in enumerate(arriving) if k == key)
        _, work, buffer = arriving[number]
        del arriving[number]
        self.wait(work, f"the gradient of tied {name} of microbatch {key} from", before.rank)
        return self.arrived(buffer)

    def send(self, name: str, gradient: torch.Tensor, to_rank: int) -> None:
        """Start to send a gradient to another pp rank."""
        gradient = self._oom_guard.allocate(partial(self._route.outgoing, gradient))
        work = started(
            dist.isend(as_carried(gradient), self._mesh.rank_at(to_rank), self._groups[name])
        )
        self._sent.setdefault(name, deque()).append((to_rank, work, gradient))

    def receive(
        self, name: str, from_rank: int, like: torch.Tensor
    ) -> tuple[dist.Work, torch.Tensor]:
        """Start to receive a gradient of some tensor from another pp rank."""
        make = partial(self._route.buffer, like.shape, gradient_dtype(like))
        buffer = self._oom_guard.allocate(make)
        work = started(
            dist.irecv(as_carried(buffer), self._mesh.rank_at(from_rank), self._groups[name])
        )
        return work, buffer


def _whole(total: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient to send; zeros if there is none."""
    return (no_gradient(parameter) if total is None else total).contiguous()
