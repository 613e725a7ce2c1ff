"""Whether a loss depends on rows behind the end of a sample: what comes there may then be anything.

A causal mask hides later tokens from all before them. So where a sample's padding is behind its
tokens and its labels there are ignored, attention needs no mask of the padding, as long as nothing
else reads those rows. That holds where each token could be on a rank of its own: of all operators,
causal attention and the loss alone would have to communicate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from merak.core.errors import ShardError
from merak.core.tensor_meta import IGNORED_LABEL
from merak.graph.context_parallel.apply import ContextParallel
from merak.graph.context_parallel.propagate import ContextPropagation
from merak.graph.context_parallel.shifted_losses import ONE_BY_ONE
from merak.graph.ir.ir import Kind, ModelGraph, returned_nodes
from merak.graph.ir.operators import (
    CLASS_LOSSES,
    PADS,
    family,
)
from merak.graph.tensor_parallel.placement import Decision, Shard, argument, shape_of

_ATTENTION = "scaled_dot_product_attention"
_MOVES = ONE_BY_ONE | PADS
_MEAN, _SUM = 1, 2


def ignores_padding(graph: ModelGraph, mask: str) -> bool:
    """Whether a loss is the same whatever stands behind the ends of its samples.

    Args:
        graph: of a training, whose attention has no mask of the padding.
        mask: the column that says where samples end, and which labels are ignored from there on.
    """
    meta = graph.columns[mask]
    if tuple(graph.outputs) != ("loss",):
        return False
    try:
        _, fitted = ContextParallel(meta.shape[1]).fit(graph)
    except ShardError:
        return False
    losses = []
    for segment in graph.segments:
        found = _losses(fitted.found[segment.index], meta.shape)
        if found is None:
            return False
        losses += found
    targets = [argument(loss, "target") for loss in losses]
    labels = _Labels(graph, meta.ignored, meta.shape)
    return bool(targets) and all(labels.are_later(target) for target in targets)


def _losses(found: ContextPropagation, shape: tuple[int, ...]) -> list[fx.Node] | None:
    """The losses of a segment's tokens; None where something else reads several tokens."""
    losses = []
    placed = found.propagation.placements
    for node, decision in found.propagation.decisions.items():
        is_of_tokens = any(isinstance(placed[n], (Shard, tuple)) for n in node.all_input_nodes)
        if family(node.target) == _ATTENTION:
            if not _is_causal(node, placed, shape[1]):
                return None
        elif family(node.target) in CLASS_LOSSES and is_of_tokens:
            if not _is_ignoring(node, decision, shape):
                return None
            losses.append(node)
        elif is_of_tokens and (node in found.gathered or _mixes(node, decision, placed)):
            return None
    return losses


def _is_causal(node: fx.Node, placed: Mapping[fx.Node, Any], tokens: int) -> bool:
    """Whether attention lets each token read those before it alone."""
    operands = [argument(node, name) for name in ("query", "key", "value")]
    is_masked = argument(node, "attn_mask", None) is not None
    if is_masked or not argument(node, "is_causal", False):
        return False
    return all(
        isinstance(placed[n], Shard)
        and placed[n].dim == len(shape_of(n)) - 2
        and shape_of(n)[-2] == tokens
        for n in (*operands, node)
    )


def _is_ignoring(node: fx.Node, decision: Decision, shape: tuple[int, ...]) -> bool:
    """Whether a loss has a target for each token, some of which are ignored."""
    samples, tokens = shape
    target = argument(node, "target")
    need = decision.needs.get(target)
    if target.meta["tensor"].dtype.is_floating_point or not isinstance(need, Shard):
        return False
    is_flat = (shape_of(target), need.dim, need.parts) == (
        (samples * tokens,), 0, (tokens,) * samples,
    )  # fmt: skip
    is_row = (shape_of(target), need.dim, need.parts) == (shape, 1, (tokens,))
    ignored = argument(node, "ignore_index", IGNORED_LABEL)
    is_one = argument(node, "reduction", _MEAN) in (_MEAN, _SUM)
    return (is_flat or is_row) and ignored == IGNORED_LABEL and is_one


def _mixes(node: fx.Node, decision: Decision, placed: Mapping[fx.Node, Any]) -> bool:
    """Whether an operator with values of tokens would have to communicate."""
    moved = [
        n
        for n in node.all_input_nodes
        if isinstance(placed[n], (Shard, tuple)) and decision.needs.get(n, placed[n]) != placed[n]
    ]
    results = decision.output if isinstance(decision.output, tuple) else (decision.output,)
    is_elsewhere = decision.becomes is not None or bool(decision.then or decision.sums)
    return bool(moved) or is_elsewhere or not all(isinstance(result, Shard) for result in results)


class _Labels:
    """Computes the targets of losses from labels that say where they stand.

    Args:
        graph: of the training.
        names: of the columns that may be labels.
        shape: of these, (samples, tokens).
    """

    def __init__(self, graph: ModelGraph, names: Collection[str], shape: tuple[int, ...]) -> None:
        self._names, self._shape = names, shape
        self._places = torch.arange(shape[0] * shape[1]).view(shape)
        derived = zip(graph.prologue.outputs, returned_nodes(graph.prologue.graph), strict=True)
        self._derived = dict(derived)

    def are_later(self, target: fx.Node) -> bool:
        """Whether each token's target is its own label or a later one's, or is ignored."""
        try:
            found = self._value(target).reshape(self._shape)
        except Exception:  # it is not made of labels alone
            return False
        here = self._places
        tokens = self._shape[1]
        is_later = (found // tokens == here // tokens) & (found >= here)
        return bool((is_later | (found == IGNORED_LABEL)).all())

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            name = node.meta["name"]
            if node.meta["kind"] is Kind.BATCH_ONLY:
                return self._value(self._derived[name])
            if node.meta["kind"] is not Kind.COLUMN or name not in self._names:
                raise ValueError(f"{name} is no column of labels")
            return self._places.to(node.meta["tensor"].dtype)
        if family(node.target) not in _MOVES:
            raise ValueError(f"{node.target} may change labels")
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
        args, kwargs = tree_map(_on_host, (args, kwargs))
        target: Any = node.target
        return target(*args, **kwargs)


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
