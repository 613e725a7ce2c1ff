"""`merak run`: a script on several ranks, in torchrun's place and with its options."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Never

import typer

from merak.core.elastic import (
    AUTO_PLAN,
    PLAN_VARIABLE,
    GivenDegrees,
    plan_from_outside,
    variable_of,
)
from merak.core.errors import CommandError, RunError
from merak.core.health.interrupt import INTERRUPTED
from merak.core.health.preemption import TERMINATED
from merak.launch.clusters.job import RECIPES
from merak.launch.forkserver import environment

_ONE_HOST = ("1", "1:1")
"""What `--nnodes` says of a job of this machine alone."""

_HELP = {
    "dp": "Data parallel degree; where it is left out, as many replicas as the ranks make.",
    "tp": "Tensor parallel degree.",
    "pp": "Pipeline parallel degree.",
    "cp": "Context parallel degree.",
    "ep": "Expert parallel degree.",
}


def run(context: typer.Context) -> None:
    """Start a script, or a recipe, on ranks of this machine, or of this and other hosts.

    It takes torchrun's options, and the degrees or the plan of a script that calls `merak.init()`.
    """
    options = _parser().parse_args(context.args)
    given = GivenDegrees(*(getattr(options, axis) for axis in GivenDegrees._fields))
    given.check()
    _check_script(options)
    if Path(options.training_script).suffix in RECIPES:
        words = ["train", options.training_script, *options.training_script_args]
        options.module, options.training_script = True, "merak.cli.main"
        options.training_script_args = words
    with environment(**_variables(given, options.plan)):
        if options.nproc_per_node is None:
            options.nproc_per_node = _num_ranks(options.nnodes)
        _start(options)


def _variables(given: GivenDegrees, plan: str | None) -> dict[str, str]:
    """Environment variables by which `merak.init()` learns of degrees and a plan."""
    found = {variable_of(axis): str(own) for axis, own in given._asdict().items() if own}
    if plan is not None:
        found[PLAN_VARIABLE] = plan if plan == AUTO_PLAN else os.path.abspath(plan)
    return found


def _parser() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.allow_abbrev = "merak run", False
    parser.description = (
        "Start a script, or a recipe, on several ranks: torchrun with degrees, which merak.init() "
        "takes where the script leaves them out."
    )
    parser.epilog = "Example: merak run --tp 2 --pp 2 train.py"
    parser.set_defaults(nproc_per_node=None)  # as many as the degrees need
    group = parser.add_argument_group("degrees of merak.init()")
    for axis, sentence in _HELP.items():
        group.add_argument(f"--{axis}", type=int, metavar=axis[0].upper(), help=sentence)
    group.add_argument("--plan", metavar="FILE|auto", help="Plan of merak plan, or auto.")
    vars(parser).update(error=_refuse, exit=_leave, format_help=partial(_help, parser.format_help))
    return parser


def _help(page: Callable[[], str]) -> str:
    return page().replace("usage:", "Usage:", 1)  # as of the other commands


def _leave(status: int = 0) -> Never:
    raise typer.Exit(status)  # behind the help


def _refuse(message: str) -> Never:
    raise CommandError(f"{message}; see merak run --help.")


def _check_script(options: argparse.Namespace) -> None:
    if options.module or options.no_python or options.run_path:
        return
    if not Path(options.training_script).exists():
        raise CommandError(f"{options.training_script} does not exist; name a script that does.")


def _num_ranks(nnodes: str) -> str:
    """How many ranks the degrees need that are given here or in the environment, all of them here.

    Raises:
        CommandError: other hosts have some of them, or a plan is to choose the degrees.
        MeshError: the environment has no degrees where it says so.
        PlanError: the plan cannot be read.
    """
    from merak.core.files.plan_file import plan_degrees

    if nnodes not in _ONE_HOST:
        raise CommandError(f"--nnodes {nnodes} needs --nproc-per-node, the ranks of each host.")
    plan = plan_from_outside()
    if plan == AUTO_PLAN:
        raise CommandError(
            "--plan auto needs --nproc-per-node, the ranks that the plan is for: gpu for one on "
            "every GPU of this machine."
        )
    degrees = GivenDegrees.from_outside() if plan is None else plan_degrees(plan)
    return str(math.prod(degrees.filled()))


def _start(options: argparse.Namespace) -> None:
    """Start the ranks, and wait for their end.

    Raises:
        RunError: a rank has failed, which has said why itself.
        TerminatedError: SIGTERM has ended the job.
        Exit: with the status of a rank whose input was bad, or that a signal has ended.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from merak.launch.ranks import how_ended, quiet_launcher

    is_alone = options.nnodes in _ONE_HOST
    names_no_place = options.rdzv_backend == "static" and options.master_port is None
    if is_alone and names_no_place and not options.rdzv_endpoint:
        options.standalone = True  # two jobs of one machine do not meet
    try:
        with quiet_launcher(is_alone):
            torchrun.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (2, INTERRUPTED, TERMINATED):
            raise typer.Exit(failure.exitcode) from None
        raise RunError(
            f"rank {rank} of this machine {how_ended(failure)}; what it has printed is above."
        ) from None
