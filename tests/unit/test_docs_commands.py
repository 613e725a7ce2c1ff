"""Every command of README and docs is one that its program takes; every block is of a known kind.

Those that run here are run in `tests/multirank/test_docs.py`.
"""

from __future__ import annotations

import ast
import json

import pytest
import yaml

from tests.snippets import commands as parsing
from tests.snippets.blocks import COMMANDS, KINDS, Block, CommentError, blocks, blocks_of
from tests.snippets.commands import Command, commands, problem, script_problems

WITHOUT_CHECK = {
    "text": "what a program prints, with times and addresses of one run",
}
"""Languages whose blocks are not checked where no comment says how → why."""


@pytest.mark.parametrize("command", commands(), ids=str)
def test_a_command_is_taken_by_its_program(command: Command) -> None:
    assert problem(command) is None


def test_scripts_take_their_arguments() -> None:
    assert script_problems() == {}


def test_every_block_is_checked_or_says_why_not() -> None:
    unknown = [
        block.place
        for block in blocks()
        if block.language not in {*COMMANDS, "python", "diff", *WITHOUT_CHECK}
        and block.kind is None
        and block.reason is None
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "block",
    [block for block in blocks() if block.language == "python" and block.kind != "output"],
    ids=lambda block: block.place,
)
def test_a_program_compiles(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize(
    "block",
    [block for block in blocks() if block.language in ("json", "yaml") and block.kind != "output"],
    ids=lambda block: block.place,
)
def test_a_file_can_be_read(block: Block) -> None:
    loaded = (json.loads if block.language == "json" else yaml.safe_load)(block.text)
    assert isinstance(loaded, dict)


def block_of(text: str, comment: str = "") -> Block:
    (block,) = blocks_of(f"{comment}\n```console\n{text}\n```", "page.md")
    return block


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("merak trace --modell GPT2LMHeadModel", "--modell"),
        ("merak unpack", "unpack"),
        ("merak launch slurm --nodes many train.py", "--nodes"),
        ("make everything", "target"),
        ("torchrun --ranks 2 train.py", "torchrun"),
        ("torchrun -m merak.cli.main doctor --rank 2", "--rank"),
        ("torchrun examples/nowhere.py", "nowhere"),
        ("python benchmarks/nowhere.py", "script"),
        ("pip install merak-train[nothing]", "nothing"),
        ("frobnicate", "frobnicate"),
    ],
)
def test_a_wrong_command_is_found(command: str, word: str) -> None:
    (parsed,) = parsing.commands_of(block_of(command))
    found = problem(parsed)
    assert found is not None and word in found


def test_words_of_a_command() -> None:
    text = "OMP_NUM_THREADS=1 merak plan \\\n  --config '{\"a\": 1}'   # a comment\nmake demo"
    assert [command.words for command in parsing.commands_of(block_of(text))] == [
        ("merak", "plan", "--config", '{"a": 1}'),
        ("make", "demo"),
    ]


def test_comments_above_a_block() -> None:
    assert block_of("x", "<!-- not run: needs two hosts -->").reason == "needs two hosts"
    said = block_of("x", "<!-- ci: ranks=2 with=model,train -->")
    assert (said.ranks, said.names) == (2, ("model", "train"))
    assert all(block_of("x", f"<!-- ci: {kind} -->").kind == kind for kind in KINDS)
    with pytest.raises(CommentError, match=r"page.md:2: .*'rnaks=2'"):
        block_of("x", "<!-- ci: rnaks=2 -->")
