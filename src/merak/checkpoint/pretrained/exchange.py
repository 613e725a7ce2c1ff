"""The exchange of shards: every rank that writes a file receives what it does not hold itself.

All ranks walk the same list of steps, each with the tensors that one rank needs at a time, and
send and receive point to point. A rank has no more than `WINDOW_BYTES` of transfers under way,
and waits for its oldest first; of all transfers that are not done, the first of the list has both
its ranks waiting for it, so none waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from merak.core.mesh import Mesh
from merak.core.shards import join
from merak.core.tensor_meta import TensorMeta
from merak.graph.weights.holders import TensorHolders, shard_shape
from merak.graph.weights.rank_agreement import is_distributed, transfer_device

WINDOW_BYTES = 2**26
WINDOW_STEPS = 256
"""The most bytes of transfers, and steps, that a rank begins before it finishes the oldest."""

Wait = Callable[[str, tuple[int, ...]], AbstractContextManager[None]]
"""Entered around a wait: what for, ending in a preposition, and the ranks that are waited for."""


def no_status(what: str, peers: tuple[int, ...]) -> AbstractContextManager[None]:
    """Set no status: of waits in a thread, which the status of the rank is not about."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the model, and the ranks that hold it.

    Args:
        holders: its shape and type, and the first ranks that hold its shards.
        replicated: whether all replicas hold the same; else only the holders' values count.
    """

    holders: TensorHolders
    replicated: bool

    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return TensorMeta(self.holders.shape, self.holders.dtype).num_bytes

    def shard_meta(self, index: int) -> TensorMeta:
        """Shape and type of shard number `index`."""
        shape = shard_shape(self.holders.shape, self.holders.shard, index)
        return TensorMeta(shape, self.holders.dtype)

    def senders(self, writer: int, mesh: Mesh) -> tuple[int, ...]:
        """The ranks that the shards come from, in their order, nearest to a rank.

        Args:
            writer: the rank that needs the tensor; itself where it holds a shard.
            mesh: the grid of ranks.
        """
        if not self.replicated:
            return self.holders.ranks
        size = mesh.replicas * mesh.tp  # ranks of one stage; those of all shards lie together
        degree = 1 if self.holders.shard is None else self.holders.shard.degree
        nearest = writer % size // degree * degree
        return tuple(
            first // size * size + nearest + first % degree for first in self.holders.ranks
        )


@dataclass(frozen=True, slots=True)
class Step:
    """Tensors that one rank needs together to write a part of a file.

    Args:
        writer: the rank.
        file: name of the file.
        keys: of the tensors that it writes.
        sources: names of the model's tensors that they are made of.
        num_bytes: of the sources.
    """

    writer: int
    file: str
    keys: tuple[str, ...]
    sources: tuple[str, ...]
    num_bytes: int


@dataclass(slots=True)
class _Pending:
    """A step whose transfers have begun.

    Args:
        step: the step.
        parts: where this rank writes, the shards of every source.
        works: the transfers under way, the name of what each carries, and its other rank.
    """

    step: Step
    parts: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    works: list[tuple[Any, str, int]] = field(default_factory=list)


class Exchange:
    """The transfers of this rank.

    Args:
        held: the model's tensors by name; the same on all ranks.
        tensors: this rank's tensors or shards by name.
        mesh: the grid of ranks.
        group: of gloo, of all ranks; None for the default group.
        wait: entered around waits.
    """

    def __init__(
        self,
        held: Mapping[str, Held],
        tensors: Mapping[str, torch.Tensor],
        mesh: Mesh,
        group: dist.ProcessGroup | None,
        wait: Wait,
    ) -> None:
        self._held = held
        self._tensors = tensors
        self._mesh = mesh
        self._group = group
        self._wait = wait
        remote = group is None and is_distributed()
        self._travel = transfer_device(mesh.device) if remote else torch.device("cpu")

    def missing(self, steps: Sequence[Step]) -> str | None:
        """The first tensor that this rank should send or write and has not; None for none."""
        for step in steps:
            for name in step.sources:
                senders = self._held[name].senders(step.writer, self._mesh)
                if self._mesh.rank not in senders:
                    continue
                index = senders.index(self._mesh.rank)
                own, meta = self._tensors.get(name), self._held[name].shard_meta(index)
                if own is None or TensorMeta(tuple(own.shape), own.dtype) != meta or own.is_meta:
                    return f"rank {self._mesh.rank} does not hold {name}, of shape {meta.shape}"
        return None

    def walk(self, steps: Sequence[Step]) -> Iterator[tuple[Step, dict[str, torch.Tensor]]]:
        """Take part in all steps.

        Args:
            steps: the same on every rank.

        Yields:
            The steps that this rank writes, each with its whole sources by name, on the CPU.
        """
        pending: deque[_Pending] = deque()
        under_way = 0
        for step in steps:
            begun = self._begin(step)
            if begun.step.writer != self._mesh.rank and not begun.works:
                continue
            pending.append(begun)
            under_way += step.num_bytes
            while pending and (under_way > WINDOW_BYTES or len(pending) > WINDOW_STEPS):
                under_way -= pending[0].step.num_bytes
                yield from self._finish(pending.popleft())
        while pending:
            yield from self._finish(pending.popleft())

    def _begin(self, step: Step) -> _Pending:
        """Begin to send and receive what this rank must for a step."""
        begun = _Pending(step)
        rank = self._mesh.rank
        for name in step.sources:
            held = self._held[name]
            for index, sender in enumerate(held.senders(step.writer, self._mesh)):
                if rank == step.writer:
                    own = self._tensors[name] if rank == sender else self._room(held, index)
                    part = own.detach()
                    begun.parts.setdefault(name, []).append(part)
                    if rank != sender and part.numel():
                        work = dist.irecv(part, src=sender, group=self._group)
                        begun.works.append((work, f"{name} from", sender))
                elif rank == sender and self._tensors[name].numel():
                    part = self._tensors[name].detach().to(self._travel).contiguous()
                    begun.parts.setdefault(name, []).append(part)  # alive until it is sent
                    work = dist.isend(part, dst=step.writer, group=self._group)
                    begun.works.append((work, f"{name} to be taken by", step.writer))
        return begun

    def _room(self, held: Held, index: int) -> torch.Tensor:
        meta = held.shard_meta(index)
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._travel)

    def _finish(self, begun: _Pending) -> Iterator[tuple[Step, dict[str, torch.Tensor]]]:
        for work, what, peer in begun.works:
            with self._wait(what, (peer,)):
                work.wait()
        if begun.step.writer != self._mesh.rank:
            return
        state = {}
        for name, parts in begun.parts.items():
            on_host = [part.cpu() for part in parts]
            shard = self._held[name].holders.shard
            state[name] = on_host[0] if shard is None else join(on_host, shard)
        begun.parts.clear()
        yield begun.step, state
