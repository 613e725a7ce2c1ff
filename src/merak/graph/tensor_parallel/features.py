"""Feature dicts: which of a model's weights tensor parallelism shards, and how.

A feature dict maps patterns over the names in the user's model to attributes. A pattern is a module
or parameter path, or the end of one, with shell wildcards (`*`, `?`, `[…]`):
"attn.c_attn" means every module whose path ends so. Where several patterns match a parameter, the
last one counts. What no pattern matches is sharded automatically
(`graph.tensor_parallel.search.auto_shard`), so `{"transformer.h.0.mlp.*": Replicate()}` makes an
exception.

Whether a weight is stored as (outputs, inputs) or (inputs, outputs) does not matter here: the graph
shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from merak.core.errors import ShardError


@dataclass(frozen=True, slots=True)
class Column:
    """Column parallelism: every rank computes its shard of a GEMM's outputs.

    Args:
        parts: relative sizes of fused parts that are split one by one: (1, 1, 1) for query, key and
            value of equal size in one matrix, (8, 2, 2) for 8 query heads and 2 kv-heads.
        size: what the outputs are, for messages: "heads", "kv-heads", ….
    """

    parts: tuple[int, ...] = (1,)
    size: str = "outputs"


@dataclass(frozen=True, slots=True)
class Row:
    """Row parallelism: the inputs of a GEMM are sharded, and every rank computes a partial sum.

    Args:
        parts: relative sizes of fused parts of the inputs that are split one by one.
        size: what the inputs are, for messages.
    """

    parts: tuple[int, ...] = (1,)
    size: str = "inputs"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary parallelism: an embedding's rows, a head's outputs, or both where tied.

    The degree need not divide them: the last ranks' shards are filled up with padding.
    """


@dataclass(frozen=True, slots=True)
class Replicate:
    """Replication: every rank holds the full weight."""


Attribute = Column | Row | Vocabulary | Replicate
Features = Mapping[str, Attribute]


def resolve_features(
    features: Features, names: Iterable[str], tied: Mapping[str, str] | None = None
) -> dict[str, Attribute]:
    """Attributes of the parameters that a feature dict matches.

    Args:
        features: patterns to attributes.
        names: every parameter name of the model.
        tied: other names of parameters → the names in `names`.

    Returns:
        Parameter names to attributes, for the parameters that some pattern matches.

    Raises:
        ShardError: a pattern that matches nothing.
    """
    aliases = {name: name for name in names} | dict(tied or {})
    attributes: dict[str, Attribute] = {}
    for pattern, attribute in features.items():
        matched = {first for alias, first in aliases.items() if _matches(pattern, alias)}
        if not matched:
            raise ShardError(
                f"the feature dict's pattern {pattern!r} matches no parameter of the model (its "
                f"names are like {next(iter(aliases), 'none')!r}); correct the pattern or leave "
                "it out."
            )
        attributes |= dict.fromkeys(matched, attribute)
    return attributes


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern is the end of a parameter's path or of its module's."""
    paths = (name, name.rpartition(".")[0])
    return any(fnmatchcase(path, glob) for path in paths for glob in (pattern, f"*.{pattern}"))
