"""A text corpus that every machine has: the source files of Python's own standard library."""

import hashlib
import json
import math
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_FILE = "<|endoftext|>"
# Not every distribution of Python brings these.
LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "distutils"),
    *("encodings", "pydoc_data"),  # tables, not code
}
HELD_OUT_EVERY = 20


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of the standard library, packed into blocks of one length.

    Args:
        train: columns input_ids and labels, (blocks, block size).
        held_out: the same, of files that are not in `train`.
        tokenizer: the byte-level BPE that made them.
        unigram_loss: nats per held-out token of a model that knows only how often each token is.
    """

    train: datasets.Dataset
    held_out: datasets.Dataset
    tokenizer: PreTrainedTokenizerFast
    unigram_loss: float


def build_corpus(folder: str | Path, *, vocab_size: int, block_size: int) -> Corpus:
    """Read, tokenize and pack the standard library, or take what an earlier call left.

    Any number of processes may call this at once: one of them builds, the others wait for it.

    Args:
        folder: where corpora are kept, one subfolder for each vocabulary and block size.
        vocab_size: tokens of the byte-level BPE, which is trained here.
        block_size: tokens per sample.
    """
    files = source_files()
    sizes = [(str(file), file.stat().st_size) for file in files]
    key = hashlib.sha256(json.dumps([sizes, vocab_size, block_size]).encode()).hexdigest()[:12]
    ready = Path(folder) / f"python-stdlib-{key}"
    ready.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{ready}.lock"):
        if not ready.exists():
            partial = Path(tempfile.mkdtemp(dir=ready.parent, prefix="partial-"))
            try:
                _build(files, partial, vocab_size, block_size)
                partial.rename(ready)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return Corpus(
        train=datasets.load_from_disk(str(ready / "train")),
        held_out=datasets.load_from_disk(str(ready / "held_out")),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(ready / "tokenizer"),
        unigram_loss=json.loads((ready / "unigram.json").read_text())["loss"],
    )


def source_files() -> list[Path]:
    """The standard library's own source files, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT.intersection(path.relative_to(root).parts)
    ]
    if len(files) < 2 * HELD_OUT_EVERY:
        raise SystemExit(
            f"{root} holds {len(files)} source files of the standard library, too few to learn "
            "from; use a Python that was installed with its sources."
        )
    return files


def _build(files: list[Path], folder: Path, vocab_size: int, block_size: int) -> None:
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    held_out = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY == 0]
    train = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY != 0]
    tokenizer = _train_tokenizer(train, vocab_size)
    train_blocks = _pack(tokenizer, train, block_size)
    held_out_blocks = _pack(tokenizer, held_out, block_size)
    _save(train_blocks, folder / "train")
    _save(held_out_blocks, folder / "held_out")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_FILE, model_max_length=block_size
    )
    fast.save_pretrained(folder / "tokenizer")
    loss = unigram_loss(train_blocks, held_out_blocks, vocab_size)
    (folder / "unigram.json").write_text(json.dumps({"loss": loss}))


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_FILE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _pack(tokenizer: Tokenizer, texts: list[str], block_size: int) -> np.ndarray:
    """All texts one after the other, an end-of-file token between them, cut into whole blocks."""
    end = tokenizer.token_to_id(END_OF_FILE)
    pieces = [np.array([*encoding.ids, end]) for encoding in tokenizer.encode_batch(texts)]
    tokens = np.concatenate(pieces)
    num_blocks = len(tokens) // block_size
    return tokens[: num_blocks * block_size].reshape(num_blocks, block_size)


def _save(blocks: np.ndarray, folder: Path) -> None:
    # The model shifts labels itself, so they are the same tokens.
    datasets.Dataset.from_dict({"input_ids": blocks, "labels": blocks}).save_to_disk(str(folder))


def unigram_loss(train: np.ndarray, held_out: np.ndarray, vocab_size: int) -> float:
    """Nats per token of token frequencies in `train`, at the tokens a language model predicts.

    Args:
        train: (blocks, block size); each token of the vocabulary counts once more than it is seen.
        held_out: (blocks, block size); a block's first token is not predicted.
        vocab_size: tokens in the vocabulary.
    """
    counts = np.bincount(train.ravel(), minlength=vocab_size) + 1
    log_frequencies = np.log(counts) - math.log(counts.sum())
    return float(-log_frequencies[held_out[:, 1:]].mean())
