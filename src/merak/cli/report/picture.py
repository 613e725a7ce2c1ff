"""Picture of the mesh: a card for each pp rank with its layers, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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

STYLE = """
.mesh{display:flex;flex-wrap:wrap;gap:12px;align-items:stretch}
.mesh .card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;
flex:1 1 210px;max-width:340px;min-width:0}
.mesh h3{font-size:14px;margin:0 0 2px}.mesh p{font-size:12.5px;margin:2px 0;overflow-wrap:anywhere}
.layers{display:flex;flex-wrap:wrap;gap:2px;margin:8px 0}
.layers i{height:16px;flex:1 1 7px;min-width:4px;max-width:34px;border-radius:2px}
.grid{display:grid;gap:3px;margin:8px 0 0;width:max-content;max-width:100%}
.grid b{font-weight:500;font-size:11px;text-align:center;border-radius:3px;padding:1px 4px;
border:1px solid var(--line);background:var(--paper);min-width:24px}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12.5px;margin:8px 0;color:var(--quiet)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:5px;
vertical-align:-1px}
"""


def picture(job: JobRecord) -> str:
    """Draw the mesh: which segments where, and on which ranks.

    Args:
        job: as it was laid out.
    """
    cards = [_card(job, rank) for rank in range(job.degrees["pp"])]
    seen = {_group(job, index)[0] for index in range(len(job.segments))}
    legend = [(colour, name) for name, colour, _ in _GROUPS if name in seen]
    hosts = len(set(job.hosts))
    note = f'<p class="quiet">Borders of ranks: their {hosts} hosts.</p>' if hosts > 1 else ""
    return legend_of(legend) + note + f'<div class="mesh">{"".join(cards)}</div>'


def legend_of(entries: Sequence[tuple[str, str]]) -> str:
    """A line of colours and what they mean.

    Args:
        entries: colour and text of each.
    """
    parts = (
        f'<span><i style="background:{colour}"></i>{escape(text)}</span>'
        for colour, text in entries
    )
    return f'<div class="legend">{"".join(parts)}</div>'


def _card(job: JobRecord, rank: int) -> str:
    stages = job.schedule.stages_of(rank)
    indices = sorted(index for stage in stages for index in job.stages[stage])
    parameters = sum(job.segments[index].parameters for index in indices)
    layers = "".join(
        f'<i style="background:{_group(job, index)[1]}" '
        f'title="{escape(_described(job, index))}"></i>'
        for index in indices
    )
    memory = f", forecast {size(job.memory[rank].peak_bytes)} a rank" if job.memory else ""
    stage = f"stage{'s' * (len(stages) > 1)} {ranges(list(stages))}"
    return (
        f'<div class="card"><h3>pp rank {rank} · {stage}</h3>'
        f"{_names(job, stages)}"
        f'<div class="layers">{layers}</div>'
        f'<p class="quiet">segments {ranges(indices)}, {count(parameters)} parameters{memory}</p>'
        f"{_grid(job, rank)}</div>"
    )


def _names(job: JobRecord, stages: Sequence[int]) -> str:
    """Names of the first and last segment of each stage; of many stages the first ones."""
    parts = []
    for stage in stages[:_MOST_STAGES]:
        names = [job.segments[index].name for index in job.stages[stage]]
        start = f"stage {stage}: " if len(stages) > 1 else ""
        parts.append(f"<p>{escape(start + (first_to_last(names) if names else ''))}</p>")
    return "".join(parts) + ("<p>…</p>" if len(stages) > _MOST_STAGES else "")


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


def _grid(job: JobRecord, rank: int) -> str:
    """The ranks with a pp rank: a row for each replica, a column for each tensor parallel rank."""
    own = job.ranks_of(rank)
    tp = job.degrees["tp"]
    rows = len(own) // tp
    cp = job.degrees.get("cp", 1)
    axes = f"rows: dp{' and cp' if cp > 1 else ''}, columns: tp"
    if len(own) > _MOST_SQUARES:
        return f'<p class="quiet">ranks {ranges(own)} ({rows} × {tp}; {axes})</p>'
    squares = "".join(f"<b{_host(job, number)}>{number}</b>" for number in own)
    style = f"grid-template-columns:repeat({tp},minmax(0,1fr))"
    label = "rank" if len(own) == 1 else f"ranks ({axes})"
    return f'<p class="quiet">{label}</p><div class="grid" style="{style}">{squares}</div>'


def _host(job: JobRecord, rank: int) -> str:
    """The host of a rank: its name to point at, and a border of its own colour."""
    if rank >= len(job.hosts):
        return ""
    host = job.hosts[rank]
    number = list(dict.fromkeys(job.hosts)).index(host) % _HOST_SHADES
    hue = 360 * number // _HOST_SHADES
    return f' title="{escape(host)}" style="border-color:hsl({hue} 55% 50%)"'
