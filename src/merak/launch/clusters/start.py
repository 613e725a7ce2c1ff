"""Launch of a job: the file that is written and the command that starts it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from merak.core.errors import CommandError, RunError


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch of a job.

    Args:
        engine: "slurm", "kubernetes", "ray", "skypilot" or "torchrun".
        file: that is written; None where a command is enough.
        text: of that file.
        command: that starts the job.
        needs: what to install where the command's program is missing.
    """

    engine: str
    file: str | None
    text: str | None
    command: tuple[str, ...]
    needs: str


def start(launch: Launch) -> None:
    """Write the file of a launch and run its command, to its end.

    The command's output goes to standard error, since standard output belongs to the report.

    Raises:
        CommandError: the command's program is missing, or the file exists with another text.
        RunError: the command has failed.
    """
    if shutil.which(launch.command[0]) is None:
        raise CommandError(
            f"merak launch {launch.engine} needs the program {launch.command[0]}, which is not on "
            f"the path; install {launch.needs}, or use --dry-run to see what would be started."
        )
    if launch.file is not None and launch.text is not None:
        write(Path(launch.file), launch.text)
    code = subprocess.run(launch.command, stdout=sys.stderr).returncode
    if code != 0:
        raise RunError(f"{launch.command[0]} ended with exit code {code}; see what it said above.")


def write(file: Path, text: str) -> None:
    """Write a file, and leave one alone that somebody has changed.

    Raises:
        CommandError: it exists with another text, or cannot be written.
    """
    try:
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise CommandError(
                f"{file} exists and holds something else; remove it, or name another one with "
                "--output."
            )
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written ({error.strerror}); use --output.") from error
