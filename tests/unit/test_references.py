"""References in docstrings and documentation: modules, files and names that they quote exist."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from merak.cli.recipe.schema import DataRecipe
from merak.core.errors import PackageError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "merak"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

QUOTED = re.compile(r"`+([^`\n]+)`+")
DOTTED = re.compile(r"merak(\.\w+)+")
SUFFIXES = "py|md|yaml|yml|toml|svg|txt"
FILE = re.compile(rf"[\w.-]+(/[\w.-]+)+\.({SUFFIXES})")
FOLDERS = frozenset(path.name for path in SOURCE.iterdir() if path.is_dir())
MODULE = re.compile(rf"({'|'.join(sorted(FOLDERS))})(\.[a-z]\w*)+(\.[A-Z]\w*)*")

OF_USERS = {
    "trainer.generate": "a method of a trainer that a script has made",
    "trainer.save_model": "likewise",
}
"""References to what is not of this repository → why they are there."""


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Docstrings of a file, those below attributes and constants included, with their lines."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, value.value


def quoted() -> Iterator[tuple[str, str]]:
    """Every backticked text of docstrings and pages, with its place."""
    for file in sorted(SOURCE.rglob("*.py")):
        for line, text in docstrings(file):
            for found in QUOTED.finditer(text):
                yield f"{file.relative_to(ROOT)}:{line}", found[1]
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for found in QUOTED.finditer(line):
                yield f"{page.relative_to(ROOT)}:{number}", found[1]


@cache
def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one at any depth."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        return _has(found, parts[length:])
    return False


def _has(found: Any, names: list[str]) -> bool:
    for name in names:
        annotations = getattr(found, "__annotations__", {})
        try:
            if not hasattr(found, name):
                return name in annotations
        except PackageError:  # of an extra that is not installed
            return name in found.__all__
        found = getattr(found, name)
    return True


def is_field(text: str) -> bool:
    """Whether a text is a field of a recipe's section `data`, which is also a folder's name."""
    return text.removeprefix("data.") in {part.name for part in dataclasses.fields(DataRecipe)}


def is_broken(text: str) -> bool:
    """Whether a quoted text names a module, file or name of this repository that is not there."""
    text = re.split(r"[(:]", text)[0].strip()
    if is_field(text):
        return False
    if text in OF_USERS or "NAME" in text or hasattr(builtins, text):
        return False
    if DOTTED.fullmatch(text):
        return not resolves(text)
    if FILE.fullmatch(text):
        own = text.partition("/")[0] in FOLDERS or (ROOT / text.partition("/")[0]).is_dir()
        return own and not ((ROOT / text).exists() or (SOURCE / text).exists())
    if MODULE.fullmatch(text):
        return not resolves(f"merak.{text}")
    return False


def test_what_is_looked_for() -> None:
    assert is_broken("merak.core.nowhere") and not is_broken("merak.core.mesh.Mesh.pp_rank")
    assert is_broken("engine.nowhere.Thing") and not is_broken("engine.build")
    assert is_broken("core/nowhere.py") and not is_broken("core/mesh.py")
    assert not is_broken("torch.nn.Linear") and not is_broken("merak.init(dp=2)")


def test_every_quoted_name_is_there() -> None:
    assert [f"{place}: {text}" for place, text in quoted() if is_broken(text)] == []


def test_versions_are_the_same_wherever_they_are_named() -> None:
    """What pyproject.toml requires is what `make compat` tests, and what readers are told."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    least = dict(one.split(">=") for one in project["dependencies"])
    torch, transformers = least["torch"], least["transformers"]
    python = project["requires-python"].removeprefix(">=")
    told = {
        "Makefile": f"OLDEST := torch=={torch}.* transformers=={transformers}.*\n",
        "README.md": f"Merak needs torch {torch} or newer and transformers {transformers} or newer",
        "CHANGELOG.md": f"needs Python {python}, torch {torch} and transformers {transformers}, or",
        "CITATION.cff": f"\nversion: {project['version']}\n",
    }
    for file, words in told.items():
        assert words in (ROOT / file).read_text(encoding="utf-8"), file
