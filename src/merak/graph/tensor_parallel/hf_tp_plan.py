"""transformers' own tensor parallel plans, read as feature dicts.

Every config class of transformers may have a plan for its model. Merak derives its own; a plan that
somebody has given to a config overrides it, as a feature dict does.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.features import Attribute, Column, Features, Replicate, Row

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
