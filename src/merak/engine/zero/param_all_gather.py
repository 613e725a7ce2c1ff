"""Parameters that other replicas have stepped: on their way while the next forward begins.

After a step, replicas give each other the rows they have stepped, bucket by bucket in the order in
which a forward reads them. Nobody waits for them then: a parameter is waited for when it is first
read, by the engine or by whoever looks into the model.

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
from merak.engine.comm.row_shards import pack, unpack
from merak.engine.health.status import Progress


@dataclass(frozen=True, slots=True)
class _Gather:
    """A bucket on its way: what this replica sends of it, and what comes from all."""

    work: dist.Work
    own: torch.Tensor
    everything: torch.Tensor


class ParamAllGather:
    """Gives a replica the rows of its parameters that others have stepped.

    Args:
        buckets: parameters by name that travel together, in the order in which they are read.
        group: the replicas.
        most_open: so many buckets may be under way at a time; None for all of them.
        progress: told of every wait.
    """

    def __init__(
        self,
        buckets: Sequence[Mapping[str, nn.Parameter]],
        group: dist.ProcessGroup,
        most_open: int | None,
        progress: Progress,
    ) -> None:
        self._buckets: list[Bucket] = [tuple(bucket.values()) for bucket in buckets]
        self._bucket_of = {n: number for number, bucket in enumerate(buckets) for n in bucket}
        self._group = group
        self._most_open = most_open
        self._progress = progress
        self._open: dict[int, _Gather] = {}

    @property
    def num_open(self) -> int:
        """Buckets under way."""
        return len(self._open)

    def start(self) -> None:
        """This replica has stepped its rows; called alike on all replicas."""
        self.wait()  # what nobody has read since the last time
        for number, bucket in enumerate(self._buckets):
            if self._most_open is not None and len(self._open) >= self._most_open:
                self._wait(next(iter(self._open)))
            self._open[number] = self._gather(bucket)

    def wait_for(self, name: str) -> None:
        """Wait until a parameter is whole; nothing that other ranks need to take part in."""
        number = self._bucket_of.get(name)
        if number in self._open:
            assert number is not None
            self._wait(number)

    def wait(self) -> None:
        """Wait until all parameters are whole."""
        for number in list(self._open):
            self._wait(number)

    def _gather(self, bucket: Bucket) -> _Gather:
        degree, index = dist.get_world_size(self._group), dist.get_rank(self._group)
        own = pack(bucket, degree, index)
        everything = own.new_empty(degree * own.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(everything, own, group=self._group, async_op=True)
        assert work is not None
        return _Gather(work, own, everything)

    @torch.no_grad()
    def _wait(self, number: int) -> None:
        gather, bucket = self._open.pop(number), self._buckets[number]
        with self._progress.waiting("stepped parameters from", others_of(self._group)):
            gather.work.wait()
        degree, own_index = dist.get_world_size(self._group), dist.get_rank(self._group)
        for index, flat in enumerate(gather.everything.chunk(degree)):
            if index != own_index:
                unpack(flat, bucket, degree, index)


class AwaitedParams(Mapping[str, torch.Tensor]):
    """Tensors over the parameters' memory, each of which is whole once it is read.

    Args:
        leaves: by name.
        param_all_gather: what they wait for.
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
    """A module's parameters, which whoever reads them finds whole.

    Args:
        parameters: of the module itself, by their attributes.
        param_all_gather: what they wait for.
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
    """Let everybody who reads a model's parameters find them whole.

    Args:
        model: the user's.
        param_all_gather: what they wait for; those of an earlier engine are forgotten.
    """
    for module in model.modules():
        if module._parameters:
            parameters = dict(dict.items(module._parameters))
            module.__dict__["_parameters"] = _AwaitedDict(parameters, param_all_gather)
