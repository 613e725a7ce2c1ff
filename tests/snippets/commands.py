"""Commands of the docs: the words of each, what its parser says, and whether CI runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer.main

from tests.snippets.blocks import COMMANDS, ROOT, Block, blocks

VARIABLE = re.compile(r"[A-Z_]+=.*")
PARSED_ELSEWHERE = {
    "make": "a target of the Makefile, most of which CI runs",
    "torchrun": "scripts of the reader's, or examples that `make examples` runs",
    "python": "a benchmark of minutes, whose figures stand in the page",
}
"""Programs whose commands are not run → why."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: the words of a shell, without variables in front of them."""

    block: Block
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The name of the program, without a folder."""
        return os.path.basename(self.words[0])

    @property
    def runs(self) -> bool:
        """Whether CI runs the command, rather than only parsing it."""
        return self.program == "merak" and self.block.reason is None

    def __str__(self) -> str:
        return f"{self.block.place}: {shlex.join(self.words)}"


def commands() -> tuple[Command, ...]:
    """All commands of all pages."""
    return tuple(
        command
        for block in blocks()
        if block.language in COMMANDS and block.kind is None
        for command in commands_of(block)
    )


def commands_of(block: Block) -> list[Command]:
    """The commands of one block, each with its words."""
    joined = block.text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["chrt"]:  # chrt -f PRIORITY COMMAND
            words = words[3:]
        while words and VARIABLE.fullmatch(words[0]):
            words = words[1:]
        if words:
            found.append(Command(block, tuple(words)))
    return found


def problem(command: Command) -> str | None:
    """Say what the command's own parser has against it; None if it takes it."""
    words = list(command.words[1:])
    match command.program:
        case "merak":
            return merak_problem(words)
        case "make":
            return None if set(_without_variables(words)) <= make_targets() else "no such target"
        case "torchrun":
            return torchrun_problem(words)
        case "python":
            return None if script_of(words) else "no script of this repository"
        case "pip":
            return pip_problem(words) if command.block.reason is None else None
        case "export" | "cd" | "git":
            return None
    return f"nothing is known of the program {command.program!r}"


def merak_problem(words: list[str]) -> str | None:
    """What the command line's parser says to some words behind `merak`."""
    from merak.cli.main import app

    command: Any = typer.main.get_command(app)
    context: Any = None
    try:
        while hasattr(command, "resolve_command"):
            context = command.make_context("merak", words, parent=context, resilient_parsing=True)
            context.resilient_parsing = False  # the group's own options may be left out, no more
            _, command, words = command.resolve_command(context, words)
        command.make_context(command.name, words, parent=context)
    except Exception as error:
        said = getattr(error, "format_message", error.__str__)()
        return said or repr(error)
    return None


def torchrun_problem(words: list[str]) -> str | None:
    """What the parsers of torchrun, and of a command of Merak's behind it, say."""
    from torch.distributed.run import get_args_parser

    try:
        options = get_args_parser().parse_args(words)
    except SystemExit:
        return "torchrun refuses it"
    script = options.training_script
    if options.module:
        is_merak = script == "merak.cli.main"
        return merak_problem(options.training_script_args) if is_merak else f"what is {script}?"
    if not script.startswith("examples/"):
        return None
    if script.startswith("examples/training/"):  # whose own test runs them
        return None if (ROOT / script).is_file() else f"{script} is no example"
    return None if script in (ROOT / ".ci/examples").read_text() else f"{script} is no example"


def pip_problem(words: list[str]) -> str | None:
    """Whether what is to be installed is this package, with extras that it has."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words[1:]:
        found = re.fullmatch(r"(?:merak-train|-e \.|\.)(?:\[([\w,]+)\])?", word)
        if found is None and not word.startswith("-"):
            return f"{word} is not this package"
        extras = found[1].split(",") if found and found[1] else []
        if not set(extras) <= set(project["optional-dependencies"]):
            return f"there is no extra of {extras}"
    return None


def make_targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _without_variables(words: list[str]) -> list[str]:
    return [word for word in words if "=" not in word]


def script_of(words: list[str]) -> str | None:
    """The script or module of this repository that `python …` starts, as a path."""
    if words[0] == "-m":
        path = words[1].replace(".", "/") + ".py"
    else:
        path = words[0]
    return path if (ROOT / path).is_file() else None


@cache
def script_problems() -> dict[tuple[str, ...], str]:
    """What the scripts that the pages start say to their arguments: by words, the refused ones.

    All of them are imported in one process, which ends each as soon as it has parsed.
    """
    asked = [list(c.words[1:]) for c in commands() if c.program in ("python", "torchrun")]
    asked = [words for words in map(_of_script, asked) if words]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.snippets.parse_scripts"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {tuple(words): text for words, text in json.loads(done.stdout)}


def _of_script(words: list[str]) -> list[str]:
    """Script or `-m module`, and its arguments, of a `python` or a `torchrun`; empty if neither."""
    for position, word in enumerate(words):
        if word.startswith("examples/") or (position == 0 and script_of(words)):
            return words[position:]
    return []
