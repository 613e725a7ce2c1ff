"""Point-to-point transfers of activations and gradients between pp ranks, posted ahead."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh, carried_device, group_of_lines
from merak.core.tensor_meta import TensorMeta
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.plan.memory.non_tensor import TRANSFER_CHANNELS
from merak.schedule.steps import MAX_OPEN_SENDS, Channel, Link, Receive, Send, channel_of


class Route:
    """Route of tensors between pp ranks: from device to device, or through the host's memory.

    A GPU loads a kernel when it first runs, and until then waits for all that it has begun. A
    receive that it has begun waits for another rank, which may be loading a kernel, too: two such
    ranks wait for ever. So tensors go through the host, which occupies no device, in every step
    that has a program for the first time. Such a step may also compile, or tune, for minutes. With
    gloo, tensors of a GPU always do.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._through_host = True
        self._num_programs: dict[bool, int] = {}

    @contextmanager
    def step(self, training: bool, num_programs: int) -> Iterator[None]:
        """Enter a step or an evaluation, whose transfers all take one route on all ranks.

        Args:
            training: whether it has backwards.
            num_programs: how many programs this rank has made so far.
        """
        is_first = self._num_programs.get(training) != num_programs
        self._through_host = is_first or carried_device().type != self._device.type
        yield
        self._num_programs[training] = num_programs

    def outgoing(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to send for another one, contiguous."""
        # A tensor that is only marked as conjugated or negated would arrive as it is in memory.
        own = tensor.resolve_conj().resolve_neg()
        return (own.cpu() if self._through_host else own).contiguous()

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An empty tensor to receive into."""
        device = torch.device("cpu") if self._through_host else self._device
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def arrived(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor of this rank's device that has arrived in a buffer."""
        return buffer.to(self._device)


CARRIED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""Element types that NCCL sends as they are. Source: its ncclDataType_t."""


def as_carried(buffer: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous buffer as numbers that every backend sends.

    NCCL refuses complex numbers and short integers; these go as their bytes.
    """
    return buffer if buffer.dtype in CARRIED else buffer.view(-1).view(torch.uint8)


class Transfers:
    """The point-to-point traffic of one rank of one pipeline.

    Each channel is a process group of its own, whose transfers complete in the order in which both
    sides post them, and never wait for those of another.

    Args:
        mesh: the grid of ranks.
        progress: reports every wait.
        oom_guard: aborts the step where there is no memory for a buffer.
        route: of the tensors.
    """

    def __init__(self, mesh: Mesh, progress: Progress, oom_guard: OomGuard, route: Route) -> None:
        self.mesh = mesh
        self.route = route
        self._progress = progress
        self._oom_guard = oom_guard
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sends: deque[tuple[Send, list[dist.Work], list[torch.Tensor]]] = deque()
        self._arriving: dict[Receive, tuple[list[dist.Work], list[torch.Tensor]]] = {}

    def connect(self, links: Iterable[Link]) -> None:
        """Connect the ranks of some links; all ranks of the job call it together."""
        by_channel: dict[Channel, set[tuple[int, int]]] = defaultdict(set)
        for link in links:
            by_channel[channel_of(link)].add((link.sender, link.receiver))
        for channel in sorted(by_channel, key=lambda c: (c.payload.value, c.is_upward, c.is_odd)):
            if channel not in self._groups and self.mesh.pp > 1:
                self._groups[channel] = pipeline_group(self.mesh, by_channel[channel])

    def send(self, step: Send, tensors: Sequence[torch.Tensor]) -> None:
        """Start to send some tensors, in order."""
        group = self._groups[channel_of(Link(step.payload, self.mesh.pp_rank, step.peer))]
        peer = self.mesh.rank_at(step.peer)
        buffers = self._oom_guard.allocate(lambda: [self.route.outgoing(t) for t in tensors])
        works = [started(dist.isend(as_carried(b), peer, group)) for b in buffers]
        self._sends.append((step, works, buffers))
        if len(self._sends) > MAX_OPEN_SENDS:
            self._wait_for_oldest_send()

    def post(self, step: Receive, metas: Sequence[TensorMeta]) -> None:
        """Start to receive some tensors, in order, into new ones."""
        group = self._groups[channel_of(Link(step.payload, step.peer, self.mesh.pp_rank))]
        peer = self.mesh.rank_at(step.peer)
        buffers = self._oom_guard.allocate(
            lambda: [self.route.buffer(m.shape, m.dtype) for m in metas]
        )
        works = [started(dist.irecv(as_carried(b), peer, group)) for b in buffers]
        self._arriving[step] = (works, buffers)

    def is_posted(self, step: Receive) -> bool:
        """Whether a receive has been posted and not yet taken."""
        return step in self._arriving

    def take(self, step: Receive) -> list[torch.Tensor]:
        """The tensors of a receive posted before; waits for them."""
        works, buffers = self._arriving.pop(step)
        with self._progress.waiting(f"{_description(step)} from", (self.mesh.rank_at(step.peer),)):
            _wait(works)
        return [self.route.arrived(buffer) for buffer in buffers]

    def finish(self) -> None:
        """Wait until all sends are complete."""
        while self._sends:
            self._wait_for_oldest_send()

    def _wait_for_oldest_send(self) -> None:
        step, works, _ = self._sends.popleft()
        peer = self.mesh.rank_at(step.peer)
        with self._progress.waiting(f"{_description(step)} to be taken by", (peer,)):
            _wait(works)

    def forget(self) -> None:
        """Free the transfers of a step that failed."""
        self._sends.clear()
        self._arriving.clear()


def pipeline_group(mesh: Mesh, pairs: Collection[tuple[int, int]]) -> dist.ProcessGroup:
    """A new group of this rank's pipeline, connected; all ranks of the job call it together.

    NCCL connects a pair of ranks at its first transfer, which blocks the hosts of both until both
    have come to it: in the order of a schedule that could be for ever. So each pair sends a number
    here, all at once.

    Args:
        mesh: the grid of ranks.
        pairs: pp ranks of senders and receivers.
    """
    stride = mesh.replicas * mesh.tp
    lines = [[p * stride + i for p in range(mesh.pp)] for i in range(stride)]
    group = group_of_lines(lines, "a group of ranks with", TRANSFER_CHANNELS)
    assert group is not None, "every rank is in a pipeline"
    number = torch.zeros(1, device=carried_device())
    meetings = [
        dist.P2POp(dist.isend, number, mesh.rank_at(receiver), group)
        if sender == mesh.pp_rank
        else dist.P2POp(dist.irecv, torch.empty_like(number), mesh.rank_at(sender), group)
        for sender, receiver in sorted(pairs)
        if mesh.pp_rank in (sender, receiver)
    ]
    if meetings:
        with waiting_for_all("the first transfers between pipeline ranks with"):
            _wait(dist.batch_isend_irecv(meetings))
    return group


def _description(step: Send | Receive) -> str:
    """The description of a transfer, for the watchdog."""
    return f"the {step.payload.value} of microbatch {step.microbatch} of stage {step.stage}"


def started(work: dist.Work | None) -> dist.Work:
    """The work of a transfer."""
    assert work is not None, "a rank outside a group took part in its transfer"
    return work


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()
