"""Refusals of expert parallelism where a model has no experts that it can split, with what fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator

from torch import fx

from merak.core.errors import ShardError
from merak.graph.ir.ir import ModelGraph
from merak.graph.ir.operators import (
    GROUPED_GEMMS,
    RESHAPES,
    SAME_VALUES,
    SEPARATE_GEMMS,
    TRANSPOSES,
    family,
)
from merak.graph.ir.reachable import reachable
from merak.graph.tensor_parallel.placement import shape_of
from merak.graph.tensor_parallel.search.cost import parameter_nodes
from merak.graph.trace.opaque.operator import opaque_nodes


def no_experts(model: ModelGraph, ep: int, capacity: float | None = None) -> ShardError:
    """Sentence that says why a model has no experts to split, and what to use in place of `ep`.

    Args:
        model: the traced model, without stacks of expert weights.
        ep: the expert parallel degree that is refused; 1 where it is the capacity that is.
        capacity: the option `expert_capacity`.
    """
    why = next(_reasons(model), "no stack of weights is read by grouped or batched products")
    what, _, fix = why.partition("; ")
    if ep == 1 and capacity is not None:
        return ShardError(
            f"expert_capacity={capacity:g} finds no experts whose rows it could count: {what}; use "
            "expert_capacity=None."
        )
    return ShardError(f"ep={ep} finds no experts to split: {what}; use {fix or 'ep=1'}.")


def _reasons(model: ModelGraph) -> Iterator[str]:
    nodes = [item for s in model.segments for item in parameter_nodes(s.graph).items()]
    for segment in model.segments:
        for name in _computed_stacks(segment.graph):
            yield (
                f"{name} becomes a part of a stack of weights that is computed of several experts' "
                "together; ep=1, with tp, pp or zero=2 where memory is short"
            )
    everything = (node for s in model.segments for node in s.graph.nodes)
    for product in (node for node in everything if family(node.target) in SEPARATE_GEMMS):
        weights = [n.meta["name"] for n in product.all_input_nodes if _is_parameter(n)]
        if (path := numbered_modules(weights)) is not None:
            yield (
                f"something else reads weights of those of {path}, too; ep=1, with tp, pp or "
                "zero=2 where memory is short"
            )
    for call in opaque_nodes(model):
        weights = [n.meta["name"] for n in call.all_input_nodes if _is_parameter(n)]
        if (path := numbered_modules(weights)) is not None:
            yield (
                f"those of {path} are modules with weights of their own, which a loop calls one by "
                "one; ep=1, with pp or zero=2 where memory is short (tp leaves them whole)"
            )
    for call in opaque_nodes(model):
        for weight in filter(_is_parameter, call.all_input_nodes):
            if len(shape_of(weight)) > 2:
                yield (
                    f"{weight.meta['name']} is read by an opaque module, which keeps its weights "
                    "whole; ep=1, with pp or zero=2 where memory is short (tp leaves them whole)"
                )
    for name, node in nodes:
        if len(shape_of(node)) > 2 and any(family(user.target) == "index" for user in node.users):
            yield (
                f"the weights of {_parent(name)} are picked anew for every token; ep=1, or "
                "model.set_experts_implementation('grouped_mm') where the model is of transformers"
            )


def numbered_modules(weights: Collection[str]) -> str | None:
    """The path of modules that differ in a number alone, such as experts in a list.

    Args:
        weights: names of parameters.

    Returns:
        The path of what holds them, the outermost there is; None if there are none.
    """
    counts: Counter[tuple[int, str, str, str]] = Counter()
    for name in weights:
        steps = name.split(".")
        for i, step in enumerate(steps[:-1]):
            if kind := re.fullmatch(r"(.*?)\d+", step):
                holder, inside = ".".join(steps[:i]), ".".join(steps[i + 1 :])
                counts[i, holder, kind[1], inside] += 1
    found = sorted(key for key, count in counts.items() if count > 1)
    return found[0][1] or "the model" if found else None


def _computed_stacks(graph: fx.Graph) -> Iterator[str]:
    """Names of stacked parameters of which grouped products read what is computed."""
    for product in graph.nodes:
        if family(product.target) not in GROUPED_GEMMS:
            continue
        weight = product.args[1]
        while family(weight.target) in RESHAPES | TRANSPOSES | SAME_VALUES:
            (weight,) = weight.all_input_nodes
        read = reachable([weight], lambda node: node.all_input_nodes)
        for node in filter(_is_parameter, read - {weight}):
            if shape_of(node)[:1] == shape_of(weight)[:1] and len(shape_of(node)) > 2:
                yield node.meta["name"]


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and "name" in node.meta


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or name
