"""Feature dicts: which of a model's weights tensor parallelism shards, and how.

A feature dict maps patterns over the names in the user's model to attributes. A pattern is a module
or parameter path, or the end of one, with shell wildcards (`*`, `?`, `[…]`):
"attn.c_attn" means every module whose path ends so. Where several patterns match a parameter, the
last one counts. What no pattern matches is sharded automatically
(`graph.tensor_parallel.search.auto_shard`), so `{"transformer.h.0.mlp.*": Replicate()}` makes an
exception. It may be written in JSON.

Every config class of transformers may have a tensor parallel plan for its model. Merak derives its
own; a plan that somebody has given to a config overrides it, as a feature dict does.

Whether a weight is stored as (outputs, inputs) or (inputs, outputs) does not matter here: the graph
shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from merak.core.errors import ShardError

if TYPE_CHECKING:
    from torch import nn


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


_KINDS: Mapping[str, type[Column | Row | Vocabulary | Replicate]] = {
    "column": Column,
    "row": Row,
    "vocabulary": Vocabulary,
    "replicate": Replicate,
}


def parse_features(written: Mapping[str, Any]) -> Features:
    """Read a feature dict whose attributes may be written in JSON.

    Args:
        written: patterns → `Column(…)`, "column", or {"column": [1, 1, 1]} with relative sizes of
            fused parts; likewise row, and "vocabulary" and "replicate".

    Raises:
        ShardError: an attribute that is none of these.
    """
    return {pattern: _attribute(pattern, value) for pattern, value in written.items()}


def _attribute(pattern: str, value: Any) -> Attribute:
    if isinstance(value, Attribute):
        return value
    if isinstance(value, str) and value in _KINDS:
        return _KINDS[value]()
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, parts),) = value.items()
        if kind in ("column", "row") and _is_parts(parts):
            return (Column if kind == "column" else Row)(parts=tuple(parts))
    raise ShardError(
        f"the feature dict gives {pattern!r} the attribute {value!r}; write 'column', 'row', "
        "'vocabulary', 'replicate', or {'column': [1, 1, 1]} for three fused parts of equal size."
    )


def _is_parts(parts: Any) -> bool:
    return (
        isinstance(parts, list | tuple)
        and len(parts) > 0
        and all(isinstance(part, int) and part > 0 for part in parts)
    )


_STYLES: Mapping[str, Attribute] = {
    "colwise": Column(),
    "rowwise": Row(),
    "packed_colwise": Column(parts=(1, 1)),
    "packed_rowwise": Row(parts=(1, 1)),
    "replicate": Replicate(),
}

_DERIVED = frozenset(
    "all_reduce colwise_gather_output embedding_rowwise ep_dispatch_experts grouped_gemm "
    "local_params mla_kv_a_proj moe_identity_expert moe_tp_experts "
    "replicated_with_grad_allreduce rowwise_split_input".split()
)
"""Styles that say how transformers moves activations: which Merak derives in any case."""


def given_plan(model: nn.Module) -> Features | None:
    """Tensor parallel plan set on a model's config; None where it has only its class's.

    Raises:
        ShardError: a style of split that Merak does not know.
    """
    config = getattr(model, "config", None)
    plan = getattr(config, "__dict__", {}).get("base_model_tp_plan")
    return None if plan is None else features_from_plan(plan)


def features_from_plan(plan: Mapping[str, str]) -> Features:
    """Feature dict of a transformers tensor parallel plan.

    Args:
        plan: patterns of module names → styles, as `config.base_model_tp_plan`.

    Raises:
        ShardError: a style of split that Merak does not know.
    """
    for pattern, style in plan.items():
        if style not in _STYLES and style not in _DERIVED:
            raise ShardError(
                f"the config's tensor parallel plan gives {pattern!r} the style {style!r}, which "
                f"Merak does not know; use one of {', '.join(_STYLES)}, or leave it out."
            )
    return {pattern: _STYLES[style] for pattern, style in plan.items() if style in _STYLES}
