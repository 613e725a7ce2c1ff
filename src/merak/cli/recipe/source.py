"""YAML text of a recipe: its fields, where each of them is written, and changes from elsewhere."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from merak.core.errors import CommandError, MerakError, TrainingError
from merak.core.files.yaml_file import UnreadableYaml, parse_yaml, place_of

Keys = tuple[str, ...]
"""Names of a field and of those around it, the outermost first."""

_NAMED_ALONE = ("arguments", "parallel", "lora", "plan")
"""Sections whose fields messages call by their own name, such as `max_steps=0`."""


@dataclass(frozen=True, slots=True)
class Origins:
    """Places where the fields of a recipe are written.

    Args:
        places: by the field's names, such as `recipe.yaml:12:3` (line and column from 1).
        file: the recipe; empty for one that is not from a file.
        is_ready: whether it comes with Merak: its lines are in no file of the user's.
    """

    places: Mapping[Keys, str] = field(default_factory=dict)
    file: str = ""
    is_ready: bool = False

    def _located(self, keys: Keys, sentence: str) -> str:
        """Put the place of a field in front of a sentence, or what changes it, behind."""
        place = self.places[keys]
        if not self.is_ready or not place.startswith(f"{self.file}:"):
            return f"{place}: {sentence}"
        name = ".".join(keys)
        has_fix = f"{name}=…" in sentence or "--set" in sentence
        return f"{self.file}: {sentence}" + ("" if has_fix else f" Change it by {name}=….")

    def error(self, keys: Keys, sentence: str) -> CommandError:
        """Make the error about a field, which begins with its place.

        Args:
            keys: of the field; where it is not written, the innermost one around it counts.
            sentence: what is wrong.
        """
        for length in range(len(keys), 0, -1):
            if keys[:length] in self.places:
                return CommandError(self._located(keys[:length], sentence))
        return CommandError(f"{self.file}: {sentence}" if self.file else sentence)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Put the place of the first field that an error's message names in front of it."""
        try:
            yield
        except MerakError as error:
            self.locate(error)
            raise

    def locate(self, error: MerakError) -> None:
        """Put the place of the first field that an error's message names in front of the message.

        Args:
            error: changed in place, unless it has a place already or is of the training.
        """
        if isinstance(error, TrainingError):
            return
        for one in error.errors:
            self.locate(one)
        if error.errors:
            error.args = ("\n".join(dict.fromkeys(map(str, error.errors))),)
            return
        message = str(error)
        keys = self._field_of(message)
        if keys is not None and not message.startswith((*self.places.values(), self.file)):
            error.args = (self._located(keys, message),)

    def _field_of(self, message: str) -> Keys | None:
        """The first field that a message names; one of the user's before those of Merak's file."""
        found = [
            (self.is_ready and place.startswith(f"{self.file}:"), match.start(), -len(keys), keys)
            for keys, place in self.places.items()
            if (match := re.search(_mention(keys), message))
        ]
        return min(found)[3] if found else None


def _mention(keys: Keys) -> str:
    """Return the pattern of how messages name a field."""
    *around, own = map(re.escape, keys)
    dotted = r"\.".join((*around, own))
    forms = [rf"(?<![\w.]){dotted}(?![\w.])"] if around else []
    if keys[0] in _NAMED_ALONE:
        forms.append(rf"(?<![\w.-]){own}=")
    if keys[:2] == ("model", "config") and len(keys) > 2:
        forms += [rf"'{own}'", rf"(?<![\w.-]){own}="]
    if keys == ("model", "name"):
        forms.append("^model '")
    return "|".join(forms) or r"(?!)"  # which matches nothing


@dataclass(frozen=True, slots=True)
class Written:
    """Fields of a recipe as its YAML file has them, with their line numbers.

    Args:
        fields: what it holds; a mapping, unless the recipe is wrong.
        origins: where its fields are written.
    """

    fields: Any
    origins: Origins


def parse_source(text: str, file: str, *, is_word: bool = False) -> Written:
    """Parse the text of a recipe.

    Args:
        text: YAML, of which only plain data is read.
        file: what its fields' places are named after.
        is_word: whether it is the value of a word of the command line, which `file` is.

    Raises:
        CommandError: it is not YAML, or a field is given twice.
    """
    try:
        node, fields = parse_yaml(text, file, is_word=is_word)
    except UnreadableYaml as cause:
        raise CommandError(str(cause)) from cause
    return Written(fields, Origins(_places(node, file), file))


def _places(root: yaml.Node | None, file: str) -> dict[Keys, str]:
    places: dict[Keys, str] = {}
    seen: set[int] = set()  # an alias names a node once more
    waiting: list[tuple[Keys, yaml.Node | None]] = [((), root)]
    while waiting:
        keys, node = waiting.pop()
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:
            continue
        seen.add(id(node))
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            own = (*keys, str(key.value))
            place = place_of(key.start_mark, file)
            if own in places:
                raise CommandError(
                    f"{place}: {'.'.join(own)} is given twice, first at {places[own]}; leave one."
                )
            places[own] = place
            waiting.append((own, value))
    return places


def with_overrides(written: Written, words: Sequence[str]) -> Written:
    """Change fields of a recipe by words of a command line.

    Args:
        written: the recipe.
        words: such as `arguments.learning_rate=1e-4`; values are YAML.

    Raises:
        CommandError: a word is no such change.
    """
    fields = {} if written.fields is None else copy.deepcopy(written.fields)
    places = dict(written.origins.places)
    for word in words:
        keys, value = _override(word)
        around = fields
        for depth, key in enumerate(keys):
            if not isinstance(around, dict):
                raise CommandError(
                    f"{word} sets a field of {'.'.join(keys[:depth])}, which has no fields."
                )
            if depth == len(keys) - 1:
                around[key] = value
            elif around.get(key) is None:
                around[key] = {}
            around = around[key]
        places = {own: place for own, place in places.items() if own[: len(keys)] != keys}
        places[keys] = word
    return Written(fields, replace(written.origins, places=places))


def _override(word: str) -> tuple[Keys, Any]:
    name, equals, text = word.partition("=")
    keys = tuple(name.split("."))
    if not equals or not all(keys):
        raise CommandError(
            f"{word!r} changes no field of the recipe; write FIELD=VALUE, such as "
            "arguments.learning_rate=1e-4."
        )
    return keys, parse_source(text, word, is_word=True).fields
