"""The all-gather of ZeRO-1 and 2: rows that other replicas' optimizers have updated.

After a step, replicas all-gather the rows that their optimizers have updated, bucket by bucket in
the order of the forward. A parameter is waited for when it is first read, by the engine or through
the user's model, so that the gather overlaps with the next forward.

Source: arXiv:1910.02054 (ZeRO), section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from merak.engine.comm.gradient_buckets import Bucket, others_of
from merak.engine.comm.replica_levels import ReplicaCollectives, Waitable
from merak.engine.comm.row_shards import pack, unpack_all
from merak.engine.health.status import Progress


@dataclass(frozen=True, slots=True)
class _Gather:
    """An all-gather that has begun: this replica's rows of a bucket, and the rows of all."""

    work: Waitable
    own: torch.Tensor
    everything: torch.Tensor


class ParamAllGather:
    """All-gathers the rows of this replica's parameters that others have updated.

    Args:
        buckets: parameters by name that one all-gather carries, in the order of the forward, and
            the replicas that hold the same of them.
        most_open: gathers that may be open at a time; None for all of them.
        progress: reports every wait.
        collectives: of the replicas; None for those of torch.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[Mapping[str, nn.Parameter], dist.ProcessGroup]],
        most_open: int | None,
        progress: Progress,
        collectives: ReplicaCollectives | None = None,
    ) -> None:
        self._collectives = collectives or ReplicaCollectives()
        self._buckets: list[Bucket] = [tuple(bucket.values()) for bucket, _ in buckets]
        self._groups = [group for _, group in buckets]
        self._bucket_of = {n: number for number, (own, _) in enumerate(buckets) for n in own}
        self._most_open = most_open
        self._progress = progress
        self._open: dict[int, _Gather] = {}

    def start(self) -> None:
        """Begin the gathers, after the optimizer's step; all replicas call it together."""
        self.wait()  # gathers of the last step that are still open
        for number, bucket in enumerate(self._buckets):
            if self._most_open is not None and len(self._open) >= self._most_open:
                self._wait(next(iter(self._open)))
            self._open[number] = self._gather(bucket, self._groups[number])

    def wait_for(self, name: str) -> None:
        """Wait until a parameter is up to date; no other rank needs to call it."""
        number = self._bucket_of.get(name)
        if number in self._open:
            assert number is not None
            self._wait(number)

    def wait(self) -> None:
        """Wait until all parameters are up to date."""
        for number in list(self._open):
            self._wait(number)

    def _gather(self, bucket: Bucket, group: dist.ProcessGroup) -> _Gather:
        degree, index = dist.get_world_size(group), dist.get_rank(group)
        own = pack(bucket, degree, index)
        everything = own.new_empty(degree * own.numel())
        work = self._collectives.all_gather(everything, own, group=group, async_op=True)
        assert work is not None
        return _Gather(work, own, everything)

    @torch.no_grad()
    def _wait(self, number: int) -> None:
        gather, bucket, group = self._open.pop(number), self._buckets[number], self._groups[number]
        with self._progress.waiting("updated parameters from", others_of(group)):
            gather.work.wait()
        degree, index = dist.get_world_size(group), dist.get_rank(group)
        # This replica's own rows may have been written since, by another optimizer's step.
        gather.everything.chunk(degree)[index].copy_(pack(bucket, degree, index))
        unpack_all(gather.everything, bucket, degree)


class AwaitedParams(Mapping[str, torch.Tensor]):
    """Parameters by name, each of which is up to date when it is read.

    Args:
        leaves: by name.
        param_all_gather: is waited for.
    """

    def __init__(
        self, leaves: Mapping[str, torch.Tensor], param_all_gather: ParamAllGather
    ) -> None:
        self._leaves = leaves
        self._param_all_gather = param_all_gather

    def __getitem__(self, name: str) -> torch.Tensor:
        self._param_all_gather.wait_for(name)
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


class _AwaitedDict(dict[str, Any]):
    """The `_parameters` of a module, which are up to date when they are read.

    Args:
        parameters: of the module itself, by their attributes.
        param_all_gather: is waited for.
    """

    def __init__(self, parameters: Mapping[str, Any], param_all_gather: ParamAllGather) -> None:
        super().__init__(parameters)
        self._param_all_gather = param_all_gather

    def __getitem__(self, key: str) -> Any:
        self._param_all_gather.wait()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._param_all_gather.wait()
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._param_all_gather.wait()
        return super().__iter__()

    def items(self) -> Any:
        self._param_all_gather.wait()
        return super().items()

    def values(self) -> Any:
        self._param_all_gather.wait()
        return super().values()

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)  # a copy of the model waits for nothing


def wait_on_access(model: nn.Module, param_all_gather: ParamAllGather) -> None:
    """Make reads of a model's parameters wait for the all-gather of the last step.

    Args:
        model: the user's.
        param_all_gather: is waited for, in the place of an earlier engine's.
    """
    for module in model.modules():
        if module._parameters:
            parameters = dict(dict.items(module._parameters))
            module.__dict__["_parameters"] = _AwaitedDict(parameters, param_all_gather)
