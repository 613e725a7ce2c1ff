"""`merak init`: a folder with a recipe and a script to start from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from merak.cli.options import argument, json_output, option, takes, words
from merak.cli.output import show
from merak.cli.recipe.ready import READY, ready_text
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import CommandError
from merak.core.files.yaml_file import parse_yaml
from merak.core.units import counted

Sections = Mapping[str, Any]

_WIDTH = 100
"""Columns of a page in which what a command does is behind it, else above."""

_CONFIG, _RECIPE, _SCRIPT = "config.json", "recipe.yaml", "train.py"


@dataclass(frozen=True, slots=True)
class InitReport:
    """Report of a folder to start from.

    Args:
        folder: that was written.
        files: in it.
        commands: to go on with from inside the folder, and what each does.
        notes: sentences on what these commands need, and what they take for granted.
    """

    folder: str
    files: list[str]
    commands: dict[str, str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """Request for a folder to start from."""

    name: Path = argument(MISSING, "NAME", "The folder to write.")
    recipe: str | None = option(
        None,
        "--recipe",
        "RECIPE",
        "One of `merak recipes`; without it, a small GPT-2.",
        **words(READY),
    )
    as_json: bool = json_output()


@takes(InitRequest)
def init(request: InitRequest) -> None:
    """Write a recipe and a script to start from into a new folder.

    Both train a small model on text of this machine, on two ranks, with or without a GPU; with
    `--recipe` they are a recipe that comes with Merak, and a script that runs it.
    """
    files_to_write = _texts(request.recipe)
    try:
        request.name.mkdir(parents=True)
        for name, text in files_to_write.items():
            (request.name / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise CommandError(f"{request.name} exists already; name a new folder.") from None
    except OSError as error:
        raise CommandError(
            f"{request.name} cannot be written ({error.strerror}); name another folder."
        ) from error
    sections = parse_yaml(files_to_write[_RECIPE], _RECIPE)[1]
    commands = _commands(sections, is_ready=request.recipe is not None)
    notes = _notes(sections, is_ready=request.recipe is not None)
    report = InitReport(str(request.name), list(files_to_write), commands, notes)
    show(report, _page, request.as_json)


def _texts(recipe: str | None) -> dict[str, str]:
    if recipe is not None:
        text = ready_text(recipe)
        script = _template("train_recipe.py.template")
        script = script.replace("NUM_RANKS", _ranks_of_torchrun(parse_yaml(text, recipe)[1]))
        return {_RECIPE: text, _SCRIPT: script}
    return {
        _CONFIG: _template(_CONFIG),
        _RECIPE: _template(_RECIPE),
        _SCRIPT: _template("train.py.template"),
    }


def _template(name: str) -> str:
    return files("merak.cli.starter").joinpath(name).read_text(encoding="utf-8")


def _commands(sections: Sections, is_ready: bool) -> dict[str, str]:
    """Commands that run what is written; at published sizes, two that need no devices go first."""
    fields = [f" {name}=…" for name in _open_fields(sections)]
    words = "".join(fields)
    model = "".join(f" --set{field}" for field in fields if field.startswith(" model."))
    before = {
        f"merak check --model {_RECIPE}{model} --pp 2": "a small version, beside one process",
        f"merak plan --model {_RECIPE}{model} --cluster h100:8": "the fastest layout on 8 GPUs",
    }
    run = {
        f"merak train {_RECIPE}{words}": "train",
        f"torchrun --nproc-per-node {_ranks_of_torchrun(sections)} {_SCRIPT}{words}": "the same",
    }
    plan = "merak plan --model config.json --cluster h100:2 --global-batch 16 --seq 128"
    then = {
        f"{plan} --output plan.json": "the fastest layout of train.py's model on 2 GPUs",
        f"torchrun --nproc-per-node 2 {_SCRIPT} --plan plan.json": "train in that layout",
    }
    return before | run if is_ready else run | then


def _notes(sections: Sections, is_ready: bool) -> list[str]:
    """Sentences on the fields that are open, and on the ranks that the commands start."""
    named = " and ".join(_open_fields(sections))
    notes = [f"{named} must be given: in these commands, or once in {_RECIPE}."] if named else []
    if not is_ready:
        return notes
    ranks = _ranks(sections)
    if ranks is None:
        return [
            *notes,
            "The recipe has a published size, so train it on GPUs: plan: auto lays it out over one "
            "rank for every GPU of this machine.",
        ]
    return [
        *notes,
        f"The recipe's degrees make {counted(ranks, 'rank')}: raise them in its section parallel, "
        "and --nproc-per-node to their product.",
    ]


def _ranks_of_torchrun(sections: Sections) -> str:
    """What torchrun is told of the ranks to start: their number, or one for every GPU."""
    return str(_ranks(sections) or "gpu")


def _ranks(sections: Sections) -> int | None:
    """Number of ranks that the degrees of a recipe need; None where `plan: auto` finds them."""
    if sections.get("plan") == AUTO_PLAN:
        return None
    return math.prod(map(int, sections["parallel"].values()))


def _open_fields(sections: Sections) -> list[str]:
    """Names of the fields that a recipe leaves to its user."""
    return [
        f"{section}.{name}"
        for section, name in (("model", "name"), ("data", "source"))
        if name in sections[section] and sections[section][name] is None
    ]


def _page(report: InitReport) -> str:
    width = max(map(len, report.commands))
    commands = [f"{command:<{width}}  # {what}" for command, what in report.commands.items()]
    if max(map(len, commands)) > _WIDTH:
        commands = [line for c, what in report.commands.items() for line in (f"# {what}:", c)]
    *most, last = report.files
    begin = f"{report.folder} has {', '.join(most)} and {last}. Go on with:"
    notes = [line for note in report.notes for line in ("", note)]
    return "\n".join([begin, "", f"cd {report.folder}", *commands, *notes])
