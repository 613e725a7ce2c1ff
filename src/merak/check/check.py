"""Check of a model: it must train on dp × tp × pp ranks as it does in one process."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from merak.check.case import Case
from merak.check.compare import OF_KERNELS, TOLERANCE, Disagreement, exact_tolerance
from merak.check.first_divergence import first_divergence, with_equal_microbatches
from merak.check.float64 import computing_in
from merak.check.judge import Comparison, judge
from merak.check.real_widths import RealWidths
from merak.check.reference import with_reference
from merak.check.runs import (
    CheckOptions,
    Job,
    Layout,
    Outcome,
    observe_on_ranks,
    train_in_one_process,
    train_on_ranks,
)
from merak.core.errors import MerakError, TraceError
from merak.core.files.private_files import read_own_file
from merak.core.health.quiet import hide_warnings
from merak.data import signature
from merak.graph.cache.value_file import ValueFile, write_values
from merak.graph.context_parallel.apply import context_parallel
from merak.graph.ir.ir import ModelGraph
from merak.graph.segment.build import build_graph
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.trace.opaque.report import OpaqueModule, report_opaque
from merak.plan.layout import check_stages
from merak.plan.step_plans import StepPlans

logger = logging.getLogger(__name__)


class Launch(Protocol):
    """Launcher that runs a function on new ranks."""

    def __call__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], num_ranks: int
    ) -> Any:
        """Run `function(*arguments)` on `num_ranks` ranks, with torchrun's variables set."""
        ...


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Report of a check.

    Args:
        model: its name.
        ok: whether it trains as in one process.
        loss_max_rel_diff: the largest relative difference of a step's loss; None if none was made.
        gradient_max_rel_diff: of the first step's gradients, each by the largest
            magnitude of its tensor.
        parameter_max_rel_diff: of the parameters after the steps.
        tolerance: the most that is taken for rounding: 1e-5, or what was found where that is more
            and the same check in float64 shows that it is rounding.
        tp_sharded_fraction: fraction of the model's parameters (numbers, not tensors) that are
            split.
        segments: how many segments the model is cut into; 0 if it could not be traced.
        seconds: how long the check took.
        reason: why it is not ok; None if it is.
        evaluation_max_rel_diff: of the outputs of evaluations before, between and after the steps,
            as of gradients; None if nothing was evaluated.
        kept_whole: opaque modules, which ran as one operator each.
        filled: fields of the model's config that it leaves open, and what the check took for them.
        columns: what the batches hold.
        loss: name of the loss function where the model computes no loss; else None.
        real_widths: what tensor parallelism makes of the model at its real widths; None if that
            was not asked for.
    """

    model: str
    ok: bool
    loss_max_rel_diff: float | None
    gradient_max_rel_diff: float | None
    parameter_max_rel_diff: float | None
    tolerance: float
    tp_sharded_fraction: float
    segments: int
    seconds: float
    reason: str | None = None
    evaluation_max_rel_diff: float | None = None
    kept_whole: list[OpaqueModule] = field(default_factory=list)
    filled: dict[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    loss: str | None = None
    real_widths: RealWidths | None = None


def check_model(
    case: Case, layout: Layout, options: CheckOptions | None = None, *, launch: Launch
) -> CheckReport:
    """Train a model in one process and on ranks with the same data, and compare.

    Args:
        case: the model and its batches.
        layout: the degrees.
        options: how long and how to train.
        launch: starts the ranks.

    Returns:
        What was found; a model that cannot be traced is a report, not an error.

    Raises:
        EagerError: the model cannot be trained in one process either.
        MerakError: the degrees or the schedule do not fit.
    """
    started = time.perf_counter()
    job = Job(case, layout, options or CheckOptions())
    job, expected = with_reference(job)
    with tempfile.TemporaryDirectory(prefix="merak-check-") as folder:
        report = check_against(expected, job, Workspace(Path(folder), launch))
    return replace(report, seconds=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Folder and launcher of a check.

    Args:
        folder: for traces, which later checks of the same model find there, and ranks' outcomes.
        launch: starts the ranks.
    """

    folder: Path
    launch: Launch


def check_against(expected: Outcome, job: Job, workspace: Workspace) -> CheckReport:
    """Compare a job on ranks with a reference that is known already, as `check_model` does."""
    started = time.perf_counter()
    report = CheckReport(job.case.name, False, None, None, None, TOLERANCE, 0.0, 0, 0.0)
    try:
        num_stages = _num_stages(job)
        graph = trace_job(job, workspace.folder)
        report = replace(report, segments=len(graph.segments), kept_whole=report_opaque(graph))
        _refuse_misfit(job, graph, num_stages)
        ranks = _train(job, workspace)
        report = replace(report, tp_sharded_fraction=_sharded_fraction(graph, ranks))
        found = judge(job, graph, ranks, expected)
        wrong = None if found.reason is None else _wrong(job, workspace, found, _partition(ranks))
    except (TraceError, Disagreement, _RankFailed) as error:
        return replace(report, reason=str(error), seconds=time.perf_counter() - started)
    is_rounding = found.reason is not None and wrong is None
    where = "" if wrong is None else _where(wrong, workspace)
    return replace(
        report,
        ok=found.reason is None or is_rounding,
        loss_max_rel_diff=found.loss,
        gradient_max_rel_diff=found.gradient,
        parameter_max_rel_diff=found.parameter,
        evaluation_max_rel_diff=found.evaluation,
        tolerance=found.most if is_rounding else TOLERANCE,
        reason=f"{found.reason}{where}" if wrong is not None else None,
        seconds=time.perf_counter() - started,
    )


def _partition(ranks: Sequence[Outcome]) -> tuple[int, ...]:
    """Number of segments of every stage."""
    sizes = {number: size for rank in ranks for number, size in rank.stage_sizes.items()}
    return tuple(size for _, size in sorted(sizes.items()))


def _wrong(
    job: Job, workspace: Workspace, found: Comparison, partition: tuple[int, ...]
) -> Job | None:
    """Return the job whose difference is no rounding; None if there is none in float64.

    A model may enlarge rounding without bounds, as a batch norm over very few numbers does. Stages
    are the same in float64, where balance might cut elsewhere: a mistake may depend on the cut. So
    where float64 has other segments, since experts have other kernels there, these kernels must
    differ in float32 as well.
    """
    exact = replace(job, dtype=torch.float64)
    try:
        graph = trace_job(exact, workspace.folder)
        if sum(partition) != len(graph.segments):
            known, partition = _compare(replace(job, has_batched_experts=True), workspace)
            if not found.most <= OF_KERNELS * max(known.most, TOLERANCE):
                return job
        if sum(partition) == len(graph.segments):
            exact = replace(exact, partition=partition)
        found, _ = _compare(exact, workspace, exact_tolerance(found.most))
    except Exception as error:  # a model that knows no float64: then there is no excuse
        logger.info("%s cannot be checked in float64: %s", job.case.name, error)
        return job
    return None if found.reason is None else exact


def _compare(
    job: Job, workspace: Workspace, tolerance: float = TOLERANCE
) -> tuple[Comparison, tuple[int, ...]]:
    """Train a job on ranks and in one process, and compare; with the partition of the ranks."""
    graph, ranks = trace_job(job, workspace.folder), _train(job, workspace)
    found = judge(job, graph, ranks, train_in_one_process(job), tolerance)
    return found, _partition(ranks)


def _where(job: Job, workspace: Workspace) -> str:
    """Describe the first divergence from one process in a sentence; "" if unknown."""
    again = with_equal_microbatches(job)
    try:
        graph = trace_job(again, workspace.folder)
        ranks = _on_ranks(observe_on_ranks, again, workspace)
        return f" Run again with equal microbatches, {first_divergence(again, graph, ranks)}."
    except Exception as error:  # what was found stands without it
        logger.info("The first divergence of %s was not found: %s", job.case.name, error)
        return ""


def trace_job(job: Job, folder: Path) -> ModelGraph:
    """Trace the job's graphs, those of its evaluations too, into a folder that ranks share.

    Raises:
        TraceError: it cannot be traced.
    """
    device = job.options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    source, sample = job.source(torch.device(device), folder), job.sample()
    with computing_in(job.dtype):
        graph = build_graph(source, sample, training=True)
        for batch in job.evaluation_batches() if job.options.evaluate else ():
            build_graph(source, dict(signature(batch).columns), training=False)
    return graph


def _num_stages(job: Job) -> int:
    """Number of stages of the job's schedule.

    Raises:
        ScheduleError: there is none for its counts.
    """
    plans = StepPlans(job.options.schedule, job.layout.pp, job.options.num_microbatches)
    return plans.base.schedule.num_stages


def _refuse_misfit(job: Job, graph: ModelGraph, num_stages: int) -> None:
    """Refuse degrees or a schedule that do not fit, before ranks start.

    Raises:
        PlanError, ShardError: they do not.
    """
    layout = job.layout
    check_stages(graph, num_stages, layout.pp)
    tensor = tensor_parallel(graph, None, layout.tp, ep=layout.ep)
    if layout.cp > 1:
        context_parallel(graph, tensor if layout.tp > 1 else None, layout.cp)


class _RankFailed(Exception):
    """Failure of a rank before the end of its steps; the message says why."""


Work = Callable[[Job, Path], Any]
"""Function that every rank runs for a job, with the folder of its traces."""


def _train(job: Job, workspace: Workspace) -> list[Outcome]:
    found: list[Outcome] = _on_ranks(train_on_ranks, job, workspace)
    return found


def _on_ranks(work: Work, job: Job, workspace: Workspace) -> list[Any]:
    """Run a function on ranks and return the results, by rank.

    Raises:
        _RankFailed: a rank failed.
    """
    files = [workspace.folder / f"outcome-{rank}.values" for rank in range(job.layout.num_ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    try:
        workspace.launch(run_rank, (work, job, workspace.folder), job.layout.num_ranks)
    except MerakError:
        raise
    except Exception as error:
        logger.error("%s", error)
        raise _RankFailed(_last_line(error)) from error
    found = [ValueFile(read_own_file(file))["outcome"] for file in files]
    for outcome in found:
        if isinstance(outcome, str):
            raise _RankFailed(outcome)
    return found


def run_rank(work: Work, job: Job, folder: Path) -> None:
    """Run a function on this rank and write its result, or the message of a `TraceError`."""
    outcome: Any
    hide_warnings()  # which the process that computes the reference has shown
    try:
        outcome = work(job, folder)
    except TraceError as error:
        outcome = str(error)
    rank = os.environ.get("RANK", "0")
    (folder / f"outcome-{rank}.values").write_bytes(write_values({"outcome": outcome}))


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"a rank failed: {lines[-1] if lines else type(error).__name__}"


def _sharded_fraction(graph: ModelGraph, ranks: list[Outcome]) -> float:
    sizes = {name: meta.num_bytes for name, meta in graph.parameters.items()}
    split = {name for rank in ranks for name in rank.shards}
    total = sum(sizes.values())
    return sum(sizes[name] for name in split) / total if total else 0.0
