"""Data of a recipe as datasets: prepared once in the output folder, or read while training."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
from datasets.arrow_writer import ArrowWriter  # type: ignore[import-untyped]
from filelock import FileLock
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from merak.checkpoint.writing import writing_into
from merak.cli.recipe.data.conversations import encoder
from merak.cli.recipe.data.encoding import (
    ROWS_AT_ONCE,
    Counts,
    EncodedRows,
    Encoding,
    HeldOut,
    Rows,
    every_nth,
    first_bytes,
    texts_of,
)
from merak.cli.recipe.data.mixture import Mixture, Renamed, drawn, weights_of
from merak.cli.recipe.data.objective import Objective
from merak.cli.recipe.data.records import Records, Source, rows_of
from merak.cli.recipe.data.tokenizer import load_tokenizer, train_tokenizer, with_template
from merak.cli.recipe.schema import CHAT, TRAIN_TOKENIZER, DataRecipe
from merak.core.errors import CommandError
from merak.core.files.json_file import read_json
from merak.core.files.private_files import sync_folder
from merak.core.kinds import from_fields

STREAMED_EVAL_SAMPLES = 256
"""Samples that are evaluated with where data is streamed and the recipe names no number."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Samples to train on and to evaluate with.

    Args:
        train: one row a sample.
        held_out: the same from other records; None where the recipe holds nothing out.
        processor: what made the samples, to be saved beside the model: a tokenizer or an image
            processor; None for a dataset that is used as it is.
        summary: what there is, for people; empty where nobody has counted.
        classes: names of the classes of images.
    """

    train: Any
    held_out: Any
    processor: Any = None
    summary: str = ""
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenJob:
    """Work to make samples of tokens from records.

    Args:
        recipe: the data section, as the recipe has it.
        source: the records.
        objective: what the model is trained for.
        format: `text` or `chat`.
        packing: `separate`, `joined` or `none`.
        tokenizer: folder or name of the tokenizer, or `train`.
        folder: where what is prepared is stored.
        seed: of the order in which streamed records, or those of several datasets, are read.
    """

    recipe: DataRecipe
    source: Source
    objective: Objective
    format: str
    packing: str
    tokenizer: str
    folder: Path
    seed: int = 42

    def encoding(self, tokenizer: PreTrainedTokenizerBase) -> Encoding:
        """Return how records become samples."""
        return Encoding(self.recipe, tokenizer, self.objective, self.format, self.packing)

    def rows(self, held_out: bool) -> Rows:
        """Read the records to train on, or those to evaluate with.

        Of several datasets, each is divided for itself: no record that is drawn twice is in both.
        """
        if parts := self.source.parts:
            alone = [dataclasses.replace(self, source=own.source) for own in parts]
            if held_out:
                return itertools.chain.from_iterable(job.rows(held_out=True) for job in alone)
            again = [functools.partial(job.rows, held_out=False) for job in alone]
            return drawn(again, weights_of(parts), self.seed)
        limit, column = self.recipe.max_bytes, self.recipe.column
        if self.source.held_out is not None:
            chosen = self.source.held_out if held_out else self.source.train
            return first_bytes(chosen, column, limit)
        everything = first_bytes(self.source.train, column, limit)
        every = self._every()
        return every_nth(everything, every, held_out) if every else (() if held_out else everything)

    def _every(self) -> int:
        """Which record is held out, so that both parts are of all kinds; 0 for none."""
        share = self.recipe.held_out
        if not share:
            return 0
        wanted = round(1 / share)
        rows = first_bytes(self.source.train, self.recipe.column, self.recipe.max_bytes)
        found = sum(1 for _ in itertools.islice(rows, wanted))
        if found == 1:
            raise CommandError(
                f"one record cannot be split into what is trained on and data.held_out={share} to "
                "evaluate with; give more files, or data.held_out: 0."
            )
        return min(wanted, found)


# ---- prepared ----


def prepare(job: TokenJob) -> Corpus:
    """Tokenize and pack records, or take what is there already.

    Any number of ranks may call this at once: one of them works, the others wait for it. The
    result appears whole or not at all, under a name made from all that determines it.

    Raises:
        CommandError: the records do not fill one sample, or there is no such tokenizer.
    """
    ready = _made_once(job, "packed", lambda folder: _pack_into(folder, job))
    parts = {
        name: datasets.load_from_disk(str(ready / name))
        for name in ("train", "held_out")
        if (ready / name).exists()
    }
    try:
        counts = from_fields(Counts, read_json(ready / "counts.json"))
    except ValueError as cause:
        raise CommandError(
            f"{ready} is damaged (counts.json {cause}); remove it, and it is made anew."
        ) from cause
    limit = job.recipe.eval_samples
    held_out = parts.get("held_out")
    if held_out is not None and limit is not None:
        held_out = held_out.select(range(min(limit, len(held_out))))
    tokenizer = AutoTokenizer.from_pretrained(ready / "tokenizer", trust_remote_code=False)
    return Corpus(parts["train"], held_out, tokenizer, _summary(job, parts["train"], counts))


def _made_once(job: TokenJob, kind: str, make: Callable[[Path], None]) -> Path:
    """Let one rank fill a folder, which then has a name by what determines its content."""
    ready = job.folder / f"{kind}-{_key(job)}"
    with writing_into(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{ready}.lock"):
            if not ready.exists():
                partial = Path(tempfile.mkdtemp(dir=job.folder, prefix="partial-"))
                try:
                    make(partial)
                    sync_folder(partial)
                    partial.rename(ready)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return ready


def _key(job: TokenJob) -> str:
    recipe = dataclasses.replace(job.recipe, eval_samples=None)  # which changes no sample
    held_out = job.source.held_out
    template = recipe.chat_template
    content: list[object] = [
        job.source.train.stamp(),
        held_out and held_out.stamp(),
        None if job.tokenizer == TRAIN_TOKENIZER else _stamp(Path(job.tokenizer).expanduser()),
        None if template is None else _stamp(Path(template).expanduser()),
        job.tokenizer,
        job.objective.name,
        job.format,
        job.packing,
        dataclasses.asdict(recipe),
    ]
    if job.source.parts:
        content.append(job.seed)  # of the order in which they come
    key = json.dumps(content, sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _stamp(path: Path) -> list[tuple[str, int]]:
    files = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
    return [(file.name, file.stat().st_mtime_ns) for file in files]


def _pack_into(folder: Path, job: TokenJob) -> None:
    tokenizer = _make_tokenizer(job)
    tokenizer.save_pretrained(folder / "tokenizer")
    encoding = job.encoding(tokenizer)
    counts = Counts()
    for name, held_out in (("train", False), ("held_out", True)):
        own = counts if name == "train" else Counts()
        num_samples = _write(folder / name, encoding, job.rows(held_out), own)
        if num_samples == 0 and (own.documents or name == "train"):
            raise _too_little(job, name.replace("_", "-"), own)
    (folder / "counts.json").write_text(json.dumps(dataclasses.asdict(counts)), encoding="utf-8")


def _write(folder: Path, encoding: Encoding, rows: Rows, counts: Counts) -> int:
    """Write samples one after the other, so that they need not fit the memory."""
    file = folder.with_suffix(".arrow")
    with ArrowWriter(features=encoding.features, path=str(file)) as writer:
        num_samples = 0
        for sample in encoding.samples(rows, counts):
            writer.write(sample)
            num_samples += 1
        if num_samples:
            writer.finalize()
    if num_samples:
        with _without_bars():  # for what is a copy of a file
            datasets.Dataset.from_file(str(file)).save_to_disk(str(folder))
    file.unlink(missing_ok=True)
    return num_samples


@contextmanager
def _without_bars() -> Iterator[None]:
    """Context in which datasets shows no progress bars."""
    shows = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shows:
            datasets.enable_progress_bars()


def _too_little(job: TokenJob, part: str, counts: Counts) -> CommandError:
    source = f"data.source={job.recipe.name!r}"
    if counts.without_labels:
        return CommandError(
            f"none of the {counts.without_labels} records of {source} has an answer within "
            f"data.sequence={job.recipe.sequence} tokens; raise data.sequence."
        )
    if not counts.documents:
        return CommandError(f"{source} has no text in it; name one that has.")
    return CommandError(
        f"the {part} records of {source} have fewer tokens than data.sequence="
        f"{job.recipe.sequence}; give more text, or a shorter sequence."
    )


def _summary(job: TokenJob, train: Any, counts: Counts) -> str:
    what = "conversations" if job.format == CHAT else "documents"
    parts = [
        f"{len(train):,} samples of {job.recipe.sequence:,} tokens from {counts.documents:,} "
        f"{what} ({_PACKED[job.packing]})"
    ]
    if counts.cut:
        parts.append(f"{counts.cut:,} are longer than a sample and lose their end")
    if counts.without_labels:
        parts.append(f"{counts.without_labels:,} without an answer inside a sample are left out")
    return "; ".join(parts)


_PACKED = {
    "separate": "packed, attention inside a document",
    "joined": "packed, attention across documents",
    "none": "one a sample",
}


def _make_tokenizer(job: TokenJob) -> PreTrainedTokenizerBase:
    if job.tokenizer != TRAIN_TOKENIZER:
        tokenizer = load_tokenizer(job.tokenizer)
    else:
        texts: Iterable[str] = (
            (_all_text(row) for row in job.rows(held_out=False))
            if job.format == CHAT
            else texts_of(job.rows(held_out=False), job.recipe.column)
        )
        sentinels = job.objective is Objective.SPANS
        tokenizer = train_tokenizer(texts, job.recipe.vocabulary, sentinels)
    with_template(tokenizer, job.recipe)
    return tokenizer


def check_conversation(source: Source, recipe: DataRecipe, tokenizer: str) -> None:
    """Tokenize the first conversation, to refuse a template that does not fit before ranks start.

    Args:
        source: the records, of the format chat.
        recipe: how they are prepared.
        tokenizer: as of `tokenizer_name`.

    Raises:
        CommandError: the tokenizer has no chat template, or the record does not fit it.
    """
    for record in itertools.islice(source.train, 1):
        if tokenizer == TRAIN_TOKENIZER:
            own = train_tokenizer([_all_text(record)], recipe.vocabulary)
        else:
            own = load_tokenizer(tokenizer)
        with_template(own, recipe)
        encoder(own, recipe.prompt_loss)(record)


def _save_tokenizer(folder: Path, job: TokenJob) -> None:
    _make_tokenizer(job).save_pretrained(folder)


def _all_text(value: Any) -> str:
    if isinstance(value, Mapping):
        value = list(value.values())
    return "\n".join(map(_all_text, value)) if isinstance(value, list) else str(value)


# ---- streamed ----


def stream(job: TokenJob) -> Corpus:
    """Make datasets that read, tokenize and pack records while they are iterated.

    Raises:
        CommandError: there is no such tokenizer, or no record.
    """
    ready = _made_once(job, "tokenizer", lambda folder: _save_tokenizer(folder, job))
    tokenizer = AutoTokenizer.from_pretrained(ready, trust_remote_code=False)
    encoding = job.encoding(tokenizer)
    source, share = job.source, job.recipe.held_out
    train, held_out = _rows(source.train), None
    if source.held_out is not None:
        held_out = _rows(source.held_out)
    elif share:
        held_out = train.filter(HeldOut(share, held_out=True))
        if next(iter(held_out), None) is None:
            raise CommandError(
                f"data.held_out={share:g} of the records of data.source={job.recipe.name!r} are "
                "evaluated with, chosen by their content, but these are none; raise it, or set "
                "data.held_out=0."
            )
        train = train.filter(HeldOut(share, held_out=False))
    if job.recipe.shuffle_buffer:
        train = train.shuffle(seed=job.seed, buffer_size=job.recipe.shuffle_buffer)
    columns = source.train.columns
    if held_out is not None:
        limit = job.recipe.eval_samples or STREAMED_EVAL_SAMPLES
        held_out = _encoded(held_out, encoding, columns).take(limit)
    summary = f"samples of {job.recipe.sequence:,} tokens, read while training"
    return Corpus(
        _encoded(train, encoding, columns),
        held_out,
        tokenizer,
        f"{summary} ({_PACKED[job.packing]})",
    )


def _rows(records: Records) -> datasets.IterableDataset:
    if isinstance(records, (Mixture, Renamed)):
        return datasets.IterableDataset.from_generator(_rows_of, gen_kwargs={"records": records})
    rows = records.dataset
    if rows is None:
        read = functools.partial(_rows_of_files, column=records.column)
        return datasets.IterableDataset.from_generator(
            read, gen_kwargs={"files": [str(file) for file in records.files]}
        )
    return rows.to_iterable_dataset() if isinstance(rows, datasets.Dataset) else rows


def _rows_of(records: Records) -> Iterator[Mapping[str, Any]]:
    yield from records


def _rows_of_files(files: list[str], column: str) -> Iterable[Mapping[str, Any]]:
    for file in files:
        yield from rows_of(Path(file), column)


def _encoded(rows: Any, encoding: Encoding, columns: list[str]) -> Any:
    return rows.map(
        EncodedRows(encoding),
        batched=True,
        batch_size=ROWS_AT_ONCE,
        remove_columns=columns,
        features=encoding.features,
    )
