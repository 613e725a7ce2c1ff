"""Pages of one file that load nothing, which read well on a phone and in dark mode.

All their HTML is in page.html; functions beside the commands give it data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from merak.core import units
from merak.core.errors import CommandError


@cache
def _macros() -> Any:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {name: getattr(units, name) for name in ("seconds", "size", "step_time")}
    environment.filters["px"] = "{:.1f}".format
    return environment.get_template("page.html").module


def part(name: str, **values: object) -> Markup:
    """A part of a page.

    Args:
        name: of its macro in page.html.
        values: the macro's; texts are escaped, other parts are not.
    """
    return Markup(getattr(_macros(), name)(**values).strip())


def document(title: str, body: Sequence[Markup], variables: tuple[str, str] = ("", "")) -> str:
    """A page of its own.

    Args:
        title: of the page, as text.
        body: its parts.
        variables: of its colours, as CSS: on paper, and in dark mode.
    """
    return part("document", title=title, body=body, variables=variables) + "\n"


def write_document(path: Path, text: str) -> None:
    """Write a page.

    Args:
        path: of its file.
        text: of the page.

    Raises:
        CommandError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the page cannot be written to {path}: {error.strerror}.") from error
