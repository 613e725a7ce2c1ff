"""Gradient reduction in buckets, over the data parallel replicas and the copies of a stage.

A stage's gradients are reduced in buckets, each as soon as the last microbatch's backward has
passed the segments in it, while the earlier segments still compute. Which buckets there are, and in
which order a rank starts them, is the same on all ranks that share them, whatever microbatches each
of them has had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from merak.core.gradients import add_gradient, dense, no_gradient
from merak.engine.comm.compression.stages import BucketGradients, GradientCompression
from merak.engine.comm.replica_levels import ReplicaCollectives, Waitable
from merak.engine.comm.row_shards import pack_all, unpack
from merak.engine.health.oom import OomGuard
from merak.engine.health.status import Progress
from merak.plan.memory.communication_limits import MAX_OPEN_BUCKETS

Bucket = tuple[torch.nn.Parameter, ...]
"""Parameters whose gradients are reduced together."""


@dataclass(frozen=True, slots=True)
class StageGradients:
    """The buckets of one stage's gradients, and the group that reduces them.

    Args:
        group: all ranks that hold the same part of the stage; None for a single one.
        buckets: parameters that are reduced together, in the order in which they become final.
        optional: ids of parameters that chance may leave out of a step; they then get no gradient,
            as in one process, rather than zeros, which an optimizer would step.
    """

    group: dist.ProcessGroup | None
    buckets: tuple[Bucket, ...]
    optional: frozenset[int] = frozenset()


def fill_buckets(parameters: Iterable[torch.nn.Parameter], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Group parameters into buckets of one dtype each, in their order.

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


@dataclass(frozen=True, slots=True)
class _Reduction:
    """The reduction of a bucket that has begun.

    Args:
        stage: of its parameters.
        work: tells when it is done.
        sent: this rank's gradients, which must stay until then.
        flat: the reduced gradients, or this replica's shard of them.
        bucket: the parameters.
        holders: on how many ranks each of them has a gradient, and what tells when that is known;
            None where they always have one.
    """

    stage: int
    work: Waitable
    sent: torch.Tensor
    flat: torch.Tensor
    bucket: Bucket
    holders: tuple[torch.Tensor, dist.Work] | None = None

    def is_completed(self) -> bool:
        """Whether it is known to be done, without waiting."""
        return isinstance(self.work, dist.Work) and self.work.is_completed()

    def absent(self) -> frozenset[int]:
        """Ids of the parameters that have no gradient anywhere; waits until that is known."""
        if self.holders is None:
            return frozenset()
        counts, work = self.holders
        work.wait()
        pairs = zip(self.bucket, counts.tolist(), strict=True)
        return frozenset(id(parameter) for parameter, count in pairs if not count)


class GradientReducer:
    """Reduces gradients in buckets, asynchronously until `wait`.

    A bucket takes the place of the gradients in it, so that they are never held twice.

    Args:
        stages: this rank's stages.
        progress: reports every wait.
        optimizer_tensors: by id of a parameter, what this replica's optimizer steps of it, and so
            the only rows that it receives; None for all-reduced gradients on every replica.
        oom_guard: aborts the step where there is no memory for a bucket.
        compression: of the reductions; None for none.
        collectives: of the replicas; None for those of torch.
        sharing: the replicas that receive rows between them; None for all of a stage's.
    """

    def __init__(  # one argument for each thing that the build puts in
        self,
        stages: Mapping[int, StageGradients],
        progress: Progress,
        optimizer_tensors: Mapping[int, torch.nn.Parameter] | None = None,
        oom_guard: OomGuard | None = None,
        compression: GradientCompression | None = None,
        collectives: ReplicaCollectives | None = None,
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        self._sharing = sharing
        self._collectives = collectives or ReplicaCollectives()
        self._oom_guard = oom_guard or OomGuard()
        self.compression = compression
        # Whether gradients are reduced after every microbatch, so that there is never more than its
        # shard between them. All replicas then have equally many, and start buckets in the same
        # order.
        self.every_microbatch = False
        # Is called with parameters whose reduced gradients have arrived before `wait`, if anything.
        self.arrived: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
        self._optimizer_tensors = optimizer_tensors
        self._stages = stages
        self._progress = progress
        self._queue: deque[int] = deque()
        # Of every stage: buckets still to start, and what is final.
        self._left: dict[int, deque[Bucket]] = {}
        self._final: dict[int, set[int]] = {}
        self._open: deque[_Reduction] = deque()

    def reduces(self, stage: int) -> bool:
        """Whether other ranks have gradients of a stage to sum with."""
        return self._stages[stage].group is not None

    def start_step(self, order: Iterable[int]) -> None:
        """Set the order of a step's reductions.

        Args:
            order: the stages in the order of their reductions, the same on all ranks that share
                several of them.
        """
        self._queue = deque(order)
        for stage in self._stages:
            self._refill(stage)

    def ready(self, stage: int, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Reduce the buckets that are complete, as some of a stage's gradients are final here."""
        final, left = self._final[stage], self._left[stage]
        final.update(id(parameter) for parameter in parameters)
        if not self.every_microbatch and (not self._queue or self._queue[0] != stage):
            return  # another stage comes first on all ranks
        while left and all(id(p) in final for p in left[0]):
            self._start(stage, left.popleft())

    def complete(self, stage: int) -> None:
        """Reduce all of a stage's gradients; a parameter without a gradient gives zeros."""
        first = self._queue.popleft()
        assert first == stage, f"stage {stage} is reduced in the place of stage {first}"
        self._start_rest(stage)
        self._refill(stage)  # an asynchronous schedule reduces it several times in a step

    def microbatch_done(self, stage: int) -> None:
        """Reduce the gradients of a microbatch that is not the last, with `every_microbatch`."""
        if self.every_microbatch:
            self._start_rest(stage)
            self._refill(stage)

    def wait(self) -> None:
        """Wait for the reductions, and replace the gradients by them."""
        while self._open:
            self._oom_guard.allocate(partial(self._take, self._open.popleft()))

    def _take(self, found: _Reduction) -> None:
        stage = found.stage
        peers = others_of(self._stages[stage].group)
        with self._progress.waiting(f"the sum of the gradients of stage {stage} with", peers):
            found.work.wait()
        sharded, absent = self._optimizer_tensors, found.absent()
        group = self._sharing or self._stages[stage].group
        # An all-reduce gives all rows, as those of a single replica.
        degree = 1 if sharded is None else dist.get_world_size(group)
        index = 0 if sharded is None else dist.get_rank(group)
        pieces = unpack(found.flat, found.bucket, degree, index)
        for parameter, piece in zip(found.bucket, pieces, strict=True):
            if id(parameter) in absent:
                continue
            if sharded is None:
                parameter.grad = piece.view_as(parameter)
            elif piece.numel():
                add_gradient(sharded[id(parameter)], piece.view_as(sharded[id(parameter)]))

    def forget(self) -> None:
        """Free the reductions of a step that failed."""
        self._open.clear()
        self._queue.clear()
        self._left.clear()
        self._final.clear()

    def _refill(self, stage: int) -> None:
        reduced = self._stages[stage]
        self._left[stage] = deque(reduced.buckets if reduced.group is not None else ())
        self._final[stage] = set()

    def _start_rest(self, stage: int) -> None:
        left = self._left[stage]
        while left:
            self._start(stage, left.popleft())

    def _start(self, stage: int, bucket: Bucket) -> None:
        self._oom_guard.allocate(partial(self._begin, stage, bucket))

    def _begin(self, stage: int, bucket: Bucket) -> None:
        while self.every_microbatch and len(self._open) >= MAX_OPEN_BUCKETS:
            self._take(self._open.popleft())
        while self.arrived is not None and self._open and self._open[0].is_completed():
            found = self._open.popleft()
            self._take(found)
            self.arrived(found.bucket)
        # A replica without a microbatch, or a parameter that took no part, gives zeros.
        holders = self._count(stage, bucket)
        gradients = [dense(p.grad) if p.grad is not None else no_gradient(p) for p in bucket]
        for parameter in bucket:
            parameter.grad = None
        group = self._stages[stage].group
        if self._optimizer_tensors is None:
            rows = [gradient.reshape(-1) for gradient in gradients]
            rest = self._collectives.rest(sum(row.numel() for row in rows), group)
            rows += [rows[0].new_zeros(rest)] if rest else []
            flat = torch.cat(rows) if len(rows) > 1 else rows[0]
            everything = flat
            work = self._all_reduce(stage, bucket, flat)
        else:
            group = self._sharing or group
            everything = pack_all(gradients, dist.get_world_size(group))
            flat = everything.new_empty(everything.numel() // dist.get_world_size(group))
            work = self._collectives.reduce_scatter(flat, everything, group=group, async_op=True)
        assert work is not None
        self._open.append(_Reduction(stage, work, everything, flat, bucket, holders))

    def _all_reduce(self, stage: int, bucket: Bucket, flat: torch.Tensor) -> Waitable:
        """Start to sum a bucket's gradients over all replicas, compressed if that is wanted."""
        reduced = self._stages[stage]
        if self.compression is not None:
            left = len(self._left[stage])
            number = len(reduced.buckets) - left - 1
            return self.compression.start(stage, BucketGradients(flat, bucket, number, not left))
        return self._collectives.all_reduce(flat, reduced.group)

    def _count(self, stage: int, bucket: Bucket) -> tuple[torch.Tensor, dist.Work] | None:
        """Start to count the ranks on which each parameter has a gradient."""
        reduced = self._stages[stage]
        if not any(id(p) in reduced.optional for p in bucket):
            return None
        own = [p.grad is not None or id(p) not in reduced.optional for p in bucket]
        counts = torch.tensor(own, dtype=torch.int32, device="cpu")  # read by the host
        work = dist.all_reduce(counts, group=reduced.group, async_op=True)
        assert work is not None
        return counts, work


def others_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of a group without this one."""
    ranks = dist.get_process_group_ranks(group)
    return tuple(rank for rank in ranks if rank != dist.get_rank())
