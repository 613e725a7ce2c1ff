"""Data of a recipe: text of many kinds, tokenized and packed once, or a dataset as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from merak.checkpoint.writing import writing_into
from merak.cli.recipe.recipe import TRAIN_TOKENIZER, DataRecipe
from merak.cli.recipe.texts import Texts
from merak.launch.errors import CommandError

END, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"
"""Special tokens of a tokenizer that is trained here."""

TEXTS_AT_ONCE = 1000
"""Texts that are tokenized together."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Samples to train on and to evaluate with.

    Args:
        train: one row a sample; packed text has `input_ids` and `labels`, each (samples, sequence).
        held_out: the same from other texts; None where the recipe holds nothing out.
        tokenizer: what made the tokens; None for a dataset that is used as it is.
    """

    train: datasets.Dataset
    held_out: datasets.Dataset | None
    tokenizer: PreTrainedTokenizerBase | None


def pack_corpus(texts: Texts, held_out: Texts | None, recipe: DataRecipe, folder: Path) -> Corpus:
    """Tokenize texts and pack them into samples of one length, or take what is there already.

    Any number of ranks may call this at once: one of them works, the others wait for it. The
    result appears whole or not at all, under a name made from all that determines it.

    Args:
        texts: what is read.
        held_out: texts to evaluate with; None to hold some of `texts` out.
        recipe: how it is tokenized, packed and split.
        folder: where the result is stored.

    Raises:
        CommandError: the texts do not fill one sample, or there is no such tokenizer.
    """
    ready = folder / _name(texts, held_out, recipe)
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{ready}.lock"):
            if not ready.exists():
                partial = Path(tempfile.mkdtemp(dir=folder, prefix="partial-"))
                try:
                    _pack_into(partial, texts, held_out, recipe)
                    partial.rename(ready)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    parts = {
        name: datasets.load_from_disk(str(ready / name))
        for name in ("train", "held_out")
        if (ready / name).exists()
    }
    return Corpus(
        train=parts["train"],
        held_out=parts.get("held_out"),
        tokenizer=AutoTokenizer.from_pretrained(ready / "tokenizer", trust_remote_code=False),
    )


def _name(texts: Texts, held_out: Texts | None, recipe: DataRecipe) -> str:
    tokenizer = recipe.tokenizer
    stamp = None if tokenizer == TRAIN_TOKENIZER else _stamp(Path(tokenizer).expanduser())
    stamps = [texts.stamp(), held_out and held_out.stamp(), stamp]
    key = json.dumps([*stamps, dataclasses.asdict(recipe)], sort_keys=True)
    return f"packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _stamp(folder: Path) -> list[tuple[str, int]]:
    files = sorted(folder.glob("*")) if folder.is_dir() else []
    return [(file.name, file.stat().st_mtime_ns) for file in files]


def _pack_into(folder: Path, texts: Texts, held_out: Texts | None, recipe: DataRecipe) -> None:
    read = texts.read(recipe.max_bytes)
    if held_out is None:
        train, evaluated = _split(read, recipe.held_out)
    else:
        train, evaluated = read, held_out.read(recipe.max_bytes)
    tokenizer = _tokenizer(train, recipe)
    tokenizer.save_pretrained(folder / "tokenizer")
    for part, name in ((train, "train"), (evaluated, "held_out")):
        if not part:
            continue
        samples = _pack(tokenizer, part, recipe.sequence)
        if len(samples) == 0:
            raise CommandError(
                f"the {name.replace('_', '-')} texts of data.source={recipe.source!r} have fewer "
                f"than data.sequence={recipe.sequence} tokens; give more text, or a shorter "
                "sequence."
            )
        # Causal models shift their labels themselves, so they are the same tokens.
        dataset = datasets.Dataset.from_dict({"input_ids": samples, "labels": samples})
        dataset.save_to_disk(str(folder / name))


def _split(texts: Sequence[str], held_out: float) -> tuple[list[str], list[str]]:
    """Hold out every n-th text, at least one, so that both parts are of all kinds."""
    if not texts:
        raise CommandError("data.source has no text in it; name one that has.")
    if held_out and len(texts) < 2:
        raise CommandError(
            f"{len(texts)} texts cannot be split into texts to train on and data.held_out="
            f"{held_out} to evaluate with; give more files, or data.held_out: 0."
        )
    if not held_out:
        return list(texts), []
    every = min(round(1 / held_out), len(texts))
    training = [text for index, text in enumerate(texts) if index % every != every - 1]
    return training, [text for index, text in enumerate(texts) if index % every == every - 1]


def check_tokenizer(recipe: DataRecipe) -> None:
    """Refuse a tokenizer that is not there.

    Raises:
        CommandError: it is not.
    """
    wanted = recipe.tokenizer
    if wanted != TRAIN_TOKENIZER and not Path(wanted).expanduser().is_dir():
        raise CommandError(
            f"data.tokenizer={wanted!r} is not a folder; name the folder of a tokenizer, or "
            f"{TRAIN_TOKENIZER!r}."
        )


def _tokenizer(texts: Sequence[str], recipe: DataRecipe) -> PreTrainedTokenizerBase:
    if recipe.tokenizer == TRAIN_TOKENIZER:
        return _train_tokenizer(texts, recipe.vocabulary)
    check_tokenizer(recipe)
    folder = Path(recipe.tokenizer).expanduser()
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False
        )
    except Exception as cause:  # whatever a folder's files may lead to
        raise CommandError(
            f"data.tokenizer={recipe.tokenizer!r} holds no tokenizer that transformers can load; "
            "name a folder that a tokenizer's save_pretrained wrote."
        ) from cause
    return found


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END, PAD, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=PAD, mask_token=MASK
    )


def _pack(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], sequence: int
) -> npt.NDArray[np.int32]:
    """Concatenate texts, an end token behind each, and cut them into whole samples."""
    end = tokenizer.eos_token_id
    ending = [end] if isinstance(end, int) else []
    pieces: list[npt.NDArray[np.int32]] = []
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        some = list(texts[first : first + TEXTS_AT_ONCE])
        encoded = tokenizer(
            some,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        pieces += [np.array([*ids, *ending], dtype=np.int32) for ids in encoded["input_ids"]]
    tokens = np.concatenate(pieces)
    num_samples = len(tokens) // sequence
    return tokens[: num_samples * sequence].reshape(num_samples, sequence)
