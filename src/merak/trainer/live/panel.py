"""Panel of a running job: its layout, progress, figures, and memory of every pp rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from merak.core.units import count, counted, ranges, size
from merak.engine.health.figures import Figures
from merak.plan.summary import first_to_last
from merak.record.run import JobRecord
from merak.trainer.live.lines import duration, percent, shown

_FIRST = ("loss", "learning_rate", "grad_norm")
_SECOND = ("tokens_per_second", "step_seconds", "mfu", "bubble")
_MOST_ROWS = 12
"""Rows of pp ranks; a longer pipeline shows the first and the last of them."""

_WIDEST = 110


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of training or of an evaluation inside it.

    Args:
        step: done so far.
        steps: of all; 0 where it is not known.
        left_s: seconds that the rest will take; None where it is not known.
        evaluation: text about a running evaluation; empty for none.
    """

    step: int = 0
    steps: int = 0
    left_s: float | None = None
    evaluation: str = ""


@dataclass(frozen=True, slots=True)
class JobPanel:
    """Panel of a job; rich draws it at the width of the terminal.

    Args:
        job: as it was laid out; None where that is not known.
        progress: of the job.
        logs: the last training log.
        figures: of the job, at that log.
        next_log: what to say until the first log.
    """

    job: JobRecord | None
    progress: Progress
    logs: Mapping[str, Any] = field(default_factory=dict)
    figures: Figures = field(default_factory=Figures)
    next_log: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel."""
        width = min(options.max_width, _WIDEST)
        parts: list[RenderableType] = [_bar(self.progress)]
        lines = [_figures(self.logs, names) for names in (_FIRST, _SECOND)]
        parts += [line for line in lines if line.plain]
        if not self.logs and self.next_log:
            parts.append(Text(self.next_log, style="dim"))
        if self.job is not None and (self.job.memory or self.figures.memory_bytes):
            parts += [Text(""), _ranks(self.job, self.figures)]
        yield Panel(
            Group(*parts), title=_title(self.job), title_align="left", width=width, padding=(0, 1)
        )


def _title(job: JobRecord | None) -> str:
    if job is None:
        return "training"
    degrees = [f"{axis} {job.degrees[axis]}" for axis in ("dp", "tp", "pp")]
    degrees += [f"{axis} {job.degrees[axis]}" for axis in ("cp", "ep") if job.degrees[axis] > 1]
    return (
        f"[bold]{job.model}[/], {count(job.parameters)} parameters, {' × '.join(degrees)} on "
        f"{counted(job.num_ranks, 'rank')}"
    )


def _bar(progress: Progress) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    total = f" of {progress.steps:,}" if progress.steps else ""
    left = "" if progress.left_s is None else f"{duration(progress.left_s)} left"
    table.add_row(
        f"step {progress.step:,}{total}",
        ProgressBar(total=progress.steps or None, completed=progress.step),
        progress.evaluation or left,
    )
    return table


def _figures(logs: Mapping[str, Any], names: tuple[str, ...]) -> Text:
    known = [name for name in names if isinstance(logs.get(name), int | float)]
    return Text("   ".join(shown(name, logs[name]) for name in known))


def _ranks(job: JobRecord, figures: Figures) -> RenderableType:
    """A row for each pp rank: its ranks, segments, and memory against the forecast."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    pipelined = job.degrees["pp"] > 1
    for name in ("ranks", "segments"):
        table.add_column(name, no_wrap=True)
    table.add_column("")  # of names, which alone give way where the terminal is narrow
    busy = ("busy",) if pipelined else ()
    for name in (*busy, "memory" if job.on_gpu else "process", "forecast"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in _chosen(job.degrees["pp"]):
        if rank is None:
            table.add_row("…")
            continue
        table.add_row(*_row(job, figures, rank, pipelined))
    return table


def _chosen(pp: int) -> Iterator[int | None]:
    """Pp ranks that have a row; None for those left out between them."""
    if pp <= _MOST_ROWS:
        yield from range(pp)
        return
    yield from range(_MOST_ROWS - 1)
    yield None
    yield pp - 1


def _row(job: JobRecord, figures: Figures, rank: int, pipelined: bool) -> list[str | Text]:
    indices = sorted(i for stage in job.schedule.stages_of(rank) for i in job.stages[stage])
    names = [job.segments[index].name for index in indices]
    forecast = job.memory[rank].peak_bytes if job.memory else None
    used = figures.memory_bytes[rank] if rank < len(figures.memory_bytes) else None
    busy = [percent(figures.busy[rank]) if rank < len(figures.busy) else ""] if pipelined else []
    over = job.on_gpu and used is not None and forecast is not None and used > 1.1 * forecast
    return [
        ranges(list(job.ranks_of(rank))),
        ranges(indices),
        Text(first_to_last(names) if names else "", no_wrap=True, overflow="ellipsis"),
        *busy,
        Text("" if used is None else size(used), style="bold red" if over else ""),
        "" if forecast is None else size(forecast),
    ]
