"""`merak train`: one training run from a recipe."""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, replace

from merak.cli.options import argument, backend, device, json_output, option, takes, words
from merak.cli.output import show, stdout_to_stderr
from merak.cli.recipe.ready import READY
from merak.cli.recipe.report import DryRunReport, TrainReport
from merak.core.units import counted


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """Request to train as a recipe says."""

    recipe: str = argument(
        MISSING,
        "RECIPE",
        "A recipe (.yaml), or the name of one of `merak recipes`.",
        **words(READY),
    )
    overrides: list[str] | None = argument(
        None, "[FIELD=VALUE]...", "Changes of fields, such as arguments.learning_rate=1e-4."
    )
    max_restarts: int = option(
        0,
        "--max-restarts",
        "N",
        "How often all ranks are started again after a fault; implies --resume.",
    )
    resume: bool = option(
        False, "--resume", "", "Go on from the newest valid checkpoint in output_dir, if any."
    )
    dry_run: bool = option(
        False, "--dry-run", "", "Check the recipe and say what would start, and start nothing."
    )
    backend: str | None = backend()
    device: str | None = device()
    as_json: bool = json_output()


@takes(TrainRequest)
def train(request: TrainRequest) -> None:
    """Train a model as a recipe says, on as many ranks as its degrees need.

    Starts the ranks on this machine, or joins those that torchrun started.
    """
    from merak.cli.recipe.job import Job, check_job, described, fetched, num_ranks, run_job
    from merak.cli.recipe.layout_check import check_layout
    from merak.cli.recipe.recipe import read_recipe
    from merak.core.announce import announce, show_announcements
    from merak.core.health import failure
    from merak.launch.ranks import Work, run_ranks, under_torchrun

    _refuse_dry_rank(request)
    if under_torchrun():
        failure.install()  # of all ranks, the first to fail is the one that reports
    with stdout_to_stderr():
        max_restarts = _max_restarts(request)
        resumes = request.resume or max_restarts > 0
        recipe = read_recipe(request.recipe, request.overrides or ())
        job = Job(recipe, request.backend, request.device, resumes)
        if not under_torchrun():
            check_job(job)  # once, and before ranks are started
        ranks = num_ranks(job)
        if ranks > 1 and not under_torchrun():
            check_layout(request.recipe, recipe)
        planned = described(job) if request.dry_run else None
    if planned is not None:
        show(planned, _dry_page, request.as_json)
        return
    with stdout_to_stderr():
        job = replace(job, recipe=fetched(recipe))
        if under_torchrun() or (ranks == 1 and not max_restarts):
            report = run_job(job)
        else:
            show_announcements()
            announce("starting %d ranks …", ranks)
            report = run_ranks(Work(run_job, (job,)), ranks, max_restarts)
    if report is not None:
        show(report, _page, request.as_json)


def _max_restarts(request: TrainRequest) -> int:
    """The number of restarts, of this command or of the torchrun that has started this rank.

    Raises:
        CommandError: it is negative, or given to a rank of torchrun's.
    """
    from merak.core.errors import CommandError

    given = request.max_restarts
    if given < 0:
        raise CommandError(f"--max-restarts {given} is no number of restarts; use 0 or more.")
    if "RANK" not in os.environ:
        return given
    if given:
        raise CommandError(
            f"torchrun has started this rank, so torchrun restarts it: give --max-restarts {given} "
            "to torchrun."
        )
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def _refuse_dry_rank(request: TrainRequest) -> None:
    from merak.core.errors import CommandError
    from merak.launch.ranks import under_torchrun

    if request.dry_run and under_torchrun():
        raise CommandError(
            "--dry-run starts no ranks, and torchrun has started this one; run `merak train … "
            "--dry-run` by itself."
        )


def _dry_page(report: DryRunReport) -> str:
    degrees = ", ".join(
        f"{axis}={'as planned' if degree is None else degree}"
        for axis, degree in report.degrees.items()
    )
    begins = "anew" if report.checkpoint is None else f"from {report.checkpoint}"
    return "\n".join(
        (
            f"{report.model} with {report.parameters:,} parameters, on data of {report.data}",
            f"{counted(report.ranks, 'rank')} on {report.device}: {degrees}",
            f"begins {begins}; results go to {report.output_dir}",
            "nothing was started",
        )
    )


def _page(report: TrainReport) -> str:
    held_out = "" if report.eval_loss is None else f", {report.eval_loss:.4f} on held-out samples"
    tokens = report.tokens_per_second
    speed = "" if tokens is None else f", {tokens:,.0f} tokens/s"
    return "\n".join(
        (
            f"{counted(report.steps, 'step')} in {report.seconds:.1f} s: "
            f"loss {report.loss:.4f}{held_out}{speed}",
            f"the model is in {report.checkpoint}",
        )
    )
