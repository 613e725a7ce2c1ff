"""The examples' corpus, built by several processes at once, and what is measured against it."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.demo import corpus as corpus_module
from examples.demo import default_degrees, next_byte_samples
from examples.demo.corpus import END_OF_FILE, HELD_OUT_EVERY, build_corpus, unigram_loss

NUM_FILES = 3 * HELD_OUT_EVERY
SIZES = {"vocab_size": 300, "block_size": 8}


@pytest.fixture
def few_files(tmp_path, monkeypatch):
    """A standard library of short files."""
    root = tmp_path / "stdlib"
    root.mkdir()
    for index in range(NUM_FILES):
        (root / f"module{index:03}.py").write_text(f"value = {index}\n" * 5)
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("not the library's own")
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(root))
    return root


def test_every_block_is_whole_and_labels_are_the_inputs(few_files, tmp_path):
    corpus = build_corpus(tmp_path / "data", **SIZES)
    for part in (corpus.train, corpus.held_out):
        rows = part.with_format("numpy")[:]
        assert rows["input_ids"].shape == (len(part), 8)
        assert np.array_equal(rows["input_ids"], rows["labels"])
    assert len(corpus.tokenizer) <= 300
    assert 0 < corpus.unigram_loss < math.log(300)


def test_held_out_files_are_not_trained_on(few_files, tmp_path):
    corpus = build_corpus(tmp_path / "data", **SIZES)
    train = corpus.tokenizer.decode(np.concatenate(corpus.train["input_ids"]))
    held_out = corpus.tokenizer.decode(np.concatenate(corpus.held_out["input_ids"]))
    assert f"value = {HELD_OUT_EVERY}\n" in held_out
    assert f"value = {HELD_OUT_EVERY}\n" not in train
    assert f"value = 1\n{END_OF_FILE}" in train
    assert "not the library's own" not in train + held_out


def test_what_was_built_is_taken_again_and_other_sizes_are_not(few_files, tmp_path, monkeypatch):
    first = build_corpus(tmp_path / "data", **SIZES)
    built = []
    build = corpus_module._build
    monkeypatch.setattr(corpus_module, "_build", lambda *a: built.append(a) or build(*a))
    again = build_corpus(tmp_path / "data", **SIZES)
    assert not built
    assert again.train["input_ids"][:] == first.train["input_ids"][:]
    build_corpus(tmp_path / "data", vocab_size=300, block_size=4)
    (few_files / "module000.py").write_text("changed")
    build_corpus(tmp_path / "data", **SIZES)
    assert len(built) == 2


def test_nothing_half_built_is_left(few_files, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(corpus_module, "_pack", fail)
    with pytest.raises(OSError, match="disk full"):
        build_corpus(tmp_path / "data", **SIZES)
    assert [path.suffix for path in (tmp_path / "data").iterdir()] in ([".lock"], [])


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path):
    """Real processes, as torchrun's ranks are; each says which folder it took, and when made."""
    script = (
        "import sys; from examples.demo import corpus as c\n"
        "build = c._build\n"
        "c._build = lambda *a: (print('built'), build(*a))\n"
        "files = c.source_files()[:40]\n"
        "c.source_files = lambda: files\n"
        "made = c.build_corpus(sys.argv[1], vocab_size=300, block_size=16)\n"
        "print(len(made.train), sum(made.train[-1]['input_ids']))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"}
    ranks = [
        subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [rank.communicate()[0].split("\n") for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert sum("built" in lines for lines in said) == 1
    assert len({[line for line in lines if line][-1] for lines in said}) == 1


def test_too_few_sources_are_refused(few_files, tmp_path):
    for file in few_files.glob("module0[1-9]*.py"):
        file.unlink()
    with pytest.raises(SystemExit, match="too few to learn from; use a Python that"):
        build_corpus(tmp_path / "data", **SIZES)


def test_unigram_loss_is_the_entropy_of_smoothed_frequencies():
    train = np.array([[0, 0, 0, 1]])  # counts 4, 2, 1 with one more for each of three tokens
    held_out = np.array([[2, 0, 1, 2]])  # of which the first is not predicted
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_loss(train, held_out, vocab_size=3) == pytest.approx(expected)


def test_windows_of_bytes(few_files):
    samples = next_byte_samples(50, num_before=4, seed=1).with_format("numpy")[:]
    text = b"".join(path.read_bytes() for path in sorted(few_files.glob("*.py")))
    assert samples["context"].shape == (50, 4)
    for context, label in zip(samples["context"], samples["labels"], strict=True):
        assert bytes([*context, label]) in text
    other = next_byte_samples(50, num_before=4, seed=2).with_format("numpy")[:]
    assert not np.array_equal(samples["context"], other["context"])


@pytest.mark.parametrize(
    ("num_ranks", "max_tp", "degrees"),
    [
        (1, 2, (1, 1, 1)),
        (2, 2, (1, 1, 2)),
        (3, 2, (3, 1, 1)),
        (4, 2, (1, 2, 2)),
        (8, 2, (2, 2, 2)),
        (4, 1, (2, 1, 2)),
    ],
)
def test_degrees_multiply_to_the_number_of_ranks(monkeypatch, num_ranks, max_tp, degrees):
    monkeypatch.setenv("WORLD_SIZE", str(num_ranks))
    assert default_degrees(max_tp) == degrees


def test_a_single_process_has_degree_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert default_degrees() == (1, 1, 1)
