"""Measured times of segments in a file, which replace the estimated ones."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from merak.core.errors import PlanError
from merak.core.files.json_file import UnreadableFile, read_json


@dataclass(frozen=True, slots=True)
class SegmentTimes:
    """Measured times of a segment for one microbatch.

    Args:
        name: the segment's name.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward without recomputation.
        operators: estimated seconds of each node of a rank's graph; none where they are not known.
    """

    name: str
    forward_s: float
    backward_s: float
    operators: Sequence[float] = ()

    def recompute_seconds(
        self, recomputed: Collection[int] | None, _: Collection[int] | None = None
    ) -> float:
        """Seconds of a recomputation: of the forward, as much as its operators are estimated at.

        Args:
            recomputed: as of `SegmentMemory`.
        """
        whole_s = sum(self.operators)
        if recomputed is None or not whole_s:
            return self.forward_s
        # Always in the same order, so that equal choices stay equal to the last bit in each run.
        own = (seconds for place, seconds in enumerate(self.operators) if place in recomputed)
        return self.forward_s * sum(own) / whole_s


def save_times(path: Path, times: Sequence[SegmentTimes]) -> None:
    """Write times as JSON: `{"segments": [{"name": …, "forward_s": …, "backward_s": …}, …]}`."""
    rows = [
        {"name": time.name, "forward_s": time.forward_s, "backward_s": time.backward_s}
        for time in times
    ]
    path.write_text(json.dumps({"segments": rows}, indent=2))


def load_times(path: Path, names: Sequence[str]) -> tuple[SegmentTimes, ...]:
    """Read the times of a model's segments.

    Args:
        path: a file of the format of `save_times`.
        names: names of the model's segments, in order.

    Returns:
        One entry per segment.

    Raises:
        PlanError: there is no such file, it is no JSON of this form, its segments are not the
            model's, or a time is not a finite number of 0 or more.
    """
    try:
        rows = read_json(path, finite=False)["segments"]
        times = tuple(
            SegmentTimes(row["name"], float(row["forward_s"]), float(row["backward_s"]))
            for row in rows
        )
    except UnreadableFile as error:
        raise PlanError(f"{path} {error}; give a file of times.") from error
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise PlanError(
            f"{path} holds no segment times ({type(error).__name__}: {error}); write an object "
            '{"segments": [{"name": …, "forward_s": …, "backward_s": …}, …]}.'
        ) from error
    _check(path, times, names)
    return times


def _check(path: Path, times: Sequence[SegmentTimes], names: Sequence[str]) -> None:
    if len(times) != len(names):
        raise PlanError(
            f"{path} holds times of {len(times)} segments, but the model has {len(names)}; "
            "measure them again for this model."
        )
    for index, (time, name) in enumerate(zip(times, names, strict=True)):
        if time.name != name:
            raise PlanError(
                f"{path} calls segment {index} {time.name!r}, but the model's is {name!r}; "
                "measure the times again for this model."
            )
        for field, value in (("forward_s", time.forward_s), ("backward_s", time.backward_s)):
            if not 0 <= value < math.inf:
                raise PlanError(
                    f"{path} says {field}={value} of segment {index}; give seconds, 0 or more."
                )
