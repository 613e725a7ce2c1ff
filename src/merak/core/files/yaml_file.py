"""YAML, read as data and as nodes that know their places."""

from __future__ import annotations

import re
from typing import Any

import yaml


class UnreadableYaml(ValueError):
    """Error about a text that is no YAML; the message says where."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2: `1e-4` is a number, and `off`, `on`, `yes` and `no` are words."""


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (_BOOL, _FLOAT)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
    ),
    "-+0123456789.",
)


def place_of(mark: yaml.Mark, file: str) -> str:
    """Place in a file, such as `recipe.yaml:12:3` (line and column from 1)."""
    return f"{file}:{mark.line + 1}:{mark.column + 1}"


def parse_yaml(text: str, file: str, *, is_word: bool = False) -> tuple[yaml.Node | None, Any]:
    """Parse YAML.

    Args:
        text: of the file, of which only plain data is read.
        file: what its places are named after.
        is_word: whether it is a part of a word of the command line, which has no places.

    Returns:
        The node of the whole, with its places, and its data; None for an empty text.

    Raises:
        UnreadableYaml: it is no YAML.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as cause:
        raise UnreadableYaml(_problem(cause, file, is_word)) from cause
    finally:
        loader.dispose()


def _problem(cause: Exception, file: str, is_word: bool) -> str:
    """Say what is no YAML, behind its place where that is known."""
    mark = getattr(cause, "problem_mark", None)
    if not isinstance(cause, yaml.MarkedYAMLError) or mark is None or is_word:
        problem = getattr(cause, "problem", None) or " ".join(str(cause).split())
        return f"{file} is not YAML: {problem}."
    begun, context = cause.context_mark, ""
    if cause.context is not None:
        where = f" that began at line {begun.line + 1}, column {begun.column + 1}" if begun else ""
        context = f", {cause.context}{where}"
    place = place_of(mark, file)
    return f"{place}: this is not YAML: {cause.problem}{context}; mend it there or before."
