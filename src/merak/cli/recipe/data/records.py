"""Records of a recipe's data: rows of files, of saved datasets, and of datasets of the hub."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import datasets  # type: ignore[import-untyped]

from merak.cli.recipe.data.hub import load_hub_dataset
from merak.cli.recipe.schema import STANDARD_LIBRARY, DataRecipe
from merak.core.errors import CommandError, did_you_mean
from merak.zoo.hub import first_words, is_hub_name

LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings")
)
"""Folders of the standard library that are not its own, not everywhere, or tables."""

DATASET_FILES = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files that `datasets` leaves in the folder of a saved dataset."""

HELD_OUT_SPLITS = ("validation", "eval", "test")
"""Splits that are evaluated with, the first that is there."""

PATTERNS = ("**/*.txt", "**/*.jsonl", "**/*.json", "**/*.parquet", "**/*.csv")
"""Files of a folder that are looked for, in this order."""

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
"""Suffixes of images."""

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Records:
    """Records that are read on demand; of a text file one with all of its text.

    Args:
        files: text, JSON lines, JSON, Parquet or CSV.
        column: the name of the field that text files have; others have their own.
        dataset: a dataset, instead of files; map-style, or an iterable one that is streamed.
    """

    files: tuple[Path, ...]
    column: str
    dataset: Any = None

    def stamp(self) -> list[object]:
        """Fingerprint that changes when a record does."""
        if self.dataset is not None:
            return [getattr(self.dataset, "_fingerprint", None), self.column]
        stats = [(str(file), file.stat()) for file in self.files]
        return [self.column, *((name, s.st_size, s.st_mtime_ns) for name, s in stats)]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yield the records in order."""
        if self.dataset is not None:
            yield from self.dataset
        for file in self.files:
            yield from rows_of(file, self.column)

    def each(self) -> tuple[Records, ...]:
        """The records of each dataset that these are of."""
        return (self,)

    @property
    def columns(self) -> list[str]:
        """Names of the fields, of files those of the first record."""
        if self.dataset is not None and self.dataset.column_names is not None:
            return list(self.dataset.column_names)
        return list(next(iter(self), {}))

    @property
    def text_files(self) -> bool:
        """Whether a record is the text of a file."""
        return self.dataset is None and all(_reader(file) is None for file in self.files)

    def check_column(self, column: str, source: str) -> None:
        """Refuse a column that is not there, for the records of a recipe.

        Raises:
            CommandError: it is not; the message names those that are.
        """
        columns = self.columns
        if column not in columns and columns:
            meant = did_you_mean(column, columns)
            raise CommandError(
                f"data.column={column!r} is no column of {source}, which has "
                f"{', '.join(columns)}{meant}"
            )


@dataclass(frozen=True, slots=True)
class Source:
    """Data that a recipe names.

    Args:
        train: records to train on.
        held_out: records of the split to evaluate with; None where there is none.
        images: whether the source is a folder of images.
        parts: the datasets, where there are several; `train` and `held_out` are of all.
    """

    train: Records
    held_out: Records | None = None
    images: bool = False
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One of several datasets.

    Args:
        source: its records.
        weight: how often one of its records comes, beside the weights of the others; None for
            each of its records once.
    """

    source: Source
    weight: float | None


def find_source(recipe: DataRecipe) -> Source:
    """Find the data that a recipe names.

    Raises:
        CommandError: there is no such source, or nothing in it.
    """
    if recipe.source == STANDARD_LIBRARY:
        return Source(Records(standard_library_files(), recipe.column))
    path = Path(recipe.source).expanduser()
    if path.is_file():
        return Source(Records((path,), recipe.column))
    if not path.is_dir():
        return _of_hub(recipe)
    if any((path / name).exists() for name in DATASET_FILES):
        return _splits(_saved(path), recipe, f"the dataset {path}")
    if recipe.files is None and _first_image(path) is not None:
        return _image_folder(path, recipe)
    return Source(Records(_matching(path, recipe), recipe.column))


def _matching(path: Path, recipe: DataRecipe) -> tuple[Path, ...]:
    if recipe.files is not None and ".." in Path(recipe.files).parts:
        raise CommandError(
            f"data.files={recipe.files!r} leads out of data.source={recipe.source!r}; name the "
            "folder that holds all files as data.source."
        )
    patterns = PATTERNS if recipe.files is None else (recipe.files,)
    try:
        found = (tuple(sorted(f for f in path.glob(p) if f.is_file())) for p in patterns)
        files = next((some for some in found if some), ())
    except (ValueError, NotImplementedError, IndexError) as cause:  # of an empty one, of "/…"
        raise CommandError(
            f"data.files={recipe.files!r} is no pattern of files inside data.source; use such as "
            "'**/*.txt'."
        ) from cause
    if not files:
        wanted = (
            f"that match data.files={recipe.files!r}; change the pattern."
            if recipe.files is not None
            else f"of these kinds: {', '.join(p[3:] for p in PATTERNS)}; set data.files to the "
            "pattern of the files that hold text."
        )
        raise CommandError(f"data.source={recipe.source!r} has no files {wanted}")
    return files


def standard_library_files() -> tuple[Path, ...]:
    """List the source files of Python's own library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    return tuple(
        file
        for file in sorted(root.rglob("*.py"))
        if not LEFT_OUT.intersection(file.relative_to(root).parts)
    )


# ---- datasets ----


def _saved(path: Path) -> Any:
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as cause:  # whatever a damaged folder may lead to
        raise CommandError(f"the dataset {path} cannot be loaded: {first_words(cause)}.") from cause
    return datasets.DatasetDict(train=loaded) if isinstance(loaded, datasets.Dataset) else loaded


def _of_hub(recipe: DataRecipe) -> Source:
    what = f"data.source={recipe.source!r} is neither a file nor a folder"
    if not is_hub_name(recipe.source):
        raise CommandError(
            f"{what}; name one, or a dataset of the hub (owner/name), or {STANDARD_LIBRARY!r} for "
            "the source files of Python's own library."
        )
    try:
        loaded = load_hub_dataset(recipe.source, recipe.subset, recipe.streaming)
    except Exception as cause:  # no network, no such dataset, no such subset, …
        raise CommandError(
            f"{what}, and cannot be loaded from the hub as a dataset: {first_words(cause)}."
        ) from cause
    return _splits(loaded, recipe, f"the dataset {recipe.source}")


def _image_folder(path: Path, recipe: DataRecipe) -> Source:
    try:
        loaded = datasets.load_dataset(
            "imagefolder",
            data_dir=str(path),
            streaming=recipe.streaming,
        )
    except Exception as cause:  # whatever a damaged folder may lead to
        raise CommandError(
            f"the images of {path} cannot be loaded: {first_words(cause)}."
        ) from cause
    found = _splits(loaded, recipe, f"the folder {path}")
    return Source(found.train, found.held_out, images=True)


def _splits(loaded: Any, recipe: DataRecipe, what: str) -> Source:
    names = list(loaded)
    for key, wanted in (("split", recipe.split), ("eval_split", recipe.eval_split)):
        if wanted is not None and wanted not in names:
            fix = did_you_mean(wanted, names)
            raise CommandError(
                f"{what} has the splits {', '.join(names)}, but no {wanted}"
                f"{fix if fix != '.' else f'; set data.{key} to one of them.'}"
            )
    held_out = recipe.eval_split or next(
        (name for name in HELD_OUT_SPLITS if name in names and name != recipe.split), None
    )
    return Source(
        Records((), recipe.column, loaded[recipe.split]),
        None if held_out is None else Records((), recipe.column, loaded[held_out]),
    )


def _first_image(path: Path) -> Path | None:
    """Return an image of a folder whose first files are images."""
    some = itertools.islice((f for f in path.rglob("*") if f.is_file()), 50)
    return next((file for file in some if file.suffix.lower() in IMAGE_SUFFIXES), None)


# ---- files ----


def rows_of(file: Path, column: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file.

    Args:
        file: text, JSON lines, JSON, Parquet or CSV; compressed by gzip where it ends in .gz.
        column: the name of the field that text gets.

    Raises:
        CommandError: it cannot be read, or a line of it is no JSON object.
    """
    reader = _reader(file)
    try:
        if reader is None:
            with _opened(file) as text:
                yield {column: text.read()}
        else:
            yield from reader(file)
    except (OSError, EOFError) as cause:
        problem = getattr(cause, "strerror", None) or first_words(cause)
        raise CommandError(f"the data {file} cannot be read: {problem}.") from cause


def _reader(file: Path) -> Callable[[Path], Iterator[Mapping[str, Any]]] | None:
    name = file.name.lower().removesuffix(".gz")
    return _READERS.get(name[name.rfind(".") :]) if "." in name else None


def _opened(file: Path) -> IO[str]:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", errors="replace")
    return file.open(encoding="utf-8", errors="replace", newline=None)


def _json_lines(file: Path) -> Iterator[Mapping[str, Any]]:
    with _opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(line, f"{file}:{number}")


def _object(text: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise CommandError(f"{where} is not JSON ({cause}); mend the line or remove it.") from cause
    if not isinstance(row, dict):
        raise CommandError(f"{where} is no JSON object, such as {{'text': '…'}}; mend the line.")
    return row


def _json(file: Path) -> Iterator[Mapping[str, Any]]:
    with _opened(file) as opened:
        try:
            rows = json.load(opened)
        except (ValueError, RecursionError) as cause:
            raise CommandError(
                f"{file} is not JSON ({cause}); a file with one object a line should end in .jsonl."
            ) from cause
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CommandError(f"{file} is no list of JSON objects; give one, or a .jsonl file.")
    yield from rows


def _parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_ROWS_AT_ONCE):
            yield from batch.to_pylist()
    except ArrowException as cause:
        raise CommandError(f"{file} is not Parquet: {first_words(cause)}.") from cause


def _csv(file: Path) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(sys.maxsize)
    with _opened(file) as lines:
        try:
            yield from csv.DictReader(lines, delimiter="\t" if ".tsv" in file.name else ",")
        except csv.Error as cause:
            raise CommandError(f"{file} is not CSV: {cause}.") from cause


_READERS: dict[str, Callable[[Path], Iterator[Mapping[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": _csv,
}
