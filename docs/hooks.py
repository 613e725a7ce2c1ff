"""MkDocs hooks that make the reference, and let the search find users' pages first.

The reference has a page for each folder and file of src/merak. No page is listed by hand, so a new
module is in the reference as soon as it exists. The command line's page has the help of every
command.
"""

import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PACKAGE = "merak"
SOURCE = Path("src") / PACKAGE

FOR_DEVELOPERS = (
    "reference/", "architecture.md", "benchmarks.md", "map.md", "zoo.md", "mutations.md",
)  # fmt: skip
"""Pages, by how their paths begin, that the search shows behind those for users."""

BEHIND = 0.1
"""Factor of their scores; a page of the reference has a word more often than the page about it."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the empty Reference section of the navigation."""
    assert config.nav is not None
    section = next(entry for entry in config.nav if "Reference" in entry)
    section["Reference"] = [{title: path} for title, path, _ in pages()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages that the navigation names."""
    for _, path, content in pages():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lower the score of a page for developers, unless it says otherwise itself."""
    if page.file.src_uri.startswith(FOR_DEVELOPERS) and not page.file.src_uri.endswith(
        ("/merak.md", "/command.md")
    ):
        page.meta.setdefault("search", {"boost": BEHIND})
    return markdown


def pages() -> Iterator[tuple[str, str, str]]:
    """Title, path and Markdown of each page of the reference."""
    if (SOURCE / "__init__.py").exists():
        yield PACKAGE, f"reference/{PACKAGE}.md", public_names_page()
    for entry in sorted(SOURCE.iterdir()):
        modules = list(modules_of(entry))
        if modules:
            content = "\n".join([f"# {modules[0]}\n", *map(directive, modules)])
            yield modules[0], f"reference/{modules[0]}.md", content
    if (SOURCE / "cli" / "main.py").exists():
        yield "The merak command", "reference/command.md", command_page()


def modules_of(entry: Path) -> Iterator[str]:
    """Dotted names of the public modules in one file or folder, the folder itself first."""
    files = [entry] if entry.suffix == ".py" else entry.rglob("*.py")
    names = (file.relative_to(SOURCE.parent).with_suffix("").parts for file in files)
    for parts in sorted(name[:-1] if name[-1] == "__init__" else name for name in names):
        if len(parts) > 1 and not any(part.startswith("_") for part in parts):
            yield ".".join(parts)


def directive(module: str) -> str:
    """The mkdocstrings directive for one module."""
    return f"::: {module}\n    options:\n      show_submodules: false\n"


def public_names_page() -> str:
    """The page of the public names of `merak`, in whichever module they are defined."""
    return (
        f"# {PACKAGE}\n\n::: {PACKAGE}\n    options:\n      show_submodules: false\n"
        "      show_root_heading: false\n      show_root_toc_entry: false\n"
    )


@functools.cache
def command_page() -> str:
    """The help of every command, as Markdown."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise PluginError(f"{PACKAGE} is not installed here; run the build through `make docs`.")
    shown = subprocess.run(
        [sys.executable, "-m", "typer", f"{PACKAGE}.cli.main", "utils", "docs", "--name", PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    if shown.returncode:
        raise PluginError(f"The command line's help could not be shown: {shown.stderr}")
    return shown.stdout
