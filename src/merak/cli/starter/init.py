"""`merak init`: a folder with a recipe and a script to start from."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from importlib.resources import files
from pathlib import Path

from merak.cli.options import argument, json_output, takes
from merak.cli.output import show
from merak.launch.errors import CommandError

_FILES = {"recipe.yaml": "recipe.yaml", "train.py": "train.py.template"}


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
    as_json: bool = json_output()


@takes(InitRequest)
def init(request: InitRequest) -> None:
    """Write a recipe and a script to start from into a new folder.

    Both train a small model on text of this machine, on two ranks, with or without a GPU.
    """
    try:
        request.name.mkdir(parents=True)
        for name, source in _FILES.items():
            text = files("merak.cli.starter").joinpath(source).read_text(encoding="utf-8")
            (request.name / name).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise CommandError(f"{request.name} exists already; name a new folder.") from None
    except OSError as error:
        raise CommandError(
            f"{request.name} cannot be written ({error.strerror}); name another folder."
        ) from error
    commands = ["merak train recipe.yaml", "torchrun --nproc-per-node 2 train.py"]
    show(InitReport(str(request.name), list(_FILES), commands), _page, request.as_json)


def _page(report: InitReport) -> str:
    lines = [f"{report.folder} has {' and '.join(report.files)}. Go on with:", ""]
    return "\n".join([*lines, f"cd {report.folder}", *report.commands])
