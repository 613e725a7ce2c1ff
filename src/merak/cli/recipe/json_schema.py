"""JSON schema of recipes, by which editors complete fields, explain them and mark mistakes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from merak.arguments.kinds import OWN_CHECKS, choices_of, hints_of, is_accepted
from merak.cli.recipe.draft import AUTO_BF16
from merak.cli.recipe.schema import SECTIONS
from merak.core.elastic import AUTO_PLAN
from merak.core.kinds import json_schema

VERSION = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe.

    It says the type of each field, and its choices and bounds; what several fields must be
    together, the job checks. Without peft, any field of `lora` is taken.
    """
    plan = f"File of a plan that is followed; `{AUTO_PLAN}` to search the fastest one."
    sections = {
        **{name: _section(kind, meaning) for name, (kind, meaning) in SECTIONS.items()},
        "arguments": _arguments(),
        "lora": _lora(),
        "plan": {"type": ["string", "null"], "description": plan},
    }
    made = _object(sections, "Training job of `merak train`.", ("model", "arguments"))
    return {"$schema": VERSION, "title": "Recipe", **made}


def _arguments() -> dict[str, Any]:
    from merak.arguments import MerakArguments

    hints, fields = hints_of(MerakArguments), {}
    for part in dataclasses.fields(MerakArguments):
        hint = Any if part.name in OWN_CHECKS else hints[part.name]
        if part.name == "bf16":
            hint = hint | Literal[AUTO_BF16]
        if part.init:
            choices = choices_of(part, hint)
            fields[part.name] = _field(
                hint, part, [own for own in choices if is_accepted(part.name, own)]
            )
    fields["output_dir"]["type"] = "string"
    return _object(fields, "Fields of merak.MerakArguments.", ("output_dir",))


def _lora() -> dict[str, Any]:
    meaning = "Fields of peft.LoraConfig; without this section all weights are trained."
    if find_spec("peft") is None:
        return {"type": ["object", "null"], "description": meaning}
    from peft import LoraConfig

    return {**_section(LoraConfig, meaning), "type": ["object", "null"]}


def _section(kind: type, meaning: str) -> dict[str, Any]:
    """Schema of a section that has the fields of a dataclass."""
    hints, parts = typing.get_type_hints(kind), dataclasses.fields(kind)
    required = [
        part.name for part in parts if part.default is part.default_factory is dataclasses.MISSING
    ]
    fields = {p.name: _field(hints[p.name], p, p.metadata.get("choices", ())) for p in parts}
    return _object(fields, meaning, required)


def _object(
    properties: Mapping[str, Any], meaning: str, required: Iterable[str] = ()
) -> dict[str, Any]:
    return {
        "type": "object",
        "description": meaning,
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def _field(hint: Any, part: dataclasses.Field[Any], choices: Iterable[Any]) -> dict[str, Any]:
    """Schema of a field: its type, its meaning, and the checks that its metadata names."""
    known, choices = part.metadata, list(choices)
    made = json_schema(hint)
    if choices and "reads" in known:  # other spellings of them too
        made["examples"] = choices
    elif choices:
        inner = typing.get_args(hint)
        choices += [value for kind, values in _WORDS for value in values if kind in inner]
        made = {"enum": choices}
    if "help" in known:
        made["description"] = known["help"]
    if part.default is not dataclasses.MISSING and isinstance(part.default, _PLAIN):
        made["default"] = part.default
    for name, bound in (("least", "minimum"), ("most", "maximum")):
        if name in known:
            made[bound] = known[name]
    return made


_WORDS: tuple[tuple[type, tuple[object, ...]], ...] = (
    (type(None), (None,)),
    (bool, (True, False)),
)
"""Values beside choices, of fields that take their type."""

_PLAIN = (bool, int, float, str, type(None))
