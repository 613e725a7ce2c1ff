"""Gradients across ranks: summed over data parallel replicas and over the replicas of a stage.

A stage's gradients are reduced in buckets, each as soon as the last microbatch's backward has
passed the segments in it, while the earlier segments still compute. Which buckets there are, and in
which order a rank starts them, is the same on all ranks that share them, whatever microbatches each
of them has had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from merak.engine.progress import Progress
from merak.engine.shares import pack


@dataclass(frozen=True, slots=True)
class StageGradients:
    """What is reduced of one stage, and over whom.

    Args:
        group: all ranks that hold the same part of the stage; None for a single one.
        buckets: parameters that are summed together, in the order in which they become final.
    """

    group: dist.ProcessGroup | None
    buckets: tuple[tuple[torch.nn.Parameter, ...], ...]


def fill_buckets(
    parameters: Iterable[torch.nn.Parameter], bucket_bytes: int
) -> tuple[tuple[torch.nn.Parameter, ...], ...]:
    """Part parameters into buckets of one dtype each, in their order.

    Args:
        parameters: those without a gradient to come are left out.
        bucket_bytes: a bucket is full as soon as it holds this much.
    """
    buckets: list[list[torch.nn.Parameter]] = []
    size = bucket_bytes
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if size >= bucket_bytes or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return tuple(tuple(bucket) for bucket in buckets)


class GradientReducer:
    """Sums gradients in buckets, without waiting until told to.

    Args:
        stages: this rank's stages.
        progress: told of every wait.
        stepped: by id of a parameter, what this replica's optimizer steps of it, and so the only
            rows whose sums it gets; None for whole sums on every replica.
    """

    def __init__(
        self,
        stages: Mapping[int, StageGradients],
        progress: Progress,
        stepped: Mapping[int, torch.nn.Parameter] | None = None,
    ) -> None:
        self.every_microbatch = False  # whether sums of every microbatch are taken at once
        self._stepped = stepped
        self._stages = stages
        self._progress = progress
        self._queue: deque[int] = deque()
        # Of the stage whose turn it is: buckets still to start, and what is final of every stage.
        self._left: deque[tuple[torch.nn.Parameter, ...]] = deque()
        self._final: dict[int, set[int]] = {}
        self._open: deque[tuple[int, dist.Work, torch.Tensor, Sequence[torch.nn.Parameter]]]
        self._open = deque()

    def start_step(self, order: Iterable[int]) -> None:
        """A step begins.

        Args:
            order: the stages in the order of their reductions, the same on all ranks that share
                several of them.
        """
        self._queue = deque(order)
        self._final = {stage: set() for stage in self._stages}
        self._open_next()

    def ready(self, stage: int, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Some of a stage's gradients are final on this rank."""
        if self._stages[stage].group is None:
            return
        final = self._final[stage]
        final.update(id(parameter) for parameter in parameters)
        if not self._queue or self._queue[0] != stage:
            return  # another stage comes first on all ranks
        while self._left and all(id(p) in final for p in self._left[0]):
            self._start(stage, self._left.popleft())

    def complete(self, stage: int) -> None:
        """All of a stage's gradients are final; a parameter without one gives zeros."""
        turn = self._queue.popleft()
        assert turn == stage, f"stage {stage} is reduced when it is the turn of {turn}"
        for bucket in self._left:
            self._start(stage, bucket)
        self._final[stage].clear()
        self._open_next()

    def wait(self) -> None:
        """Put the sums in the place of the gradients."""
        while self._open:
            self._take(*self._open.popleft())

    def reduce_now(self, stage: int) -> None:
        """Sum what a stage has had of its gradients so far, of a microbatch that is not its last.

        Called in one order on all replicas, which keep their shares of the sums alone.
        """
        self.wait()
        if self._stages[stage].group is not None:
            for bucket in self._stages[stage].buckets:
                self._start(stage, bucket)

    def _take(
        self, stage: int, work: dist.Work, flat: torch.Tensor, bucket: Sequence[torch.nn.Parameter]
    ) -> None:
        peers = others_of(self._stages[stage].group)
        with self._progress.waiting(f"the sum of the gradients of stage {stage} with", peers):
            work.wait()
        if self._stepped is not None:
            self._take_shares(flat, bucket)
            return
        pieces = flat.split([p.numel() for p in bucket])
        for parameter, piece in zip(bucket, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._open.clear()
        self._queue.clear()
        self._left.clear()
        self._final.clear()

    def _open_next(self) -> None:
        self._left.clear()
        if self._queue and self._stages[self._queue[0]].group is not None:
            self._left.extend(self._stages[self._queue[0]].buckets)

    def _start(self, stage: int, bucket: Sequence[torch.nn.Parameter]) -> None:
        # A replica without a microbatch, or a parameter that took no part, gives zeros.
        gradients = [p.grad if p.grad is not None else no_gradient(p) for p in bucket]
        group = self._stages[stage].group
        if self._stepped is None:
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            work = dist.all_reduce(flat, group=group, async_op=True)
        else:
            degree = dist.get_world_size(group)
            parts = [pack(gradients, degree, index) for index in range(degree)]
            flat = torch.empty_like(parts[0])
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            work = scatter(flat, torch.cat(parts), group=group, async_op=True)
            for parameter in bucket:
                parameter.grad = None  # its share is all that is kept
        assert work is not None
        self._open.append((stage, work, flat, bucket))

    def _take_shares(self, flat: torch.Tensor, bucket: Sequence[torch.nn.Parameter]) -> None:
        assert self._stepped is not None
        start = 0
        for parameter in bucket:
            stepped = self._stepped[id(parameter)]
            piece = flat[start : start + stepped.numel()].view_as(stepped)
            start += stepped.numel()
            if stepped.numel():
                add_gradient(stepped, piece)


def others_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of a group without this one."""
    ranks = dist.get_process_group_ranks(group)
    return tuple(rank for rank in ranks if rank != dist.get_rank())


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        parameter.grad += gradient


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What a parameter's gradient is summed in."""
    return parameter.grad_dtype or parameter.dtype


def no_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of a gradient that is not there."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Whether gradients of its own type would lose what many microbatches add."""
    return parameter.dtype in (torch.bfloat16, torch.float16)


def sum_in_float32(leaves: Iterable[torch.Tensor]) -> None:
    """Let gradients of low precision be summed over microbatches and ranks in float32."""
    for leaf in leaves:
        if leaf.requires_grad and is_low_precision(leaf) and leaf.grad is None:
            leaf.grad_dtype = torch.float32
