"""Translation of other tools' training files: a recipe, and a list of what was not taken."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from merak.cli.recipe.foreign.axolotl import AXOLOTL
from merak.cli.recipe.foreign.llama_factory import LLAMA_FACTORY
from merak.cli.recipe.foreign.tool import NOTHING, Tool
from merak.cli.recipe.source import Keys, Written
from merak.core.errors import MerakError, raise_all

logger = logging.getLogger(__name__)

TOOLS: tuple[Tool, ...] = (AXOLOTL, LLAMA_FACTORY)
"""The tools whose files are read."""


def translated(written: Written) -> Written:
    """Read another tool's training file as a recipe; one of Merak's own stays as it is.

    A warning lists what was not taken: fields that a recipe does not have. Fields that are empty
    or false ask for nothing.

    Args:
        written: the file.

    Raises:
        CommandError: it trains what a recipe cannot, with the line that says so.
    """
    given, origins = written.fields, written.origins
    tool = _tool_of(given)
    if tool is None:
        return written
    whole = tool.whole(given)
    problems: list[MerakError] = [origins.error((name,), text) for name, text in whole.problems]
    found, left = dict(whole.found), list(whole.left)
    for name, value in given.items():
        if value is None:
            continue
        if name in tool.refused and (reason := tool.refused[name](value)) is not None:
            problems.append(origins.error((name,), reason))
        elif name not in whole.read:
            place, own = _own(tool, name, value)
            if own is not NOTHING:
                found[place] = own, name
            elif value not in (False, "", [], {}):
                left.append(name)
    raise_all(problems)
    if left:
        logger.warning(
            "this is a file of %s's, read as a recipe; not taken: %s.", tool.name, ", ".join(left)
        )
    sections: dict[str, Any] = {}
    places: dict[Keys, str] = {}
    for place, (own, name) in found.items():
        sections.setdefault(place[0], {})[place[1]] = own
        if (name,) in origins.places:
            places[place] = origins.places[name,]
    return Written(sections, dataclasses.replace(origins, places=places))


def _tool_of(given: object) -> Tool | None:
    """The tool that a file is of; None for a recipe."""
    if not isinstance(given, Mapping) or "model" in given:
        return None
    return next((tool for tool in TOOLS if all(name in given for name in tool.sign)), None)


def _own(tool: Tool, name: str, value: Any) -> tuple[Keys, Any]:
    """A field's place in the recipe, and its value there; arguments of transformers stay."""
    from merak.arguments import MerakArguments

    if name in tool.fields:
        place, read = tool.fields[name]
        return place, read(value)
    is_argument = name in {part.name for part in dataclasses.fields(MerakArguments)}
    return ("arguments", name), value if is_argument and name not in tool.dropped else NOTHING
