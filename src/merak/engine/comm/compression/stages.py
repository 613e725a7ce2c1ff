"""Compression of gradient buckets by torch's communication hooks, and the error feedback's state.

Hooks of one collective start with their bucket, beside the backward pass. PowerSGD and signs start
several collectives, or compute between them: they run when the step waits for its reductions, in
the order of the buckets, which is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from merak.core.random import seed_for
from merak.core.rank0 import warn_on_rank0
from merak.engine.comm.compression.momenta import Momenta
from merak.engine.comm.compression.signs import reduce_signs, served_pieces, served_rows
from merak.engine.comm.compression.top import reduce_largest
from merak.engine.comm.replica_levels import Waitable
from merak.plan.gradient_compression import (
    KEPT,
    LEAST_RATE,
    USUAL_FRACTION,
    USUAL_RANK,
    powersgd_rank,
)

logger = logging.getLogger(__name__)

KEY = "compression/"
"""Keys of the error feedback in checkpoints begin with it."""

HOOKS: Mapping[str, Callable[..., torch.futures.Future[torch.Tensor]]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
"""torch's hooks of one collective by kind."""


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """The gradients of a bucket, as torch's hooks take them: a `dist.GradBucket` in Python.

    Args:
        flat: all of them, one after another.
        own: the parameters.
        number: of the bucket in its stage.
        is_final: whether it is the last one of its stage.
    """

    flat: torch.Tensor
    own: Sequence[torch.nn.Parameter]
    number: int
    is_final: bool

    def index(self) -> int:
        """The bucket's number in its stage."""
        return self.number

    def buffer(self) -> torch.Tensor:
        """All gradients, one after another."""
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter with elements, a view of at least one dimension."""
        views, start = [], 0
        for parameter in self.own:
            if count := parameter.numel():
                shape = parameter.shape or (1,)
                views.append(self.flat[start : start + count].view(shape))
            start += count
        return views

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the bucket."""
        return list(self.own)

    def is_last(self) -> bool:
        """Whether it is the last bucket of its stage."""
        return self.is_final


@dataclass(frozen=True, slots=True)
class _Summed:
    """A reduction by one of torch's hooks, which gives means.

    Args:
        future: of the hook.
        flat: where the hook writes the mean.
        size: number of replicas.
    """

    future: torch.futures.Future[torch.Tensor]
    flat: torch.Tensor
    size: int

    def wait(self) -> None:
        """Wait for the mean, and make it the sum."""
        self.flat.copy_(self.future.wait())
        self.flat.mul_(self.size)


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A reduction that runs when it is waited for.

    Args:
        compression: of the stage.
        bucket: its gradients.
    """

    compression: StageCompression
    bucket: BucketGradients

    def wait(self) -> None:
        """Run it."""
        self.compression.run(self.bucket)


@dataclass(frozen=True, slots=True)
class _Before:
    """What a stage has kept before a step, and its unit."""

    kept: Mapping[str, Mapping[int, torch.Tensor]]
    factors: Mapping[int, torch.Tensor]
    scale: float


@dataclass(slots=True)
class StageCompression:
    """Compressed reductions of one stage's buckets.

    Args:
        kind: one of `merak.plan.gradient_compression.COMPRESSIONS`, not "off".
        group: all ranks that hold the same part of the stage.
        buckets: of the stage, in the order of their reductions.
        dtype_of: the type that a parameter's gradient is reduced in.
        momenta: of optimizers that want them reduced.
        rank: columns of PowerSGD's factors.
        fraction: of the elements that TopK and DGC send.
    """

    kind: str
    group: dist.ProcessGroup
    buckets: Sequence[Sequence[torch.nn.Parameter]]
    dtype_of: Callable[[torch.Tensor], torch.dtype]
    momenta: Momenta
    rank: int = USUAL_RANK
    fraction: float = USUAL_FRACTION
    kept: dict[str, dict[int, torch.Tensor]] = field(init=False, default_factory=dict)
    """Flat tensors by bucket: what compression has left out before, and further ones of a kind."""
    _scale: float = field(init=False, default=1.0)
    _power: Any = field(init=False, default=None)
    _before: _Before | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Begin without errors, and with PowerSGD's first factors."""
        for what in KEPT[self.kind]:
            sizes = [self._kept_sizes(what, bucket) for bucket in self.buckets]
            self.kept[what] = {
                number: torch.cat([self._zeros(*one) for one in own])
                for number, own in enumerate(sizes)
            }
        if self.kind == "powersgd":
            self._power = power = powerSGD_hook.PowerSGDState(
                self.group, self.rank, min_compression_rate=LEAST_RATE
            )
            power.iter = power.start_powerSGD_iter  # DDP alone rebuilds its buckets at first
            power.error_dict = self.kept["error"]
            for number in range(len(self.buckets)):
                self._first_factors(number)

    def start(self, bucket: BucketGradients) -> Waitable:
        """Begin the reduction of a bucket, which `wait` leaves in its buffer as a sum."""
        if self.kind in HOOKS:
            future = HOOKS[self.kind](self.group, bucket)
            return _Summed(future, bucket.flat, self.group.size())
        wanting = [p for p in bucket.own if p.numel() and self.momenta.wants(p)]
        if self.kind == "1bit" and any(self.momenta.of(p) is None for p in wanting):
            work: Waitable = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            return work
        return _Deferred(self, bucket)

    def run(self, bucket: BucketGradients) -> None:
        """Reduce a bucket whose reduction takes several collectives, and wait for it."""
        if self.kind == "powersgd":
            future = powerSGD_hook.powerSGD_hook(self._power, bucket)
            _Summed(future, bucket.flat, self.group.size()).wait()
            return
        number = bucket.number
        # Those before stay for steps that are skipped.
        kept = {what: own[number].clone() for what, own in self.kept.items()}
        with torch._C.DisableTorchFunctionSubclass():  # which follows scripts
            self._run(bucket, kept)
        for what, own in kept.items():
            self.kept[what][number] = own

    def _run(self, bucket: BucketGradients, kept: Mapping[str, torch.Tensor]) -> None:
        """Reduce signs or the largest elements, and note what they leave out."""
        like = {what: replace(bucket, flat=own) for what, own in kept.items()}
        if not (own := [parameter for parameter in bucket.own if parameter.numel()]):
            return
        for place, (parameter, gradient) in enumerate(zip(own, bucket.gradients(), strict=True)):
            if not self.momenta.wants(parameter):
                continue
            momentum, decay = self.momenta.reduce(parameter)
            if self.kind == "dgc":
                gradient.copy_(like["velocity"].gradients()[place].mul_(decay).add_(gradient))
            elif momentum is not None:  # this replica's part of the sum
                before = momentum.view_as(gradient) * (decay * self._scale / self.group.size())
                gradient.mul_(1.0 - decay).add_(before)
        if self.kind == "1bit":
            errors = like["error"].gradients()
            reduce_signs(bucket.gradients(), errors, kept["served"], self.group)
            return
        kept["error"].add_(bucket.flat)
        counts = [parameter.numel() for parameter in own]
        reduce_largest(bucket.flat, counts, list(kept.values()), self.fraction, self.group)

    def start_step(self, loss_scale: float) -> None:
        """Remember the state before a step, in the unit of the step's gradients.

        Args:
            loss_scale: the factor of the step's gradients.
        """
        self.momenta.start_step()
        self._set_scale(loss_scale)
        factors = {} if self._power is None else self._power.q_memory_dict
        self._before = _Before(
            {what: dict(own) for what, own in self.kept.items()},
            {number: own.clone() for number, own in factors.items()},
            loss_scale,
        )

    def undo(self) -> None:
        """Go back to the state before the last step."""
        if self._before is None:
            return
        self._scale = self._before.scale
        for what, own in self._before.kept.items():
            self.kept[what].update(own)
        for number, factor in self._before.factors.items():
            # torch replaces the tensor by the collective's result, which may be another.
            self._power.q_memory_dict[number] = factor.clone()

    def tensors(
        self, names: Mapping[int, str], shard: str
    ) -> dict[str, tuple[str | None, torch.Tensor]]:
        """State for checkpoints: views that can be loaded in place, of unscaled gradients.

        Args:
            names: of parameters, by id.
            shard: names this rank's shard of the parameters.

        Returns:
            By key the name of the parameter that it is laid out like, or None, and the tensor.
        """
        self._set_scale(1.0)
        self._before = None
        # Factors of another rank are others; checkpoints from before it was an option have none.
        of_rank = "" if self.rank == USUAL_RANK else f" rank {self.rank}"
        member = f"{self.group.rank()} of {self.group.size()}"
        found: dict[str, tuple[str | None, torch.Tensor]] = {}
        for number, bucket in enumerate(self.buckets):
            for what, kept in self.kept.items():
                sizes = [size for _, size in self._kept_sizes(what, bucket)]
                for parameter, own in zip(bucket, kept[number].split(sizes), strict=True):
                    name = names[id(parameter)]
                    if what == "served" and own.numel():  # of this layout's rows
                        found[f"{KEY}{what} {member} {shard}/{name}"] = None, own
                    elif what != "served":
                        found[f"{KEY}{what} {member}/{name}"] = name, own.view(parameter.shape)
            for parameter, factor in self._factors(number):
                found[f"{KEY}factor{of_rank} {shard}/{names[id(parameter)]}"] = None, factor
        return found

    def reset(self, keys: Collection[str], names: Mapping[int, str], shard: str) -> None:
        """Begin anew with what a checkpoint does not have.

        Args:
            keys: of `tensors`.
            names: as of `tensors`.
            shard: as of `tensors`.
        """
        for key, (_, tensor) in self.tensors(names, shard).items():
            if key in keys:
                is_factor = key.startswith(f"{KEY}factor")
                tensor.copy_(_factor(tensor) if is_factor else torch.zeros_like(tensor))

    def _kept_sizes(
        self, what: str, bucket: Sequence[torch.nn.Parameter]
    ) -> list[tuple[torch.nn.Parameter, int]]:
        """The parameters of a bucket, and how many elements of each are kept."""
        if what != "served":
            return [(parameter, parameter.numel()) for parameter in bucket]
        own = [parameter for parameter in bucket if parameter.numel()]
        rows = served_rows([p.shape for p in own], self.group.rank(), self.group.size())
        pieces = served_pieces([p.detach() for p in own], rows)
        sizes = {id(p): piece.numel() for p, piece in zip(own, pieces, strict=True)}
        return [(parameter, sizes.get(id(parameter), 0)) for parameter in bucket]

    def _zeros(self, parameter: torch.nn.Parameter, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=self.dtype_of(parameter), device=parameter.device)

    def _set_scale(self, scale: float) -> None:
        if scale != self._scale:
            factor = scale / self._scale
            for own in self.kept.values():
                own.update({number: flat * factor for number, flat in own.items()})
            self._scale = scale

    def _first_factors(self, number: int) -> None:
        """Give torch PowerSGD's first factors of a bucket.

        torch would draw those of all matrices of a bucket from one generator. Tensor parallel
        ranks hold the same parameters beside shards of different shapes, so a factor must depend
        on the parameter's own shape alone.
        """
        bucket, power = self.buckets[number], self._power
        ranks = [(p, powersgd_rank(p.shape, self.rank)) for p in bucket]
        like = self.kept["error"][number]
        rows = sum(p.shape[0] * rank for p, rank in ranks if rank)
        columns = sum(p.numel() // p.shape[0] * rank for p, rank in ranks if rank)
        power.p_memory_dict[number] = like.new_zeros(rows)
        power.q_memory_dict[number] = like.new_zeros(columns)
        for _, factor in self._factors(number):
            factor.copy_(_factor(factor))

    def _factors(self, number: int) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """The matrices of a bucket and their right factors, in torch's order: by shape."""
        if self._power is None:
            return []
        by_shape: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in self.buckets[number]:
            if powersgd_rank(parameter.shape, self.rank):
                rows = parameter.shape[0]
                by_shape.setdefault((rows, parameter.numel() // rows), []).append(parameter)
        found, start, flat = [], 0, self._power.q_memory_dict[number]
        for (_, columns), own in by_shape.items():
            for parameter in own:
                rank = powersgd_rank(parameter.shape, self.rank)
                end = start + columns * rank
                found.append((parameter, flat[start:end].view(columns, rank)))
                start = end
        return found


class GradientCompression:
    """Compressed reductions of a rank's stages.

    Args:
        kind: one of `merak.plan.gradient_compression.COMPRESSIONS`, not "off".
        stages: the group and the buckets of each stage; stages of a single replica have no group.
        dtype_of: the type that a parameter's gradient is reduced in.
        names: of parameters, by id.
        shard: names this rank's shard of the parameters, such as "0 of 2".
        rank: columns of PowerSGD's factors.
        fraction: of the elements that TopK and DGC send.
    """

    def __init__(
        self,
        kind: str,
        stages: Mapping[int, tuple[dist.ProcessGroup | None, Sequence[Any]]],
        dtype_of: Callable[[torch.Tensor], torch.dtype],
        names: Mapping[int, str],
        shard: str,
        rank: int = USUAL_RANK,
        fraction: float = USUAL_FRACTION,
    ) -> None:
        self._names = names
        self._shard = shard
        self.momenta = Momenta(kind)
        """Of the rank's optimizers."""
        self._stages = {
            stage: StageCompression(kind, group, buckets, dtype_of, self.momenta, rank, fraction)
            for stage, (group, buckets) in stages.items()
            if group is not None
        }

    def start(self, stage: int, bucket: BucketGradients) -> Waitable:
        """Begin the reduction of a bucket; see `StageCompression.start`."""
        return self._stages[stage].start(bucket)

    def start_step(self, loss_scale: float) -> None:
        """Remember the state before a step; see `StageCompression.start_step`."""
        for own in self._stages.values():
            own.start_step(loss_scale)

    def undo(self) -> None:
        """Go back to the state before a step that is skipped or run again."""
        for own in self._stages.values():
            own.undo()

    def tensors(self) -> dict[str, tuple[str | None, torch.Tensor]]:
        """State for checkpoints; see `StageCompression.tensors`."""
        found: dict[str, tuple[str | None, torch.Tensor]] = {}
        for own in self._stages.values():
            found |= own.tensors(self._names, self._shard)
        return found

    def reset(self, keys: Collection[str]) -> None:
        """Begin anew with what a checkpoint does not have, and warn of lost errors.

        Args:
            keys: of `tensors`.
        """
        for own in self._stages.values():
            own.reset(keys, self._names, self._shard)
        if any(key.startswith(f"{KEY}error ") for key in keys):
            warn_on_rank0(
                logger,
                "The checkpoint has no error feedback for this number of replicas, so compressed "
                "gradients begin without it. To keep it, resume with the dp and cp that it was "
                "saved with.",
            )


def _factor(like: torch.Tensor) -> torch.Tensor:
    """The first right factor of all matrices of as many columns."""
    generator = torch.Generator().manual_seed(seed_for("PowerSGD", *like.shape))
    return torch.randn(like.shape, generator=generator).to(like)
