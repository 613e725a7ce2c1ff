"""`merak check`: whether a model trains on ranks as it does in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from merak.cli import options
from merak.cli.output import show, stdout_to_stderr
from merak.launch.forkserver import ranks_prepared

if TYPE_CHECKING:
    from merak.check import CheckReport


def check(  # one argument for each option
    model: options.Model,
    config: options.Config = None,
    dp: Annotated[int, typer.Option("--dp", metavar="D", help="Data parallel degree.")] = 1,
    tp: Annotated[int, typer.Option("--tp", metavar="T", help="Tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", metavar="P", help="Pipeline parallel degree.")] = 1,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help="Pipeline schedule.")
    ] = "1f1b",
    microbatches: Annotated[
        int, typer.Option("--microbatches", metavar="M", help="Microbatches of a step.")
    ] = 4,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Optimizer steps.")] = 3,
    batch: options.Batch = 4,
    seq: Annotated[
        int | None, typer.Option("--seq", metavar="S", help="Tokens of a sequence; 32 at most.")
    ] = None,
    sequence_parallel: options.SequenceParallel = False,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate", help="Compare evaluations before, between and after, too."),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    backend: options.Backend = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Train a small version of a model in one process and on ranks, and compare.

    Losses, every parameter's gradient and the parameters after the steps have to be the same, to
    rounding. Fields given with --config stay; layers, widths, vocabulary and experts become fewer.
    """
    with ranks_prepared(dp * tp * pp), stdout_to_stderr():
        from merak.check import CheckOptions, Layout
        from merak.core.health import failure
        from merak.core.rank0 import is_rank0
        from merak.launch.ranks import under_torchrun
        from merak.zoo.check_by_name import Request, check_named
        from merak.zoo.model_source import parse_overrides

        if under_torchrun():
            failure.install()  # of all ranks, the first to fail speaks
        report = check_named(
            Request(model, parse_overrides(config), seq, trust_remote_code),
            Layout(dp, tp, pp),
            CheckOptions(
                schedule,
                microbatches,
                batch,
                steps,
                device=device,
                backend=backend,
                sequence_parallel=sequence_parallel,
                evaluate=evaluate,
            ),
        )
    if is_rank0():
        show(report, _page, as_json)
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
            f"{report.segments} segments; tensor parallelism splits "
            f"{report.tp_sharded_fraction:.0%} of the parameters; {report.seconds:.1f} s",
        )
    )
