"""Degrees of a job of which only some ranks are there, as after the loss of a host."""

from __future__ import annotations

from typing import NamedTuple


class Degrees(NamedTuple):
    """Degrees of a mesh of ranks."""

    dp: int
    tp: int
    pp: int

    def __str__(self) -> str:
        return f"dp={self.dp} × tp={self.tp} × pp={self.pp}"


def smaller_degrees(wanted: Degrees, num_ranks: int) -> Degrees | None:
    """Choose the degrees for fewer ranks than a job is written for; None where none fit.

    No degree grows, and tp stays or is divided, since it divides heads and columns. Replicas take
    the same samples a step between them, so a dp that divides the wanted one comes first, with
    which every number of accumulation steps does. Of those, tp stays as it is before pp does: a
    smaller tp changes every weight's shard.

    Args:
        wanted: the job's own degrees.
        num_ranks: that are there.
    """
    found = [
        Degrees(num_ranks // (tp * pp), tp, pp)
        for tp in range(1, wanted.tp + 1)
        for pp in range(1, wanted.pp + 1)
        if wanted.tp % tp == 0 and num_ranks % (tp * pp) == 0
    ]
    fitting = [degrees for degrees in found if degrees.dp <= wanted.dp]
    return max(fitting, key=lambda d: (wanted.dp % d.dp == 0, d.tp, d.pp), default=None)
