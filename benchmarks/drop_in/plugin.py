"""A plugin of pytest that runs transformers' tests with one library's classes.

`transformers_tests.py` sets the environment: `DROP_IN_CLASSES` is "transformers" or "merak",
`DROP_IN_RESULTS` a file that gets a line of JSON for every test, and `DROP_IN_TEST_S` the seconds
that a test may take.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import datasets
import pytest

CLASSES = os.environ["DROP_IN_CLASSES"]
RESULTS = Path(os.environ["DROP_IN_RESULTS"])
LIMIT_S = int(os.environ.get("DROP_IN_TEST_S", "180"))

LOCAL_DATASETS = {
    "abisee/cnn_dailymail": ("article", "highlights"),
    "fka/awesome-chatgpt-prompts": ("act", "prompt"),
    "openai/gsm8k": ("question", "answer"),
    "Salesforce/wikitext": ("text",),
    "wikitext": ("text",),
}
"""Columns of the hub's datasets that the tests read; a few sentences stand in for them."""


def pytest_configure(config: pytest.Config) -> None:
    """Put the other library's classes in place before the first test is imported."""
    for marker in ("slow", "not_device_test", "is_staging_test"):
        config.addinivalue_line("markers", marker)
    for argument in config.args:
        replace_missing(Path(argument.split("::")[0]))
    datasets.load_dataset = local_dataset(datasets.load_dataset)
    if CLASSES == "merak":
        use_merak()


def library() -> Any:
    """The module that `from transformers import …` reads, which may replace itself on import."""
    importlib.import_module("transformers")  # no plugin of pytest needs to have imported it
    return sys.modules["transformers"]


def use_merak() -> None:
    """Give transformers' names to Merak's classes, in a job of one rank."""
    import merak

    for module in pkgutil.walk_packages(merak.__path__, "merak."):
        importlib.import_module(module.name)  # while Trainer is transformers' own
    merak.init(dp=1, tp=1, pp=1, device="cpu")
    trainer, arguments = merak.MerakTrainer, merak.MerakArguments
    bases: Any = (trainer, library().Seq2SeqTrainer)
    seq2seq_arguments: Any = (arguments, library().Seq2SeqTrainingArguments)
    named = {
        "Seq2SeqTrainer": type("Seq2SeqTrainer", bases, {}),
        "Seq2SeqTrainingArguments": dataclass_of("Seq2SeqTrainingArguments", seq2seq_arguments),
        "Trainer": trainer,
        "TrainingArguments": arguments,
    }
    for name, cls in named.items():
        setattr(library(), name, cls)


def dataclass_of(name: str, bases: tuple[type, ...]) -> type:
    """A dataclass without fields of its own, as a script would write it."""
    from dataclasses import dataclass

    return dataclass(repr=False)(type(name, bases, {}))


def replace_missing(path: Path) -> None:
    """Let names that the installed transformers has no longer skip the tests that use them."""

    class Missing:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pytest.skip("the installed transformers has no such class")

    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "transformers":
                for alias in node.names:
                    if not hasattr(library(), alias.name):
                        setattr(library(), alias.name, Missing)


def local_dataset(load: Any) -> Any:
    """A `load_dataset` that knows a few of the hub's datasets without a network."""

    def loaded(path: str, *args: Any, split: str | None = None, **kwargs: Any) -> Any:
        if path not in LOCAL_DATASETS:
            return load(path, *args, split=split, **kwargs)
        rows = {name: sentences(name) for name in LOCAL_DATASETS[path]}
        made = datasets.Dataset.from_dict(rows)
        if split is None:
            return datasets.DatasetDict({"train": made})
        wanted = split.partition(":")[2].rstrip("]")
        return made.select(range(int(wanted))) if wanted.isdigit() else made

    return loaded


def sentences(column: str) -> list[str]:
    """Texts of different lengths, in words that the small tokenizers know."""
    words = "the quick brown fox jumps over a lazy dog and This is a test sentence".split()
    made = [" ".join(words[j % len(words)] for j in range(i, i + 4 + i % 9)) for i in range(240)]
    return made if column != "answer" else [text[::-1] for text in made]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test has ended."""
    if report.when == "teardown" and not report.failed:
        return
    if report.when == "setup" and report.passed:
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason_of(report)}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def reason_of(report: pytest.TestReport) -> str:
    """The line in which the error stands, or why the test was skipped."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    return " ".join(str(message).split())
