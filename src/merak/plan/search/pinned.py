"""Choices of a plan that are pinned: the search leaves them as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from merak.core.elastic import GivenDegrees
from merak.schedule.ir import USUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Choices that the search leaves as they are; None for one that it makes.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree.
        cp: context parallel degree.
        ep: expert parallel degree.
        microbatch: samples of one microbatch on one replica.
        schedule: name of the schedule.
        schedule_options: options of that schedule's builder.
        recompute: as the option `recompute`.
        offload_activations: as the option of this name.
        zero: ZeRO stage.
        sequence_parallel: whether activations between blocks are sharded over tp.
        sub_pipelining: "on" or "off".
        partition: segments of every stage.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    schedule_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    recompute: str | None = None
    offload_activations: str | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    sub_pipelining: str | None = None
    partition: tuple[int, ...] | None = None

    @property
    def leaves_context(self) -> bool:
        """Whether context parallel degrees may be searched: sequence parallelism excludes them."""
        return self.cp is None and not self.sequence_parallel

    def frees_pp(self, pp: int) -> bool:
        """Whether half of a pipeline degree may be tried: nothing that is pinned needs all of it.

        A schedule that is pinned runs on several ranks; on one there is none.
        """
        has_schedule = self.schedule in (None, USUAL) or pp > 2
        return self.pp is None and self.partition is None and has_schedule

    def __str__(self) -> str:
        """What is pinned, such as "dp=2, zero=1"; empty for nothing."""
        named = {own.name: getattr(self, own.name) for own in fields(self)}
        return ", ".join(f"{name}={value!r}" for name, value in named.items() if _is_set(value))


def _is_set(value: Any) -> bool:
    """Whether a choice is pinned: zero=0 and sequence_parallel=False are."""
    return value is not None and not (isinstance(value, Mapping) and not value)


def pinned_options(
    options: Any,
    degrees: GivenDegrees,
    microbatch: int | None,
    given: Collection[str] = (),
) -> Pinned:
    """The choices that options make which are given, or not at their default.

    Args:
        options: with the fields of `merak.plan.options.ParallelOptions`.
        degrees: of the job; None for those that are searched.
        microbatch: samples of a microbatch.
        given: names of options that the user gives, at their default or not.
    """
    own = options.schedule_options
    is_usual = options.schedule == USUAL and not own and "schedule" not in given
    shards = options.sequence_parallel or "sequence_parallel" in given
    return Pinned(
        **degrees._asdict(),
        microbatch=microbatch,
        schedule=None if is_usual else options.schedule,
        schedule_options=dict(own) if isinstance(own, Mapping) else {},
        recompute=_spec(options.recompute),
        offload_activations=_spec(options.offload_activations),
        zero=options.zero if options.zero or "zero" in given else None,
        sequence_parallel=bool(options.sequence_parallel) if shards else None,
        sub_pipelining=None if options.sub_pipelining == "auto" else options.sub_pipelining,
        partition=None if options.partition is None else tuple(options.partition),
    )


def _spec(given: Any) -> str | None:
    """The option `recompute` or `offload_activations` as text."""
    if isinstance(given, list | tuple):
        return ",".join(map(str, given))
    return None if given is None else str(given)
