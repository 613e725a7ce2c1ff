"""`merak`: the command, its subcommands and its exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from merak.cli.check import check
from merak.cli.doctor.doctor import doctor
from merak.cli.export import export
from merak.cli.launch.launch import app as launch
from merak.cli.launch.run import run
from merak.cli.memory import memory
from merak.cli.options import ModelCommand
from merak.cli.plan.plan import plan
from merak.cli.profile import profile
from merak.cli.rehearse import rehearse
from merak.cli.report.report import report
from merak.cli.schedule import schedule
from merak.cli.starter.init import init
from merak.cli.starter.recipes import recipes
from merak.cli.trace import trace
from merak.cli.train import train
from merak.core.doctor.failed_start import advise
from merak.core.doctor.software import DISTRIBUTION
from merak.core.errors import (
    MerakError,
    RunError,
    StartError,
    TerminatedError,
    TrainingError,
    did_you_mean,
)
from merak.core.health.failure import is_joined
from merak.core.health.interrupt import INTERRUPTED, SENTENCE
from merak.core.health.preemption import TERMINATED
from merak.core.health.quiet import hide_needless
from merak.core.packages import installed_version

BAD_INPUT = 2
"""The exit code for input that makes no sense."""

RUN_FAILED = 1
"""The exit code for a run or check that failed."""

app = typer.Typer(
    name="merak",
    help="Train unmodified Hugging Face and PyTorch models with data, tensor and pipeline "
    "parallelism.",
    epilog="Example: merak trace --model GPT2LMHeadModel",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(
    "trace",
    cls=ModelCommand,
    epilog="Example: merak trace --model GPT2LMHeadModel --config '{\"n_layer\": 48}' --batch 4",
)(trace)
app.command("schedule", epilog="Example: merak schedule 1f1b --stages 4 --microbatches 8")(schedule)
app.command(
    "check",
    cls=ModelCommand,
    epilog="Example: merak check --model LlamaForCausalLM --tp 2 --pp 2",
)(check)
app.command(
    "memory",
    cls=ModelCommand,
    epilog="Example: merak memory --model GPT2LMHeadModel --pp 4 --microbatches 8 --recompute 0.5",
)(memory)
app.command(
    "profile",
    epilog="Example: merak profile --model GPT2LMHeadModel --dp 2 --output gpt2.json",
)(profile)
app.command(
    "plan",
    cls=ModelCommand,
    epilog="Example: merak plan --model GPT2LMHeadModel --cluster h100:8x4 --global-batch 512 "
    "--seq 1024",
)(plan)
app.command(
    "rehearse",
    cls=ModelCommand,
    epilog="Example: merak rehearse --model GPT2LMHeadModel --cluster h100:8x4 --dp 4 --pp 8 "
    "--rank 9",
)(rehearse)
app.command("doctor", epilog="Example: merak doctor --ranks 4")(doctor)
app.command("export", epilog="Example: merak export runs/gpt2/checkpoint-100 exported")(export)
app.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
    epilog="Example: merak run --tp 2 --pp 2 train.py",
)(run)
app.command(
    "train",
    epilog="Example: merak train examples/train_recipe.yaml arguments.max_steps=20 --device cpu",
)(train)
app.command("report", epilog="Example: merak report runs/gpt2")(report)
app.command("init", epilog="Example: merak init my-model --recipe llama")(init)
app.command("recipes", epilog="Example: merak recipes llama")(recipes)
app.add_typer(launch, name="launch")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"merak {installed_version(DISTRIBUTION)}")
        raise typer.Exit()


@app.callback()
def merak(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train unmodified Hugging Face and PyTorch models on many devices."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the command line names, and return its exit status.

    Args:
        arguments: the words after `merak`; those of this process by default.

    Returns:
        The exit code: 0, or 2 for bad input, or 1 for a run or check that failed, or 130 for
        one that was interrupted, or 143 for one that SIGTERM has ended.
    """
    hide_needless()
    try:
        code = app(args=arguments, prog_name="merak", standalone_mode=False)
    except (MerakError, RunError) as error:
        if "RANK" in os.environ:  # a rank of torchrun's: merak.core.health.failure says it, once
            raise
        if isinstance(error, TerminatedError):
            return _refuse(str(error), TERMINATED)
        if is_joined(error):
            return _refuse_all(list(map(str, error.errors)))
        failed = isinstance(error, (RunError, TrainingError))
        if isinstance(error, StartError):
            return _refuse(str(error), RUN_FAILED, then=advise)
        return _refuse(str(error), RUN_FAILED if failed else BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # The command line's own errors: an unknown option, a missing argument.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        context = getattr(error, "ctx", None)
        if context is not None and hasattr(error, "possibilities"):  # of an unknown option
            flag = str(getattr(error, "option_name", ""))
            return _refuse(_unknown_option(flag, context), BAD_INPUT)
        return _refuse(_with_help(message(), context), BAD_INPUT)
    if code == INTERRUPTED:  # which typer makes of an interrupt
        if "RANK" in os.environ:  # a rank of torchrun's, as above
            raise KeyboardInterrupt
        print(f"\n{SENTENCE}", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _with_help(sentence: str, context: Any) -> str:
    """Add to a sentence of the command line's own the command that says what it takes."""
    if context is None or "\n" in sentence:  # a page of help
        return sentence
    help_command = f"{context.command_path} --help"
    if sentence.endswith("?"):
        return f"{sentence} See {help_command}."
    return f"{sentence.removesuffix('.')}; see {help_command}."


def _unknown_option(flag: str, context: Any) -> str:
    """Sentence on an option that a command does not have, with what to write instead."""
    command, word = context.command_path, flag.lstrip("-").replace("-", "_")
    names = {one.name: one.opts[0] for one in context.command.params}
    if word in names:  # else it were an option
        return f"{command} takes {word.upper()} without {flag}; see {command} --help."
    if "recipe" in names:
        from merak.cli.recipe.recipe import field_named

        if field := field_named(word):
            return (
                f"{command} has no option {flag}, but its recipe has {field}; write `{command} "
                f"RECIPE {field}=…`."
            )
    flags = [own[2:] for own in names.values() if own.startswith("--")]
    meant = did_you_mean(word, flags).replace("mean ", "mean --").replace(" or ", " or --")
    return f"{command} has no option {flag}{meant} See {command} --help."


def _refuse_all(sentences: Sequence[str]) -> int:
    for sentence in dict.fromkeys(sentences):
        _refuse(sentence, BAD_INPUT)
    return BAD_INPUT


def _refuse(sentence: str, code: int, then: Callable[[], None] = lambda: None) -> int:
    print(f"merak: {sentence}" if "\n" not in sentence else sentence, file=sys.stderr)
    then()
    return code


if __name__ == "__main__":
    sys.exit(main())
