"""`merak report`: one page about a run, from what it has recorded."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merak.cli.options import argument, json_output, option, takes
from merak.cli.output import show

if TYPE_CHECKING:
    from merak.cli.report.advice import Advice
    from merak.cli.report.study import StepStudy
    from merak.record.run import RunRecord

PAGE = "report.html"
"""File of the page, in the folder of the record."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Figures of a pp rank.

    Args:
        rank: the pp rank.
        busy: fraction of the measured step in which it computes; None without one.
        idle: fractions in which it is idle, by cause.
        memory_bytes: that it has held at most, of the process on a CPU; None where unknown.
        forecast_bytes: of its tensors; None where there is none.
    """

    rank: int
    busy: float | None
    idle: dict[str, float]
    memory_bytes: int | None
    forecast_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Report of a run.

    Args:
        run: its folder.
        page: the page that was written.
        model: name of its class.
        degrees: of the mesh by axis.
        step: of the last log; 0 before the first.
        loss: of the last log; None before the first.
        step_seconds: median over the logs; None where it is not known.
        tokens_per_second: as of the step's seconds.
        mfu: as of the step's seconds.
        bubble: as of the step's seconds.
        expected_step_seconds: of a step's computation, before the run; None where unknown.
        ranks: figures of every pp rank.
        critical_path: actions of the measured step that lead to its last one.
        advice: what was found, what to try, and the fraction of a step that it gains.
    """

    run: str
    page: str
    model: str
    degrees: dict[str, int]
    step: int
    loss: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    bubble: float | None
    expected_step_seconds: float | None
    ranks: list[RankReport]
    critical_path: list[str]
    advice: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """Request for the page of a run."""

    run: Path = argument(MISSING, "RUN", "The output_dir of a training run, also one that runs.")
    output: Path | None = option(
        None, "--output", "FILE", f"The page; by default _merak/{PAGE} in the folder of the run."
    )
    as_json: bool = json_output()


@takes(ReportRequest)
def report(request: ReportRequest) -> None:
    """Write a page about a run: layout, a measured step, loss, memory, and what to try.

    The page is one HTML file that loads nothing from elsewhere.
    """
    from merak.cli.page.html import write_document
    from merak.cli.report.advice import advise
    from merak.cli.report.page import run_page
    from merak.cli.report.study import study_step
    from merak.record.files import read_run, record_folder

    run = read_run(request.run)
    study = study_step(run)
    advice = advise(run, study)
    path = request.output or record_folder(request.run) / PAGE
    write_document(path, run_page(run, study, advice, str(request.run)))
    found = _report(run, study, advice, request.run, path)
    show(found, _page, request.as_json)


def _report(
    run: RunRecord, study: StepStudy | None, advice: tuple[Advice, ...], folder: Path, page: Path
) -> RunReport:
    from merak.cli.report.study import typical

    last = run.logs[-1] if run.logs else None
    medians = {
        name: typical(run.logs, name)
        for name in ("step_seconds", "tokens_per_second", "mfu", "bubble")
    }
    critical = () if study is None else study.critical
    return RunReport(
        run=str(folder),
        page=str(page),
        model=run.job.model,
        degrees=run.job.degrees,
        step=0 if last is None else last.step,
        loss=None if last is None else last.figures.get("loss"),
        **medians,
        expected_step_seconds=None if study is None else study.expected_s,
        ranks=[_rank(run, study, rank) for rank in range(run.job.degrees["pp"])],
        critical_path=[str(action) for action in critical],
        advice=[asdict(own) for own in advice],
    )


def _rank(run: RunRecord, study: StepStudy | None, rank: int) -> RankReport:
    held = [log.memory_bytes[rank] for log in run.logs if rank < len(log.memory_bytes)]
    shares = {} if study is None else study.shares(rank)
    return RankReport(
        rank=rank,
        busy=None if study is None else round(study.busy(rank), 4),
        idle={cause.value: round(share, 4) for cause, share in shares.items()},
        memory_bytes=max((own for own in held if own is not None), default=None),
        forecast_bytes=run.job.memory[rank].peak_bytes if run.job.memory else None,
    )


def _page(found: RunReport) -> str:
    lines = [f"{found.model}: {_figures(found)}"]
    lines += [f"  - {own['what']} {own['do']}{_gain(own['gain'])}" for own in found.advice]
    return "\n".join((*lines, f"the page is in {found.page}"))


def _figures(found: RunReport) -> str:
    from merak.cli.report.advice import milliseconds, percent

    parts = [f"step {found.step}"]
    if found.loss is not None:
        parts.append(f"loss {found.loss:.4g}")
    if found.step_seconds is not None:
        parts.append(f"{milliseconds(found.step_seconds)} a step")
    if found.tokens_per_second is not None:
        parts.append(f"{found.tokens_per_second:,.0f} tokens/s")
    if found.mfu is not None:
        parts.append(f"MFU {100 * found.mfu:.3g} %")
    if found.bubble is not None:
        parts.append(f"bubble {percent(found.bubble)}")
    return ", ".join(parts)


def _gain(gain: float | None) -> str:
    return "" if gain is None else f" About {100 * gain:.0f} % of a step."
