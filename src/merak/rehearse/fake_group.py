"""Process groups without peers: this rank answers its own collectives, and every call is recorded.

A collective leaves what this rank has put in, on every place where peers would have written; a
receive brings small random numbers of its tensor's shape. Each takes no time beyond the copies, so
that what is measured around them is this rank's own computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from merak.core.rank0 import REHEARSAL
from merak.schedule.ir import Action

RECEIVED_SCALE = 0.02
"""Received numbers lie within ± this: finite after every layer, and no zeros, which some devices
compute faster than others."""


@dataclass(frozen=True, slots=True)
class Call:
    """A collective or transfer that this rank has called.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send",
            "receive" or "barrier".
        num_bytes: of the whole tensor: the reduced, gathered or sent one; of an all-to-all the one
            whose shards all ranks hold together.
        ranks: global ranks of the group; of a transfer this rank and its peer.
        action: that called it; None outside of the actions of a schedule.
    """

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    action: Action | None


@dataclass(slots=True)
class Traffic:
    """Record of the calls of this rank, in order.

    Args:
        running: gives the action that runs.
    """

    running: Callable[[], Action | None] = lambda: None
    calls: list[Call] = field(default_factory=list)

    def add(self, kind: str, tensors: Iterable[torch.Tensor], ranks: tuple[int, ...]) -> None:
        """Record a collective's kind, bytes and group."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.calls.append(Call(kind, num_bytes, ranks, self.running()))

    def counts(self) -> Counter[str]:
        """Number of calls of each kind."""
        return Counter(call.kind for call in self.calls)


_ProcessGroup: Any = dist.ProcessGroup  # whose signatures differ from version to version


class FakeGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group that one rank has to itself, however many it is made for.

    Args:
        rank: of this process in the group.
        ranks: global ranks of the group, in its order.
        name: of the group.
        traffic: records the calls.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], name: str, traffic: Traffic) -> None:
        super().__init__(rank, len(ranks))
        self._name = name
        self._own = rank
        self._ranks = ranks
        self._traffic = traffic
        self._draws: dict[torch.device, torch.Generator] = {}

    def getBackendName(self) -> str:
        """Name of the backend; torch asks for it under this name."""
        return REHEARSAL

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return self._name

    def allreduce(self, tensors: list[torch.Tensor], *_: Any, **__: Any) -> dist.Work:
        """Leave the tensors as they are."""
        return self._called("all_reduce", tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], *_: Any, **__: Any) -> dist.Work:
        """Leave the tensors as they are."""
        return self._called("all_reduce", tensors)

    def reduce(self, tensors: list[torch.Tensor], *_: Any, **__: Any) -> dist.Work:
        """Leave the tensors as they are."""
        return self._called("all_reduce", tensors)

    def broadcast(self, tensors: list[torch.Tensor], *_: Any, **__: Any) -> dist.Work:
        """Leave the tensors as they are."""
        return self._called("broadcast", tensors)

    @torch.no_grad()
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any, **__: Any
    ) -> dist.Work:
        """Copy this rank's tensor into every rank's place."""
        for places, own in zip(outputs, inputs, strict=True):
            for place in places:
                place.detach().copy_(own)
        return self._called("all_gather", [place for places in outputs for place in places])

    @torch.no_grad()
    def all_gather_single(
        self, output: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any
    ) -> dist.Work:
        """Copy this rank's tensor into every rank's part of the output."""
        self._gather(output, own)
        return self._called("all_gather", [output])

    @torch.no_grad()
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *_: Any, **__: Any
    ) -> dist.Work:
        """Copy this rank's tensors into every rank's parts of the outputs."""
        for output, own in zip(outputs, inputs, strict=True):
            self._gather(output, own)
        return self._called("all_gather", outputs)

    @torch.no_grad()
    def reduce_scatter_single(
        self, output: torch.Tensor, everything: torch.Tensor, *_: Any, **__: Any
    ) -> dist.Work:
        """Copy this rank's part of its own input."""
        parts = everything.detach().reshape(self.size(), -1)
        output.detach().view(-1).copy_(parts[self._own])
        return self._called("reduce_scatter", [everything])

    @torch.no_grad()
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], *_: Any, **__: Any
    ) -> dist.Work:
        """Copy this rank's part of its own inputs."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(parts[self._own])
        return self._called("reduce_scatter", [part for parts in inputs for part in parts])

    @torch.no_grad()
    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, *_: Any, **__: Any
    ) -> dist.Work:
        """Fill the output with this rank's own rows, again and again; without any, as `recv`."""
        if not own.shape[0]:
            self._fill(output.detach())
            return self._called("all_to_all", [own] * self.size())
        rows = torch.arange(output.shape[0], device=own.device) % own.shape[0]
        output.detach().copy_(own.detach()[rows])
        return self._called("all_to_all", [own] * self.size())

    def send(self, tensors: list[torch.Tensor], peer: int, *_: Any) -> dist.Work:
        """Record a send; nothing is sent."""
        return self._called("send", tensors, peer)

    @torch.no_grad()
    def recv(self, tensors: list[torch.Tensor], peer: int, *_: Any) -> dist.Work:
        """Fill the tensors with small random numbers; whole ones with zeros."""
        for tensor in tensors:
            self._fill(tensor.detach())
        return self._called("receive", tensors, peer)

    def barrier(self, *_: Any, **__: Any) -> dist.Work:
        """Wait for nobody."""
        return self._called("barrier", ())

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        parts, row = output.detach().view(self.size(), -1), own.detach().reshape(-1)
        if parts[self._own].data_ptr() != row.data_ptr():  # it may lie in its place already
            parts[self._own].copy_(row)
        parts[: self._own].copy_(row)
        parts[self._own + 1 :].copy_(row)

    def _fill(self, tensor: torch.Tensor) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point():
            tensor.zero_()
            return
        draws = self._draws.get(tensor.device)
        if draws is None:  # of its own: the draws of the job are its own as well
            draws = self._draws[tensor.device] = torch.Generator(tensor.device)
        tensor.uniform_(-RECEIVED_SCALE, RECEIVED_SCALE, generator=draws)

    def _called(
        self, kind: str, tensors: Iterable[torch.Tensor], peer: int | None = None
    ) -> dist.Work:
        tensors = list(tensors)
        ranks = self._ranks if peer is None else (self._ranks[self._own], self._ranks[peer])
        self._traffic.add(kind, tensors, ranks)
        done: Future[Any] = Future()
        done.set_result(tensors)
        work: dist.Work = _create_work_from_future(done)
        return work


def register_backend(traffic: Traffic) -> None:
    """Make torch's process groups of the backend `REHEARSAL` fake ones.

    Args:
        traffic: records the calls of all groups that are made from now on.
    """

    def made(options: Any, _: Any) -> FakeGroup:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        return FakeGroup(options.group_rank, ranks, options.group_id, traffic)

    name = REHEARSAL.upper()
    if name in dist.Backend._plugins:
        plugin = dist.Backend._plugins[name]
        dist.Backend._plugins[name] = plugin._replace(creator_fn=made)
        return
    dist.Backend.register_backend(REHEARSAL, made, extended_api=True, devices=["cpu", "cuda"])
