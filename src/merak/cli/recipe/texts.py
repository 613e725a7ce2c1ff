"""Texts of a recipe: from the standard library, folders, JSON lines or datasets."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets  # type: ignore[import-untyped]

from merak.cli.recipe.recipe import STANDARD_LIBRARY, DataRecipe
from merak.launch.errors import CommandError

LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Folders of the standard library that are not its own, not everywhere, or tables."""

DATASET_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files that `datasets` leaves in the folder of a saved dataset."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts that are read on demand.

    Args:
        files: files that hold one text each, or JSON lines with one text a line.
        column: the field of JSON lines that holds the text.
        dataset: a dataset whose `column` holds texts, instead of files.
    """

    files: tuple[Path, ...]
    column: str
    dataset: datasets.Dataset | None = None

    def stamp(self) -> list[object]:
        """Fingerprint that changes when a text does."""
        if self.dataset is not None:
            return [self.dataset._fingerprint, self.column]
        stats = [(str(file), file.stat()) for file in self.files]
        return [self.column, *((name, s.st_size, s.st_mtime_ns) for name, s in stats)]

    def read(self, max_bytes: int | None) -> list[str]:
        """Read the texts, in order, until they have `max_bytes` together."""
        taken: list[str] = []
        num_bytes = 0
        for text in self._all():
            if not text:
                continue
            taken.append(text)
            num_bytes += len(text.encode("utf-8", errors="replace"))
            if max_bytes is not None and num_bytes >= max_bytes:
                break
        return taken

    def _all(self) -> Iterator[str]:
        if self.dataset is not None:
            yield from (row[self.column] for row in self.dataset)
        for file in self.files:
            try:
                if file.suffix == ".jsonl":
                    yield from _lines(file, self.column)
                else:
                    yield file.read_text(encoding="utf-8", errors="replace")
            except OSError as cause:
                raise CommandError(f"the text {file} cannot be read: {cause.strerror}.") from cause


def find_source(recipe: DataRecipe) -> Texts | datasets.DatasetDict:
    """Find the texts that a recipe names, or the dataset, split as it was saved.

    Raises:
        CommandError: there is no such source, or nothing in it.
    """
    if recipe.source == STANDARD_LIBRARY:
        return Texts(standard_library_files(), recipe.column)
    path = Path(recipe.source).expanduser()
    if path.is_file():
        return Texts((path,), recipe.column)
    if not path.is_dir():
        raise CommandError(
            f"data.source={recipe.source!r} is neither a file nor a folder; name one, or "
            f"{STANDARD_LIBRARY!r} for the source files of Python's own library."
        )
    if any((path / name).exists() for name in DATASET_FILES):
        return _dataset(path)
    if ".." in Path(recipe.files).parts:
        raise CommandError(
            f"data.files={recipe.files!r} leads out of data.source={recipe.source!r}; name the "
            "folder that holds all files as data.source."
        )
    try:
        files = tuple(sorted(file for file in path.glob(recipe.files) if file.is_file()))
    except (ValueError, NotImplementedError, IndexError) as cause:  # of an empty one, of "/…"
        raise CommandError(
            f"data.files={recipe.files!r} is no pattern of files inside data.source; use such as "
            "'**/*.txt'."
        ) from cause
    if not files:
        raise CommandError(
            f"data.source={recipe.source!r} has no files that match data.files={recipe.files!r}; "
            "change the pattern."
        )
    return Texts(files, recipe.column)


def standard_library_files() -> tuple[Path, ...]:
    """List the source files of Python's own library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(
        file
        for file in sorted(root.rglob("*.py"))
        if not LEFT_OUT.intersection(file.relative_to(root).parts)
    )


def _dataset(path: Path) -> datasets.DatasetDict:
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as cause:  # whatever a damaged folder may lead to
        message = " ".join(str(cause).split())[:200].rstrip(".")
        raise CommandError(f"the dataset {path} cannot be loaded: {message}.") from cause
    if isinstance(loaded, datasets.Dataset):
        return datasets.DatasetDict(train=loaded)
    if "train" not in loaded:
        raise CommandError(f"the dataset {path} has the splits {', '.join(loaded)}, but no train.")
    return loaded


def _lines(file: Path, column: str) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield str(json.loads(line)[column])
            except (ValueError, TypeError, KeyError) as cause:
                raise CommandError(
                    f"{file}:{number} is not a JSON object with a field {column!r}; set "
                    "data.column to the field that holds the text."
                ) from cause
