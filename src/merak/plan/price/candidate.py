"""A candidate: one way to lay a job out, which can be priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch

from merak.core.mesh import Mesh
from merak.plan.options import LAYOUT, declared, taken, takes_options
from merak.schedule import registry
from merak.schedule.traits import Traits


@dataclass(frozen=True, slots=True)
class Form:
    """Choices that a rank's graphs depend on: candidates that share them have the same segments.

    Args:
        microbatch: samples of one microbatch.
        tp: tensor parallel degree.
        sequence_parallel: whether activations between blocks are sharded over tp.
        cp: context parallel degree.
        ep: expert parallel degree.
        dp: data parallel degree, where the model meets other replicas; None where that is open.
        one_pass: whether a head in chunks makes its gradients in the forward.
    """

    microbatch: int
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    dp: int | None = None
    one_pass: bool = True

    @property
    def spreads_experts(self) -> bool:
        """Whether replicas have the experts of a layer between them, as of `Mesh`."""
        return self.ep > 1 and self.tp == 1


@dataclass(frozen=True, slots=True, kw_only=True)
@takes_options(*LAYOUT)
class Candidate:
    """One way to lay a job out: degrees, and the options in which layouts differ.

    These have the names and meanings of `ParallelOptions`, and no choice that is left to a search.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree, pp ranks.
        microbatch: samples of one microbatch on one replica.
        num_microbatches: microbatches of a step on one replica.
        partition: segments of every stage; None for the balanced one.
        cp: context parallel degree, ranks that share the tokens of the same samples.
        ep: expert parallel degree: 1, or tp where each of its ranks has whole experts; where tp is
            1, the number of replicas that have the experts of a layer between them.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatch: int = 1
    num_microbatches: int = 1
    schedule: str = taken("schedule")
    schedule_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    recompute: str | None = taken("recompute", "off")
    offload_activations: str | None = taken("offload_activations")
    offload_optimizer: str | None = taken("offload_optimizer")
    zero: int = taken("zero")
    zero_group_size: int = taken("zero_group_size")
    sequence_parallel: bool = taken("sequence_parallel")
    sub_pipelining: str = taken("sub_pipelining", "off")
    partition: tuple[int, ...] | None = None
    cp: int = 1
    ep: int = 1

    def values(self) -> dict[str, Any]:
        """Choices of the candidate by name: degrees, sizes and options."""
        found = {own.name: getattr(self, own.name) for own in fields(Candidate)}
        return found | {"schedule_options": dict(self.schedule_options)}

    def options(self) -> dict[str, Any]:
        """Options of the candidate by name, as `ParallelOptions` has them."""
        found = {name: getattr(self, name) for name in LAYOUT}
        found["partition"] = None if self.partition is None else list(self.partition)
        return found | {"schedule_options": dict(self.schedule_options) or None}

    @property
    def world_size(self) -> int:
        """Number of devices that the candidate takes."""
        return self.stage_ranks * self.pp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, and sum their gradients: dp × cp."""
        return self.dp * self.cp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pp rank."""
        return self.replicas * self.tp

    def mesh(self, rank: int, device: torch.device) -> Mesh:
        """The mesh of the job, which is only planned.

        Args:
            rank: of the job.
            device: of the ranks.
        """
        return Mesh(self.dp, self.tp, self.pp, rank, device, None, cp=self.cp, ep=self.ep)

    @property
    def form(self) -> Form:
        """Choices of the candidate that its graphs depend on, whatever the model."""
        sequence_parallel = self.sequence_parallel and self.tp > 1
        return Form(self.microbatch, self.tp, sequence_parallel, self.cp, self.ep)

    def choices(self, *without: str) -> tuple[Any, ...]:
        """All choices but some, hashable: the same where candidates differ in those alone.

        Args:
            *without: names of fields.
        """
        kept = [getattr(self, own.name) for own in fields(self) if own.name not in without]
        return tuple(str(sorted(v.items())) if isinstance(v, Mapping) else v for v in kept)

    @property
    def traits(self) -> Traits:
        """Traits of its schedule.

        Raises:
            ScheduleError: the schedule is not defined for its ranks and microbatches.
        """
        return registry.traits(self.schedule, self.pp, self.num_microbatches, self.schedule_options)

    @property
    def splits(self) -> bool:
        """Whether microbatches run as two sub-microbatches."""
        return self.sub_pipelining == "on" and self.tp > 1 and self.cp == 1


def option_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a layout as a `Candidate` has them, without those that are left to a choice.

    Args:
        options: those of `merak.plan.options.ParallelOptions` by name, as users write them.
    """
    found = {name: options[name] for name in LAYOUT}
    given, partition = found["schedule_options"], found["partition"]
    found["schedule_options"] = dict(given) if isinstance(given, Mapping) else {}
    found["partition"] = None if partition is None else tuple(partition)
    for name in ("recompute", "offload_activations"):
        found[name] = _spec(found[name])
    return {n: v for n, v in found.items() if not v == declared(n).default == "auto"}


def _spec(given: Any) -> str | None:
    """The option `recompute` or `offload_activations` as text."""
    if isinstance(given, list | tuple):
        return ",".join(map(str, given))
    return None if given is None else str(given)
