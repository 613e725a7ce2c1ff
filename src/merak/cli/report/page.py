"""Page of a run: advice, layout, a step, loss and throughput, memory."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from merak.cli.page.html import document, part
from merak.cli.report import charts, picture, timeline
from merak.cli.report.advice import Advice, milliseconds, percent
from merak.cli.report.study import StepStudy, typical
from merak.core.units import count, counted
from merak.record.run import JobRecord, RunRecord


def run_page(run: RunRecord, study: StepStudy | None, advice: Sequence[Advice], name: str) -> str:
    """Make the page of a run, which loads nothing from elsewhere.

    Args:
        run: its record.
        study: of a typical step; None where none was measured.
        advice: about the run.
        name: of its folder.
    """
    job = run.job
    title = f"{job.model}: {_degrees(job)} on {counted(job.num_ranks, 'rank')}"
    body = part(
        "run",
        title=title,
        where=_where(run, name),
        tiles=list(_figures(run, study)),
        advice=[
            (f"{own.what} {own.do}", "" if own.gain is None else percent(own.gain))
            for own in advice
        ],
        study=study,
        mesh=picture.picture(job),
        step=None if study is None else timeline.drawn_step(study, _step(run, study)),
        charts=_charts(run) if run.logs else None,
        memory=charts.memory_bars(job, run.logs),
        details=_details(job),
    )
    return document(title, [body], timeline.variables())


def _degrees(job: JobRecord) -> str:
    axes = ["dp", "tp", "pp", *(axis for axis in ("cp", "ep") if job.degrees[axis] > 1)]
    return " × ".join(f"{axis} {job.degrees[axis]}" for axis in axes)


def _where(run: RunRecord, name: str) -> str:
    job = run.job
    hosts = len(set(job.hosts)) or 1
    parts = [name, f"{job.device}, {counted(hosts, 'host')}", f"{count(job.parameters)} parameters"]
    if run.logs:
        when = datetime.datetime.fromtimestamp(run.logs[-1].time_s)
        parts.append(f"last log at step {run.logs[-1].step:,}, {when:%Y-%m-%d %H:%M}")
    return " · ".join(parts)


def _figures(run: RunRecord, study: StepStudy | None) -> Iterator[tuple[str, str]]:
    """Figures of the whole run: medians over its logs, and the last loss."""
    logs = run.logs
    losses = [log.figures["loss"] for log in logs if "loss" in log.figures]
    if losses:
        yield f"{losses[-1]:.4g}", "loss, last log"
    step_s = typical(logs, "step_seconds")
    if step_s is not None:
        yield milliseconds(step_s), "a step"
    elif study is not None:
        yield milliseconds(study.period_s), "a step"
    rate = typical(logs, "tokens_per_second")
    if rate is not None:
        yield f"{rate:,.0f}", "tokens/s"
    mfu = typical(logs, "mfu")
    if mfu is not None:
        yield f"{100 * mfu:.3g} %", "MFU"
    bubble = typical(logs, "bubble")
    if bubble is not None:
        yield percent(bubble), "bubble"
    if study is not None and study.expected_s is not None:
        yield milliseconds(study.expected_s), "computation of a step, expected"


def _step(run: RunRecord, study: StepStudy) -> str:
    step = study.step
    text = (
        f"Step {step.step + 1}, of median length among {len(run.steps)} measured ones: "
        f"{milliseconds(step.pipeline_s)} from its beginning to the last action"
    )
    if study.reduction_s > 0:
        text += f", {milliseconds(study.reduction_s)} more until gradients are reduced"
    if study.outside_s:
        text += f", {milliseconds(study.outside_s)} until the next step begins"
    if run.job.degrees["dp"] * run.job.degrees["tp"] * run.job.degrees.get("cp", 1) > 1:
        text += ". The rows are the pipeline of rank 0"
    return text


def _charts(run: RunRecord) -> list[Markup]:
    def share(value: float) -> str:
        return f"{100 * value:.3g} %"

    drawn = (
        charts.chart(run.logs, "loss", "loss", "{:.4g}".format),
        charts.chart(run.logs, "tokens_per_second", "tokens/s", "{:,.0f}".format),
        charts.chart(run.logs, "step_seconds", "time of a step", milliseconds),
        charts.chart(run.logs, "bubble", "bubble", share),
        charts.chart(run.logs, "mfu", "MFU", share),
        charts.chart(run.logs, "learning_rate", "learning rate", "{:.4g}".format),
        charts.chart(run.logs, "grad_norm", "gradient norm", "{:.4g}".format),
    )
    return [own for own in drawn if own is not None]


def _details(job: JobRecord) -> list[tuple[str, str]]:
    rows = [
        ("schedule", job.schedule.name),
        ("microbatches of a replica", f"{job.schedule.num_microbatches}"),
        ("microbatch", " × ".join(map(str, job.microbatch))),
        ("FLOPs of a microbatch", f"{job.flops:.3g}"),
    ]
    if job.peak_flops_per_s is not None:
        rows.append(("peak of a device", f"{job.peak_flops_per_s:.3g}/s ({job.peak_source})"))
    return [*rows, *sorted(job.options.items()), *sorted(job.versions.items())]
