"""HTML of pages: one document with its style, which reads well on a phone and in dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from merak.launch.errors import CommandError

STYLE = """
:root{--paper:#fff;--ink:#1c2733;--quiet:#5a6775;--line:#d8dee6;--card:#f4f6f9;--good:#2f8a4c;
--bad:#c8102e;--blue:#2f5fa8;--accent:#4a7fd0}
@media (prefers-color-scheme:dark){:root{--paper:#12181f;--ink:#dbe3ec;--quiet:#93a1b1;
--line:#2b3641;--card:#1a222b;--good:#5fbf7f;--bad:#ff6b7d;--blue:#8ab4f0;--accent:#6d9ee6}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px;max-width:1480px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;line-height:1.3;margin:0 0 4px}h2{font-size:17px;margin:36px 0 10px}
p{margin:6px 0;max-width:75ch}.quiet{color:var(--quiet)}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}
td,th{padding:3px 12px 3px 0;text-align:right;white-space:nowrap}
th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--line)}
td:first-child,th:first-child{text-align:left}
svg{max-width:none}.fit{max-width:100%;height:auto}
svg text{font-family:system-ui,sans-serif;font-size:11px;fill:var(--ink)}
svg .faint{fill:var(--quiet)}svg .axis{stroke:var(--line)}svg .mark{stroke:var(--ink)}
@media (max-width:600px){body{padding:14px}h1{font-size:19px}}
"""


def document(title: str, body: Iterable[str], style: str = "") -> str:
    """A page of its own, without anything from elsewhere.

    Args:
        title: of the page, as text.
        body: its parts, as HTML.
        style: further rules of its own.
    """
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>",
        *body,
        "</body></html>\n",
    ]
    return "\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is wider than the page.

    Args:
        head: of the columns, as text.
        rows: cells as text.
    """
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def svg(parts: Iterable[str], width: int, height: int, label: str) -> str:
    """A picture that shrinks with the page.

    Args:
        parts: its elements.
        width: of its coordinates.
        height: of them.
        label: what it shows, for those who do not see it.
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fit" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    )
    return "\n".join((head, *parts, "</svg>"))


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
