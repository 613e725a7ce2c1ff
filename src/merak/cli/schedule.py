"""`merak schedule`: a pipeline schedule, checked, simulated and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from merak.cli import options
from merak.cli.output import show
from merak.core.errors import ScheduleError
from merak.plan.cost.overlap import Layers, layer_costs
from merak.schedule import registry
from merak.schedule.costs import Costs, uniform
from merak.schedule.ir import Schedule
from merak.schedule.render.png import render_png
from merak.schedule.render.svg import render_html, render_svg
from merak.schedule.render.text import render_text
from merak.schedule.serialize import load, to_json, to_text
from merak.schedule.simulate.simulate import Simulation, simulate
from merak.schedule.simulate.timeline import simulated_timeline
from merak.schedule.validate.schedule import check, check_in_flight

_NUM_COLUMNS = 160
_MOST_FORWARDS = 2**17
"""Stages × microbatches; beyond, a command would run for minutes."""
_MOST_RANKS = 2**11
_LONG_S = 2.0
"""What takes more seconds is announced."""
_SECONDS_PER_FORWARD = 1e-4
_SECONDS_PER_PAIR = 2.5e-6


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """One schedule, simulated.

    Args:
        name: of the schedule; where it is not the one asked for, `notes` say why.
        ranks: pipeline degree.
        stages: stages of the model, over all ranks.
        microbatches: per iteration.
        makespan: from the start of the iteration to its end.
        bubble_fraction: idle time ÷ total time, over all ranks.
        peak_in_flight: per rank, the most microbatches forwarded and not yet backwarded, summed
            over its stages.
        actions: per rank, in order: `F0`, or `1F0` where ranks hold several stages.
        pipes: per copy of the model, the rank of every stage.
        weight_versions: per stage, how many updates the weights of each microbatch have had; empty
            for a synchronous schedule.
        notes: what had to be changed about the request.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    makespan: float
    bubble_fraction: float
    peak_in_flight: list[int]
    actions: list[list[str]]
    pipes: list[list[int]]
    weight_versions: list[list[int]]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class ListReport:
    """The names of all schedules."""

    schedules: list[str]


@dataclass(frozen=True, slots=True)
class Sums:
    """The tensor parallel all-reduces of a stage.

    Args:
        all_reduce: time of all of them, in each direction.
        layers: how many there are, equal ones.
        in_halves: whether microbatches run in halves.
    """

    all_reduce: float = 0.0
    layers: int = 1
    in_halves: bool = False


def schedule(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A schedule's name, or a file with one.")
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the names and end.")] = False,
    stages: Annotated[
        int | None,
        typer.Option(
            "--stages",
            metavar="P",
            help="Pipeline degree: ranks in a row. Interleaved and V-shaped schedules put several "
            "smaller stages on each.",
        ),
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", metavar="M", help="Per iteration.")
    ] = None,
    forward: Annotated[float, typer.Option(help="Time of a stage's forward.")] = 1.0,
    backward: Annotated[float, typer.Option(help="Of its backward; I and W take half each.")] = 2.0,
    recompute: Annotated[float, typer.Option(help="Of recomputing it, where that is done.")] = 1.0,
    transfer: Annotated[float, typer.Option(help="Of sending one result to another rank.")] = 0.0,
    all_reduce: Annotated[
        float,
        typer.Option(
            "--all-reduce",
            metavar="T",
            help="Of the tensor parallel all-reduces of a stage, beside its forward's, its "
            "backward's and its recomputation's own time.",
        ),
    ] = 0.0,
    layers: Annotated[
        int, typer.Option(metavar="K", help="Layers of a stage, with an all-reduce each.")
    ] = 1,
    in_halves: Annotated[
        bool, typer.Option("--in-halves", help="Hide all-reduces: microbatches run in halves.")
    ] = False,
    memory_limit: Annotated[
        float | None,
        typer.Option("--memory-limit", metavar="K", help="Most microbatches in flight on a rank."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="Of the schedule itself; repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Also write it: .txt or .json to run, .svg, .html or .png to look at."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Build a pipeline schedule, check it, simulate it and draw it."""
    if list_names:
        show(ListReport(list(registry.names())), _list_page, as_json)
        return
    times = {
        "forward_s": forward,
        "backward_s": backward,
        "recompute_s": recompute,
        "transfer_s": transfer,
    }
    sums = Sums(all_reduce, layers, in_halves)
    simulation = simulated(name, stages, microbatches, times, memory_limit, option or (), sums)
    for note in simulation.schedule.notes:
        print(f"merak: {note}", file=sys.stderr)
    if output is not None:
        _write(simulation, output)
    show(report(simulation), lambda _: _page(simulation), as_json)


def simulated(
    name: str | None,
    stages: int | None,
    microbatches: int | None,
    times: dict[str, float],
    memory_limit: float | None = None,
    chosen: Sequence[str] = (),
    sums: Sums | None = None,
) -> Simulation:
    """Build or read a schedule, check it, and simulate it with equal stages.

    Args:
        name: of a schedule, or of a file.
        stages: pipeline degree; may be left out for a file.
        microbatches: per iteration; may be left out for a file.
        times: the arguments of `uniform` but the number of stages.
        memory_limit: most microbatches in flight on a rank.
        chosen: options of the schedule, as KEY=VALUE.
        sums: what tensor parallelism adds to the times.

    Raises:
        ScheduleError: what was asked for makes no sense, or does not fit the limit.
    """
    if name is None:
        raise ScheduleError(f"Give a schedule's NAME: one of {', '.join(registry.names())}.")
    values = dict(map(_parse_option, chosen))
    if registry.is_file(name):
        read = load(Path(name))
        stages = read.num_ranks if stages is None else stages
        microbatches = read.num_microbatches if microbatches is None else microbatches
    if stages is None or microbatches is None:
        raise ScheduleError(f"{name} needs --stages P and --microbatches M.")
    if name == "auto":
        values |= {"costs": _costs(stages, times, sums or Sums()) if stages > 0 else None}
        if memory_limit is not None:
            values["memory_limit_bytes"] = memory_limit
    registry.check_size(stages, microbatches, _MOST_RANKS, _MOST_FORWARDS)
    about = stages * microbatches * _SECONDS_PER_FORWARD + stages**2 * _SECONDS_PER_PAIR
    if about > _LONG_S:
        print(
            f"merak: {stages} stages × {microbatches} microbatches take about {about:.0f} s to lay "
            "out, check and simulate; schedules with several stages on a rank a few times that.",
            file=sys.stderr,
        )
    built = registry.resolve(name, stages, microbatches, **values)
    check(built)
    if memory_limit is not None:
        check_in_flight(built, memory_limit)
    return simulate(built, _costs(built.num_stages, times, sums or Sums()))


def report(simulation: Simulation) -> ScheduleReport:
    """What `--json` prints."""
    built = simulation.schedule
    return ScheduleReport(
        name=built.name,
        ranks=built.num_ranks,
        stages=built.num_stages,
        microbatches=built.num_microbatches,
        makespan=simulation.makespan,
        bubble_fraction=simulation.bubble_fraction,
        peak_in_flight=list(simulation.peak_in_flight),
        actions=[built.labels(rank) for rank in range(built.num_ranks)],
        pipes=[list(pipe) for pipe in built.pipes],
        weight_versions=[list(versions) for versions in built.weight_versions],
        notes=list(built.notes),
    )


def _costs(num_stages: int, times: Mapping[str, float], sums: Sums) -> Costs:
    """Equal stages of equal layers."""
    costs = uniform(num_stages, **times)
    if sums.layers < 1 or not sums.all_reduce >= 0:
        raise ScheduleError(
            f"--layers {sums.layers} --all-reduce {sums.all_reduce:g} is no stage; give 1 layer or "
            "more, and a time of 0 or more."
        )
    names = ("forward_s", "backward_s", "recompute_s")
    forward_s, backward_s, recompute_s = (times[name] / sums.layers for name in names)
    layers = Layers(sums.layers, forward_s, sums.all_reduce / sums.layers, backward_s, recompute_s)
    return layer_costs(
        (layers,) * num_stages,
        sums.in_halves,
        links=costs.links,
        checkpoint_bytes=costs.checkpoint_bytes,
    )


def _parse_option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ScheduleError(f"--option {text} is not of the form KEY=VALUE.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _write(simulation: Simulation, path: Path) -> None:
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        raise ScheduleError(
            f"{path} has no suffix that can be written; use {', '.join(sorted(_WRITERS))}."
        )
    try:
        writer(simulation, path)
    except OSError as error:
        raise ScheduleError(f"{path} cannot be written: {error.strerror}.") from error


def _write_text(text: Callable[[Simulation], str]) -> Callable[[Simulation, Path], None]:
    def write(simulation: Simulation, path: Path) -> None:
        path.write_text(text(simulation), encoding="utf-8")

    return write


_WRITERS: dict[str, Callable[[Simulation, Path], None]] = {
    ".txt": _write_text(lambda simulation: to_text(simulation.schedule)),
    ".json": _write_text(lambda simulation: to_json(simulation.schedule)),
    ".svg": _write_text(lambda simulation: render_svg([simulated_timeline(simulation)])),
    ".html": _write_text(lambda simulation: render_html([simulated_timeline(simulation)])),
    ".png": lambda simulation, path: render_png([simulated_timeline(simulation)], path),
}


def _list_page(report: ListReport) -> str:
    return "\n".join(report.schedules)


def _page(simulation: Simulation) -> str:
    colour = sys.stdout.isatty()
    drawn = render_text(simulated_timeline(simulation), _NUM_COLUMNS, colour)
    lines = [drawn, "", f"in flight, per rank: {' '.join(map(str, simulation.peak_in_flight))}"]
    staleness = _staleness(simulation.schedule)
    if staleness:
        lines.append(f"staleness, updates per stage at most: {staleness}")
    return "\n".join(lines)


def _staleness(built: Schedule) -> str:
    """How many updates behind their own the weights of each stage's gradients are, at most."""
    return " ".join(
        str(max(built.update_of(m) - version for m, version in enumerate(versions)))
        for versions in built.weight_versions
    )
