"""`merak schedule`: a pipeline schedule, checked, simulated and drawn."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from merak.cli.options import argument, option, read_pair, takes, words
from merak.cli.output import lines_of, show
from merak.cli.schedule_of_model import StagesRequest, simulate_model
from merak.core.errors import ScheduleError
from merak.core.units import counted, seconds
from merak.plan.cost.overlap import Layers, layer_costs
from merak.schedule import registry
from merak.schedule.costs import Costs, uniform
from merak.schedule.ir import Schedule
from merak.schedule.render.svg import render_html, render_svg
from merak.schedule.render.text import render_text
from merak.schedule.serialize import load, to_json, to_text
from merak.schedule.simulator.simulate import Simulation, simulate
from merak.schedule.simulator.timeline import simulated_timeline
from merak.schedule.validate.schedule import check, check_in_flight

_USUAL_COLUMNS = 160
"""Columns of a picture that goes to no terminal."""
_MOST_FORWARDS = 2**17
"""Stages × microbatches; beyond, a command would run for minutes."""
_MOST_RANKS = 2**11
_LONG_S = 2.0
"""Seconds of work above which it is announced."""
_SECONDS_PER_FORWARD = 1e-4
_SECONDS_PER_PAIR = 2.5e-6


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """Report of one simulated schedule.

    Args:
        name: of the schedule; where it is not the requested one, `notes` say why.
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
        partition: segments of the stages of a model; empty for stages of given times.
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
    partition: list[int]


@dataclass(frozen=True, slots=True)
class ListReport:
    """Report of all schedules.

    Args:
        schedules: their names.
        summaries: what each does, by its name.
    """

    schedules: list[str]
    summaries: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest(StagesRequest):
    """Request for a schedule of equal stages, or of a model's."""

    name: str | None = argument(
        None, "NAME", "A schedule's name, or a file with one.", **words(registry.names())
    )
    list_names: bool = option(False, "--list", "", "List the schedules, a line each, and end.")
    stages: int | None = option(
        None,
        "--stages",
        "P",
        "Pipeline degree: number of pp ranks. Interleaved and V-shaped schedules put several "
        "smaller stages on each.",
    )
    microbatches: int | None = option(None, "--microbatches", "M", "Per iteration.")
    forward: float = option(1.0, "--forward", "", "Time of a stage's forward.")
    backward: float = option(2.0, "--backward", "", "Of its backward; I and W take half each.")
    recompute: float = option(1.0, "--recompute", "", "Of recomputing it, where that is done.")
    transfer: float = option(0.0, "--transfer", "", "Of sending one result to another rank.")
    all_reduce: float = option(
        0.0,
        "--all-reduce",
        "T",
        "Of the tensor parallel all-reduces of a stage, beside its forward's, its backward's and "
        "its recomputation's own time.",
    )
    layers: int = option(1, "--layers", "K", "Layers of a stage, with an all-reduce each.")
    in_halves: bool = option(
        False, "--in-halves", "", "Overlap all-reduces: microbatches run as two sub-microbatches."
    )
    memory_limit: float | None = option(
        None, "--memory-limit", "K", "Most microbatches in flight on a rank."
    )
    options: list[str] | None = option(
        None, "--option", "KEY=VALUE", "Of the schedule itself; repeatable."
    )
    output: Path | None = option(
        None, "--output", "", "Also write it: .txt or .json to run, .svg or .html to look at."
    )

    @property
    def times(self) -> dict[str, float]:
        """The arguments of `uniform` but the number of stages."""
        return {
            "forward_s": self.forward,
            "backward_s": self.backward,
            "recompute_s": self.recompute,
            "transfer_s": self.transfer,
        }


@takes(ScheduleRequest)
def schedule(request: ScheduleRequest) -> None:
    """Build a pipeline schedule, check it, simulate it and draw it."""
    if request.list_names:
        names = list(registry.names())
        found = ListReport(names, {name: registry.summary(name) for name in names})
        show(found, lambda own: lines_of(own.summaries), request.as_json)
        return
    simulation, partition = _simulated(request)
    for note in simulation.schedule.notes:
        print(f"merak: {note}", file=sys.stderr)
    if request.output is not None:
        _write(simulation, request.output)
    show(report(simulation, partition), lambda own: _page(simulation, own), request.as_json)


def _simulated(request: ScheduleRequest) -> tuple[Simulation, tuple[int, ...]]:
    """The simulation, and the segments of the stages of a model."""
    if request.model is None and (request.device or request.cluster):
        raise ScheduleError(
            f"--{'device' if request.device else 'cluster'} needs work to price; name --model too."
        )
    return (simulated(request), ()) if request.model is None else _simulated_model(request)


def _simulated_model(request: ScheduleRequest) -> tuple[Simulation, tuple[int, ...]]:
    name, stages, microbatches = request.name, request.stages, request.microbatches
    if name is None or stages is None or microbatches is None:
        raise ScheduleError("--model needs a schedule's NAME, --stages P and --microbatches M.")
    _refuse_times(request)
    options = dict(read_pair("--option", own) for own in request.options or ())
    _announce_duration(stages, microbatches)
    simulation, partition = simulate_model(request, name, stages, microbatches, options)
    if request.memory_limit is not None:
        check_in_flight(simulation.schedule, request.memory_limit)
    return simulation, partition


def _refuse_times(request: ScheduleRequest) -> None:
    """Refuse options that say what stages take, which a model says by itself."""
    defaults = {own.name: own.default for own in fields(request)}
    for name in (*request.times, "all_reduce", "layers", "in_halves"):
        name = name.removesuffix("_s")
        if getattr(request, name) != defaults[name]:
            flag = "--" + name.replace("_", "-")
            raise ScheduleError(f"{flag} and --model both say what stages take; leave one out.")


def simulated(request: ScheduleRequest) -> Simulation:
    """Build or read a schedule, check it, and simulate it with equal stages.

    Args:
        request: the schedule; a file may leave the numbers of stages and microbatches open.

    Raises:
        ScheduleError: the request makes no sense, or the schedule does not fit the limit.
    """
    name, stages, microbatches = request.name, request.stages, request.microbatches
    if name is None:
        raise ScheduleError(f"Give a schedule's NAME: one of {', '.join(registry.names())}.")
    values = dict(read_pair("--option", own) for own in request.options or ())
    if registry.is_file(name):
        read = load(Path(name))
        stages = read.num_ranks if stages is None else stages
        microbatches = read.num_microbatches if microbatches is None else microbatches
    if stages is None or microbatches is None:
        if not registry.is_file(name):
            registry.options(name)  # which refuses a name that there is not
        raise ScheduleError(f"{name} needs --stages P and --microbatches M.")
    if registry.takes_costs(name):
        values |= {"costs": _costs(stages, request) if stages > 0 else None}
        if request.memory_limit is not None:
            values["memory_limit_bytes"] = request.memory_limit
    _announce_duration(stages, microbatches)
    built = registry.resolve(name, stages, microbatches, **values)
    check(built)
    if request.memory_limit is not None:
        check_in_flight(built, request.memory_limit)
    return simulate(built, _costs(built.num_stages, request))


def _announce_duration(stages: int, microbatches: int) -> None:
    """Refuse sizes that would run for minutes, and say how long those take that run for seconds."""
    registry.check_size(stages, microbatches, _MOST_RANKS, _MOST_FORWARDS)
    about = stages * microbatches * _SECONDS_PER_FORWARD + stages**2 * _SECONDS_PER_PAIR
    if about > _LONG_S:
        print(
            f"merak: {counted(stages, 'stage')} × {counted(microbatches, 'microbatch')} take about "
            f"{about:.0f} s to lay "
            "out, check and simulate; schedules with several stages on a rank a few times that.",
            file=sys.stderr,
        )


def report(simulation: Simulation, partition: Sequence[int] = ()) -> ScheduleReport:
    """Make the report that `--json` prints.

    Args:
        simulation: of the schedule.
        partition: segments of the stages of a model.
    """
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
        partition=list(partition),
    )


def _costs(num_stages: int, request: ScheduleRequest) -> Costs:
    """Make the costs of equal stages of equal layers, with their tensor parallel all-reduces."""
    costs = uniform(num_stages, **request.times)
    if request.layers < 1 or not request.all_reduce >= 0:
        raise ScheduleError(
            f"--layers {request.layers} --all-reduce {request.all_reduce:g} is no stage; give 1 "
            "layer or more, and a time of 0 or more."
        )
    count, all_reduce_s = request.layers, request.all_reduce / request.layers
    forward_s, backward_s = request.forward / count, request.backward / count
    layers = Layers(count, forward_s, all_reduce_s, backward_s, request.recompute / count)
    return layer_costs(
        (layers,) * num_stages,
        request.in_halves,
        links=costs.links,
        checkpoint_bytes=costs.checkpoint_bytes,
    )


def _write(simulation: Simulation, path: Path) -> None:
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        raise ScheduleError(
            f"{path} has no suffix that can be written; use {', '.join(sorted(_WRITERS))}."
        )
    try:
        path.write_text(writer(simulation), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path} cannot be written: {error.strerror}.") from error


_WRITERS: dict[str, Callable[[Simulation], str]] = {
    ".txt": lambda simulation: to_text(simulation.schedule),
    ".json": lambda simulation: to_json(simulation.schedule),
    ".svg": lambda simulation: render_svg([simulated_timeline(simulation)]),
    ".html": lambda simulation: render_html([simulated_timeline(simulation)]),
}


def _page(simulation: Simulation, own: ScheduleReport) -> str:
    colour = sys.stdout.isatty()
    columns = shutil.get_terminal_size((_USUAL_COLUMNS, 0)).columns
    drawn = render_text(simulated_timeline(simulation), columns, colour)
    lines = [drawn, "", f"in flight, per rank: {' '.join(map(str, simulation.peak_in_flight))}"]
    if own.partition:
        lines.append(
            f"segments of the stages: {' '.join(map(str, own.partition))}; an iteration takes "
            f"{seconds(own.makespan)}"
        )
    staleness = _staleness(simulation.schedule)
    if staleness:
        lines.append(f"staleness, updates per stage at most: {staleness}")
    return "\n".join(lines)


def _staleness(built: Schedule) -> str:
    """Return per stage how many updates its weights lag behind its gradients, at most."""
    return " ".join(
        str(max(built.update_of(m) - version for m, version in enumerate(versions)))
        for versions in built.weight_versions
    )
