"""Words of a private dialect that were replaced by the field's terms and must not come back.

Names of the package (of files, classes, functions, parameters, variables and attributes) are split
into their words; docstrings, messages and the documentation are searched for phrases.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "merak"

WORDS = {
    "alignment": "graph_diff",
    "alike": "equal, same",
    "asked": "requested, wanted",
    "backoff": "oom_replan",
    "chance": "branches, random condition",
    "council": "batch exchange",
    "dear": "slow, selective",
    "deriver": "auto_shard",
    "halved": "sub_microbatch",
    "halves": "sub_microbatches",
    "hollow": "drain step",
    "lacking": "missing",
    "lent": "remote",
    "loan": "remote",
    "loans": "remote",
    "near": "did_you_mean",
    "outlast": "extend_timeouts",
    "parting": "divergence",
    "picking": "dynamic sizes",
    "picks": "dynamic region",
    "pretend": "fake",
    "proxies": "empty_weights",
    "relief": "oom_guard",
    "restrict": "truncate",
    "said": "message, spec",
    "settle": "apply, or hoist, parameter writes",
    "settled": "parameter_writes",
    "stash": "offloaded_tensors",
    "surroundings": "segment context",
    "told": "reported, configured",
    "verdict": "comparison",
    "whereabouts": "activation_policy",
    "wish": "option, spec",
    "wishes": "options",
    "workshop": "workspace",
}
"""Words of names → what to use instead."""

PHRASES = {
    "tensors? without numbers": "fake tensor",
    "sums? over replicas": "all-reduce",
    "(layers|convolutions|steps|ranks) in a row": "consecutive, contiguous",
    "pipeline positions?": "pp rank",
    "way of the data": "data flow",
    "truth values?": "boolean",
    "(runs?|runs? it|parts|part|microbatches) in halves": "sub-microbatches",
    "kept whole": "opaque",
}
"""Phrases of docstrings, comments, messages and documentation → what to use instead."""

NAMES_THAT_STAY = {
    "cli/schedule.py:in_halves": "field of the option --in-halves, which users type",
}
"""Names that have a word of the glossary → why."""


def words_of(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def names_of(file: Path) -> Iterator[str]:
    """Every name that a file defines, its own included."""
    yield file.stem
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.rglob(pattern))
    assert found
    return found


def test_words_are_split() -> None:
    assert words_of("_AwaitedDict") == {"awaited", "dict"}
    assert words_of("in_halves2") == {"in", "halves"}


def test_names_are_of_the_field() -> None:
    wrong = {
        f"{file.relative_to(SOURCE).as_posix()}:{name}": WORDS[word]
        for file in files(SOURCE, "*.py")
        for name in names_of(file)
        for word in words_of(name) & WORDS.keys()
    }
    assert {n: better for n, better in wrong.items() if n not in NAMES_THAT_STAY} == {}
    assert NAMES_THAT_STAY.keys() <= wrong.keys(), "an exception that is needed no more"


def test_sentences_are_of_the_field() -> None:
    pages = [*files(ROOT / "docs", "*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    wrong = {
        f"{file.relative_to(ROOT)}:{number}: {found[0]}": better
        for file in (*files(SOURCE, "*.py"), *pages)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for phrase, better in PHRASES.items()
        if (found := re.search(rf"\b{phrase}\b", line, re.IGNORECASE))
    }
    assert wrong == {}
