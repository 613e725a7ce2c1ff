"""Fields of a YAML or JSON file, each with its line for messages."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

from merak.core.errors import MerakError, PlanError, did_you_mean, raise_all
from merak.core.files.yaml_file import UnreadableYaml, parse_yaml, place_of


@dataclass(frozen=True, slots=True)
class Field:
    """Value in a cluster file, with its path for messages.

    Args:
        file: the file's path.
        name: of the field, with the names of those that it is in, such as "nodes[0].device".
        node: the field as YAML's parser gives it.
    """

    file: Path
    name: str
    node: yaml.Node

    def error(self, what: str) -> PlanError:
        """An error with the file, the line and column, and the field."""
        end = "" if what.endswith((".", "?")) else "."
        place = place_of(self.node.start_mark, str(self.file))
        return PlanError(f"{place}: {self.name} {what}{end}")

    @property
    def is_mapping(self) -> bool:
        """Whether it has fields itself."""
        return isinstance(self.node, yaml.MappingNode)

    def names(self) -> list[str]:
        """Names of its fields; none where it is no mapping."""
        if not isinstance(self.node, yaml.MappingNode):
            return []
        return [str(key.value) for key, _ in self.node.value]

    def mapping(
        self, known: Collection[str] | None, required: Collection[str] = ()
    ) -> dict[str, Field]:
        """Mapping at this path of the file: its fields by name.

        Args:
            known: the names that it may have; None for any.
            required: the names that it must have.

        Raises:
            PlanError: it is no mapping, or a name is unknown, twice there, or missing.
        """
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error("is no mapping; give it fields, such as NAME: VALUE")
        found: dict[str, Field] = {}
        problems: list[MerakError] = []
        misspelt = ""
        for key, value in self.node.value:
            name = str(key.value)
            inner = Field(self.file, f"{self.name}.{name}".removeprefix("the file."), value)
            at_key = Field(self.file, self.name, key)
            if known is not None and name not in known:
                similar = did_you_mean(name, known)
                choice = f"; choose one of: {', '.join(sorted(known))}."
                fix = choice if similar == "." else similar
                misspelt += "" if similar == "." else f" {similar.rstrip('?')} "
                problems.append(at_key.error(f"has no field {name!r}{fix}"))
            if name in found:
                problems.append(at_key.error(f"has the field {name!r} twice; keep one"))
            found[name] = inner
        for name in sorted(required):
            if name not in found and f" {name} " not in misspelt:
                problems.append(self.error(f"has no field {name!r}; add it"))
        raise_all(problems)
        return found

    def items(self) -> list[Field]:
        """List at this path of the file: its elements.

        Raises:
            PlanError: it is no list, or an empty one.
        """
        if not isinstance(self.node, yaml.SequenceNode) or not self.node.value:
            raise self.error("is no list with elements; begin each with '- '")
        return [
            Field(self.file, f"{self.name}[{index}]", node)
            for index, node in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """Text at this path of the file.

        Raises:
            PlanError: it is no text.
        """
        if not isinstance(self.node, yaml.ScalarNode) or not str(self.node.value):
            raise self.error("is no text; give a name")
        return str(self.node.value)

    def number(self, least: float = -math.inf, above: float = -math.inf) -> float:
        """Number at this path of the file.

        Args:
            least: the smallest that it may be.
            above: what it must be above.

        Raises:
            PlanError: it is no finite number, or too small.
        """
        text = self.text()
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= least and value > above and math.isfinite(value)):
            bound = f"above {above:g}" if above > -math.inf else f"of {least:g} or more"
            raise self.error(f"is {text!r}; give a number {bound}")
        return value

    def count(self) -> int:
        """Count at this path of the file: a whole number, 1 or more.

        Raises:
            PlanError: it is no whole number of 1 or more.
        """
        text = self.text()
        if not text.isdecimal() or len(text) > 9 or int(text) < 1:
            raise self.error(f"is {text!r}; give a whole number of 1 or more")
        return int(text)


def read_fields(path: Path) -> Field:
    """The whole of a YAML or JSON file.

    Raises:
        PlanError: it cannot be read, is no YAML, or is empty.
    """
    try:
        node, _ = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as cause:
        raise PlanError(f"{path} cannot be read: {cause.strerror}; name another file.") from cause
    except UnreadableYaml as cause:
        raise PlanError(str(cause)) from cause
    except UnicodeDecodeError as cause:
        raise PlanError(f"{path} is not YAML ({' '.join(str(cause).split())}).") from cause
    if node is None:
        raise PlanError(f"{path} is empty; begin with 'nodes:'.")
    return Field(path, "the file", node)
