"""`merak check`: training on ranks compared with training in one process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import typer

from merak.cli.options import JobRequest, backend, option, shared, takes
from merak.cli.output import show, stdout_to_stderr
from merak.core.units import counted
from merak.launch.forkserver import ranks_prepared

if TYPE_CHECKING:
    from merak.check import CheckReport
    from merak.check.real_widths import RealWidths


class Widths(Enum):
    """Widths of the version of a model that is checked."""

    SMALL = "small"
    REAL = "real"


@dataclass(frozen=True, kw_only=True)
class CheckRequest(JobRequest):
    """Request to compare training on ranks with training in one process."""

    batch: int = option(4, "--batch", "B", "Samples of a microbatch.")
    sequence: int | None = option(None, "--seq", "S", "Tokens of a sequence; 32 at most.")
    microbatches: int = option(4, "--microbatches", "M", "Microbatches of a step.")
    schedule: str = shared("schedule")
    sequence_parallel: bool = shared("sequence_parallel")
    steps: int = option(3, "--steps", "N", "Optimizer steps.")
    evaluate: bool = option(
        False, "--evaluate", "", "Compare evaluations before, between and after, too."
    )
    widths: Widths = option(
        Widths.SMALL,
        "--widths",
        "small|real",
        "Widths of the model that is checked: real ones keep all but the layers.",
    )
    backend: str | None = backend()


@takes(CheckRequest)
def check(request: CheckRequest) -> None:
    """Train a small version of a model in one process and on ranks, and compare.

    Losses, every parameter's gradient and the parameters after the steps have to be the same, to
    rounding. Fields given with --config stay; layers, widths, vocabulary and experts become fewer.
    """
    with ranks_prepared(request.dp * request.tp * request.pp * request.cp), stdout_to_stderr():
        from merak.check import CheckOptions, Layout
        from merak.cli.model import named_model, recipe_job
        from merak.core.elastic import Degrees, check_expert_degree
        from merak.core.health import failure
        from merak.core.health.quiet import warn_once
        from merak.core.health.stderr import write_line
        from merak.core.rank0 import is_rank0
        from merak.launch.ranks import under_torchrun
        from merak.zoo.check_by_name import check_named
        from merak.zoo.model_source import parse_overrides
        from merak.zoo.request import Request

        warn_once()
        job = recipe_job(request)
        name, config, trusted = named_model(request, job)
        degrees = Degrees(request.dp, request.tp, request.pp, request.cp)
        if under_torchrun():
            failure.install()  # of all ranks, the first to fail is the one that reports
        report = check_named(
            Request(
                name,
                parse_overrides(request.config),
                request.sequence,
                trusted,
                request.widths is Widths.REAL,
                config,
            ),
            Layout(*degrees, check_expert_degree(request.ep, degrees)),
            CheckOptions(
                request.schedule,
                request.microbatches,
                request.batch,
                request.steps,
                device=request.device,
                backend=request.backend,
                sequence_parallel=request.sequence_parallel,
                evaluate=request.evaluate,
            ),
        )
        if job is not None and is_rank0():
            write_line(
                f"merak: {job.name}: no data is read; a small version of its model has trained on "
                "random samples."
            )
    if is_rank0():
        show(report, _page, request.as_json)
    if not report.ok:
        raise typer.Exit(1)


def _page(report: CheckReport) -> str:
    from merak.graph.trace.opaque.report import opaque_lines

    if report.loss_max_rel_diff is None:
        compared = []
    else:
        compared = [
            f"largest relative differences: losses {report.loss_max_rel_diff:.1e}, gradients "
            f"{report.gradient_max_rel_diff:.1e}, parameters after the steps "
            f"{report.parameter_max_rel_diff:.1e} (up to {report.tolerance:.0e} is rounding)"
        ]
    if report.evaluation_max_rel_diff is not None:
        compared.append(
            f"largest relative difference of an output in evaluation: "
            f"{report.evaluation_max_rel_diff:.1e}"
        )
    if report.loss is not None:
        compared.append(f"the model computes no loss, and the check took: {report.loss}")
    if report.filled:
        fields = ", ".join(f"{name}={value!r}" for name, value in report.filled.items())
        compared.append(f"the config leaves open, and the check took: {fields}")
    result = "trains as in one process" if report.ok else f"FAILED: {report.reason}"
    return "\n".join(
        (
            f"{report.model}: {result}",
            *compared,
            *opaque_lines(report.kept_whole),
            f"{counted(report.segments, 'segment')}; tensor and expert parallelism split "
            f"{report.tp_sharded_fraction:.0%} of the parameters; {report.seconds:.1f} s",
            *_at_real_widths(report.real_widths),
        )
    )


def _at_real_widths(found: RealWidths | None) -> list[str]:
    if found is None or found.tp == 1:
        return []
    lines = [
        f"at real widths ({found.parameters:,} parameters in few layers, {found.tokens:,} tokens): "
        f"tp={found.tp} splits {found.split:.1%}; a layer sends activations {found.forward} times "
        f"in the forward and {found.backward} times in the backward"
    ]
    lines += [f"  every rank holds {name}: {why}" for name, why in found.whole.items()]
    return lines if found.undivided is None else [*lines, f"  {found.undivided}"]
