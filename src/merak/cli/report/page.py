"""Page of a run: advice, layout, a step, loss and throughput, memory."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from html import escape

from merak.cli.page.html import document, table
from merak.cli.report import charts, picture, timeline
from merak.cli.report.advice import Advice, milliseconds, percent
from merak.cli.report.study import StepStudy, typical
from merak.cli.report.timeline import idle_table, meanings, timelines
from merak.core.units import count, counted
from merak.record.run import JobRecord, RunRecord

_STYLE = """
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0 0}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 14px;
min-width:104px}
.tiles b{display:block;font-size:18px;font-weight:600}.tiles span{font-size:12px;color:var(--quiet)}
ol.advice{padding-left:20px;max-width:85ch}ol.advice li{margin:0 0 12px}
ol.advice .gain{color:var(--good);font-weight:600}
details{margin-top:28px}summary{cursor:pointer;color:var(--quiet)}
"""


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
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(_where(run, name))}</p>',
        _tiles(run, study),
        f"<h2>What to try</h2>{_advice(advice, study)}",
        f"<h2>What runs where</h2>{picture.picture(job)}",
        f"<h2>A step</h2>{_step(run, study)}",
        f"<h2>Loss and throughput</h2>{_charts(run)}",
        f"<h2>Memory of every pp rank</h2>{charts.memory_bars(job, run.logs)}",
        _details(job),
    ]
    return document(title, body, _STYLE + picture.STYLE + timeline.STYLE + charts.STYLE)


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


def _tiles(run: RunRecord, study: StepStudy | None) -> str:
    parts = [
        f"<div><b>{escape(value)}</b><span>{what}</span></div>"
        for value, what in _figures(run, study)
    ]
    return f'<div class="tiles">{"".join(parts)}</div>' if parts else ""


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


def _advice(advice: Sequence[Advice], study: StepStudy | None) -> str:
    if not advice:
        if study is None:
            return "<p>There is no measured step to advise from; see below.</p>"
        return "<p>Nothing in the measured step or the memory would gain 3 % or more.</p>"
    parts = []
    for own in advice:
        gain = ""
        if own.gain is not None:
            gain = f' <span class="gain">About {percent(own.gain)} of a step.</span>'
        parts.append(f"<li>{escape(own.what)} {escape(own.do)}{gain}</li>")
    note = (
        '<p class="quiet">Gains are simulated with the measured times of this run\'s stages. They '
        "do not add up.</p>"
    )
    return f'<ol class="advice">{"".join(parts)}</ol>{note}'


def _step(run: RunRecord, study: StepStudy | None) -> str:
    if study is None:
        return (
            "<p>No step was measured: training ended before its second log and by an error, or its "
            "steps had no microbatch. Train until a second log, or set a smaller "
            "logging_steps.</p>"
        )
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
    return (
        f"<p>{escape(text)}. The critical path is outlined: each of its actions waited for the one "
        f"before it.</p>{timelines(study)}{idle_table(study)}{meanings()}"
    )


def _charts(run: RunRecord) -> str:
    if not run.logs:
        return (
            "<p>Nothing was logged yet: training logs every logging_steps steps, and logs nothing "
            "with logging_strategy='no'.</p>"
        )

    def plain(value: float) -> str:
        return f"{value:.4g}"

    def whole(value: float) -> str:
        return f"{value:,.0f}"

    def share(value: float) -> str:
        return f"{100 * value:.3g} %"

    drawn = [
        charts.chart(run.logs, "loss", "loss", plain),
        charts.chart(run.logs, "tokens_per_second", "tokens/s", whole),
        charts.chart(run.logs, "step_seconds", "time of a step", milliseconds),
        charts.chart(run.logs, "bubble", "bubble", share),
        charts.chart(run.logs, "mfu", "MFU", share),
        charts.chart(run.logs, "learning_rate", "learning rate", plain),
        charts.chart(run.logs, "grad_norm", "gradient norm", plain),
    ]
    return f'<div class="charts">{"".join(drawn)}</div>'


def _details(job: JobRecord) -> str:
    rows = [
        ("schedule", job.schedule.name),
        ("microbatches of a replica", f"{job.schedule.num_microbatches}"),
        ("microbatch", " × ".join(map(str, job.microbatch))),
        ("FLOPs of a microbatch", f"{job.flops:.3g}"),
    ]
    if job.peak_flops_per_s is not None:
        rows.append(("peak of a device", f"{job.peak_flops_per_s:.3g}/s ({job.peak_source})"))
    rows += sorted(job.options.items())
    rows += sorted(job.versions.items())
    return f"<details><summary>All settings and versions</summary>{table(('', ''), rows)}</details>"
