"""`merak train`: one training run from a recipe."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from merak.cli.options import argument, backend, device, json_output, takes
from merak.cli.output import show, stdout_to_stderr
from merak.cli.recipe.report import TrainReport


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """Request to train as a recipe says."""

    recipe: Path = argument(MISSING, "RECIPE.yaml", "What to train, on what.")
    backend: str | None = backend()
    device: str | None = device()
    as_json: bool = json_output()


@takes(TrainRequest)
def train(request: TrainRequest) -> None:
    """Train a model as a recipe says, on as many ranks as its degrees need.

    Starts the ranks on this machine, or joins those that torchrun started.
    """
    from merak.cli.recipe.job import Job, check_job, run_job
    from merak.cli.recipe.recipe import read_recipe
    from merak.core.announce import announce, show_announcements
    from merak.core.health import failure
    from merak.launch.ranks import Work, run_ranks, under_torchrun

    if under_torchrun():
        failure.install()  # of all ranks, the first to fail is the one that reports
    with stdout_to_stderr():
        job = Job(read_recipe(request.recipe), request.backend, request.device)
        if not under_torchrun():
            check_job(job)  # once, and before ranks are started
        num_ranks = job.recipe.parallel.num_ranks
        if num_ranks == 1 or under_torchrun():
            report = run_job(job)
        else:
            show_announcements()
            announce("starting %d ranks …", num_ranks)
            report = run_ranks(Work(run_job, (job,)), num_ranks)
    if report is not None:
        show(report, _page, request.as_json)


def _page(report: TrainReport) -> str:
    held_out = "" if report.eval_loss is None else f", {report.eval_loss:.4f} on held-out samples"
    return "\n".join(
        (
            f"{report.steps} steps in {report.seconds:.1f} s: loss {report.loss:.4f}{held_out}, "
            f"{report.tokens_per_second:,.0f} tokens/s",
            f"the model is in {report.checkpoint}",
        )
    )
