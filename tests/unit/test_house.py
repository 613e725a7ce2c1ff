"""Limits that keep the source easy to enter: sizes of folders and functions, a page of folders."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "merak"
MAX_FILES = 16
MAX_LINES = 60


def folders() -> Iterator[Path]:
    return (path.parent for path in sorted(SOURCE.rglob("__init__.py")))


def functions() -> Iterator[tuple[str, int]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                where = f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}"
                yield where, node.end_lineno - node.lineno + 1


def test_no_folder_has_more_files_than_one_can_look_through() -> None:
    counts = {folder: sum(1 for _ in folder.glob("[!_]*.py")) for folder in folders()}
    assert {str(f.relative_to(SOURCE)): n for f, n in counts.items() if n > MAX_FILES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    assert [f"{where}: {lines}" for where, lines in functions() if lines > MAX_LINES] == []


def test_the_architecture_page_names_every_folder() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = [folder.relative_to(SOURCE).as_posix() for folder in folders() if folder != SOURCE]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    last = {name: name.rpartition("/")[2] for name in names}
    missing = [
        name
        for name in names
        if not any(f"`{name}`" in row or _inside(name, last[name], row) for row in rows)
    ]
    assert missing == []


def _inside(name: str, last: str, row: str) -> bool:
    """Tell whether a row of the folder above names a folder by its last part."""
    return row.startswith(f"| `{name.removesuffix('/' + last)}`") and f"`{last}`" in row
