"""Output folder of a run: checks that it can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from merak.arguments.fields import TrainingFields
from merak.core.errors import ArgumentsError


def folder_problems(arguments: TrainingFields) -> Iterator[str]:
    """Yield why the output folder cannot be made, as far as can be told without making it."""
    wanted = Path(str(arguments.output_dir)).expanduser().absolute()
    found = next(p for p in (wanted, *wanted.parents) if os.path.lexists(p))
    if not found.is_dir():
        yield (
            f"output_dir={str(arguments.output_dir)!r} cannot be a folder, since {found} is a "
            "file; name another."
        )
    elif not os.access(found, os.W_OK | os.X_OK):
        yield (
            f"output_dir={str(arguments.output_dir)!r} cannot be written, since {found} is not "
            "yours to write into; name another."
        )


def make_output_folder(folder: str) -> None:
    """Make the folder of a run's results, and check that a file can be written there.

    Raises:
        ArgumentsError: it cannot.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"merak")
    except OSError as cause:
        raise ArgumentsError(
            f"output_dir={folder!r} cannot be written ({cause.strerror}); name another."
        ) from cause
