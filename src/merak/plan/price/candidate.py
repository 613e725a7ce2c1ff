"""A candidate: one way to lay a job out, which can be priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to lay a job out. Names and meanings are those of `MerakArguments`.

    Args:
        dp: data parallel degree.
        tp: tensor parallel degree.
        pp: pipeline parallel degree, pp ranks.
        microbatch: samples of one microbatch on one replica.
        num_microbatches: microbatches of a step on one replica.
        schedule: name of the schedule.
        schedule_options: further options of the schedule's builder, such as `chunks`.
        recompute: as the option `recompute`; "off", "full", "selective", "auto" or a fraction.
        offload: as the option `offload_activations`.
        zero: ZeRO stage, 0 to 3.
        sequence_parallel: whether activations between blocks are sharded over tp.
        sub_pipelining: "on" or "off".
        partition: segments of every stage; None for the balanced one.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    microbatch: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    schedule_options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    recompute: str | None = "off"
    offload: str | None = None
    zero: int = 0
    sequence_parallel: bool = False
    sub_pipelining: str = "off"
    partition: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Devices that it takes."""
        return self.dp * self.tp * self.pp
