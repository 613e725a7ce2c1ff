"""`merak init`: a folder with a recipe and a script to start from."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from importlib.resources import files
from pathlib import Path

import yaml

from merak.cli.options import argument, json_output, option, takes
from merak.cli.output import show
from merak.cli.recipe.ready import ready_text
from merak.launch.errors import CommandError

_RECIPE, _SCRIPT = "recipe.yaml", "train.py"


@dataclass(frozen=True, slots=True)
class InitReport:
    """Report of a folder to start from.

    Args:
        folder: that was written.
        files: in it.
        commands: that run them, from inside the folder.
    """

    folder: str
    files: list[str]
    commands: list[str]


@dataclass(frozen=True, kw_only=True)
class InitRequest:
    """Request for a folder to start from."""

    name: Path = argument(MISSING, "NAME", "The folder to write.")
    recipe: str | None = option(
        None, "--recipe", "RECIPE", "One of `merak recipes`; without it, a small GPT-2."
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
    words = "".join(f" {name}=…" for name in _open_fields(files_to_write[_RECIPE]))
    commands = [f"merak train recipe.yaml{words}", f"torchrun --nproc-per-node 2 train.py{words}"]
    show(InitReport(str(request.name), list(files_to_write), commands), _page, request.as_json)


def _texts(recipe: str | None) -> dict[str, str]:
    if recipe is not None:
        return {_RECIPE: ready_text(recipe), _SCRIPT: _template("train_recipe.py.template")}
    return {_RECIPE: _template("recipe.yaml"), _SCRIPT: _template("train.py.template")}


def _template(name: str) -> str:
    return files("merak.cli.starter").joinpath(name).read_text(encoding="utf-8")


def _open_fields(recipe: str) -> list[str]:
    """Names of the fields that a recipe leaves to its user."""
    sections = yaml.safe_load(recipe)
    return [
        f"{section}.{name}"
        for section, name in (("model", "name"), ("data", "source"))
        if name in sections[section] and sections[section][name] is None
    ]


def _page(report: InitReport) -> str:
    lines = [f"{report.folder} has {' and '.join(report.files)}. Go on with:", ""]
    return "\n".join([*lines, f"cd {report.folder}", *report.commands, *_hint(report)])


def _hint(report: InitReport) -> list[str]:
    """What is to be done before the commands: some recipes leave fields to their user."""
    _, _, fields = report.commands[0].partition(f"{_RECIPE} ")
    if not fields:
        return []
    named = " and ".join(word.removesuffix("=…") for word in fields.split())
    return ["", f"{named} must be given: in these commands, or once in {_RECIPE}."]
