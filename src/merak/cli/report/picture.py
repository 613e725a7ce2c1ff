"""Picture of the mesh: a card for each pp rank with its layers, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from merak.cli.page.html import part
from merak.core.units import count, ranges, size
from merak.plan.summary import first_to_last
from merak.record.run import JobRecord

_GROUPS = (
    ("attention", "#4a7fd0", ("attn", "attention", "mixer", "mamba")),
    ("feed-forward", "#4fa868", ("mlp", "ffn", "feed_forward", "moe", "experts", "output", "fc")),
    ("embedding", "#b79ad6", ("emb", "wte", "wpe", "patch", "transformer", "model")),
    ("head and loss", "#d79f3a", ("head", "classifier", "loss", "score", "cls")),
    ("other", "#93a1b1", ()),
)
"""Kinds of segments: name, colour, and what names of their modules contain."""

_MOST_SQUARES = 64
"""Ranks that are drawn one by one; of more, their numbers are written."""

_HOST_SHADES = 6

_MOST_STAGES = 4
"""Stages of a card whose names are written."""


def picture(job: JobRecord) -> Markup:
    """Draw the mesh: which segments where, and on which ranks.

    Args:
        job: as it was laid out.
    """
    seen = {_group(job, index)[0] for index in range(len(job.segments))}
    return part(
        "mesh",
        entries=[(colour, name) for name, colour, _ in _GROUPS if name in seen],
        hosts=len(set(job.hosts)),
        cards=[_card(job, rank) for rank in range(job.degrees["pp"])],
    )


def _card(job: JobRecord, rank: int) -> dict[str, Any]:
    """What the card of a pp rank shows: its segments, and its ranks in a grid of dp and tp."""
    stages = job.schedule.stages_of(rank)
    indices = sorted(index for stage in stages for index in job.stages[stage])
    parameters = sum(job.segments[index].parameters for index in indices)
    memory = f", forecast {size(job.memory[rank].peak_bytes)} a rank" if job.memory else ""
    own, tp = job.ranks_of(rank), job.degrees["tp"]
    axes = f"rows: dp{' and cp' if job.degrees.get('cp', 1) > 1 else ''}, columns: tp"
    ranks, squares = "rank" if len(own) == 1 else f"ranks ({axes})", [_host(job, n) for n in own]
    if len(own) > _MOST_SQUARES:
        ranks, squares = f"ranks {ranges(own)} ({len(own) // tp} × {tp}; {axes})", []
    return {
        "stages": f"stage{'s' * (len(stages) > 1)} {ranges(list(stages))}",
        "names": _names(job, stages),
        "layers": [(_group(job, index)[1], _described(job, index)) for index in indices],
        "size": f"segments {ranges(indices)}, {count(parameters)} parameters{memory}",
        "ranks": ranks,
        "squares": squares,
        "tp": tp,
    }


def _names(job: JobRecord, stages: Sequence[int]) -> list[str]:
    """Names of the first and last segment of each stage; of many stages the first ones."""
    parts = []
    for stage in stages[:_MOST_STAGES]:
        names = [job.segments[index].name for index in job.stages[stage]]
        start = f"stage {stage}: " if len(stages) > 1 else ""
        parts.append(start + (first_to_last(names) if names else ""))
    return [*parts, "…"] if len(stages) > _MOST_STAGES else parts


def _described(job: JobRecord, index: int) -> str:
    segment = job.segments[index]
    name = segment.name or "(no module)"
    return f"segment {index}: {name}, {count(segment.parameters)} parameters"


def _group(job: JobRecord, index: int) -> tuple[str, str]:
    """Kind of a segment by the name of its module, and its colour."""
    whole = job.segments[index].name.lower()
    last = whole.rpartition(".")[2]
    for text in (last, whole):
        for name, colour, words in _GROUPS:
            if any(word in text for word in words):
                return name, colour
    return _GROUPS[-1][0], _GROUPS[-1][1]


def _host(job: JobRecord, rank: int) -> tuple[int, str | None, int]:
    """A rank, its host where it is known, and the hue of its border."""
    if rank >= len(job.hosts):
        return rank, None, 0
    number = list(dict.fromkeys(job.hosts)).index(job.hosts[rank]) % _HOST_SHADES
    return rank, job.hosts[rank], 360 * number // _HOST_SHADES
