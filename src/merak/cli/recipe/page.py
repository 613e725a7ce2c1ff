"""The tables of fields in docs/recipes.md; `python -m merak.cli.recipe.page` prints them.

After a change of a field: `python -m merak.cli.recipe.page docs/recipes.md` writes them anew.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from merak.cli.recipe.ready import ready_names, ready_title
from merak.cli.recipe.schema import SECTIONS

BEGIN = "<!-- made by python -m merak.cli.recipe.page -->"
"""Line of the page behind which everything is made here."""


def render() -> str:
    """The tables as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield BEGIN
    yield "\n## Recipes that come with Merak\n"
    yield "| name | what it trains |"
    yield "|---|---|"
    for name in ready_names():
        yield f"| `{name}` | {ready_title(name)} |"
    yield "\n## Every field"
    for section, (kind, _) in SECTIONS.items():
        yield f"\n### `{section}`\n"
        yield "| field | default | meaning |"
        yield "|---|---|---|"
        for part in dataclasses.fields(kind):
            yield f"| `{part.name}` | {_default(part)} | {part.metadata['help']} |"
    yield "\n### `arguments`\n"
    yield (
        "Every field of [`merak.MerakArguments`](arguments.md). `output_dir` must be given. "
        "`bf16: auto` is true on GPUs that have bfloat16, and false elsewhere.\n"
    )
    yield "### `lora`\n"
    yield "Every field of `peft.LoraConfig`. Without this section all weights are trained.\n"
    yield "### `plan`\n"
    yield "A word, not a section: `auto` searches [the fastest plan](plan.md) for the devices that"
    yield "are there, and a file of `merak plan --output` is followed.\n"


def _default(part: dataclasses.Field[Any]) -> str:
    if part.default is part.default_factory is dataclasses.MISSING:
        return "must be given"
    if part.default is dataclasses.MISSING:
        return "`{}`"
    return f"`{part.default if isinstance(part.default, str) else json.dumps(part.default)}`"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        page = Path(sys.argv[1])
        before = page.read_text(encoding="utf-8").partition(BEGIN)[0]
        page.write_text(before + render(), encoding="utf-8")
    else:
        sys.stdout.write(render())
