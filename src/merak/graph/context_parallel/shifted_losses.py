"""Losses of all tokens but the last ones, rewritten to losses of all tokens.

A model predicts the next token by `logits[:, :-1]` and `labels[:, 1:]`. Slices of scores would lie
on other ranks than the scores do, so these would be gathered. Instead the loss reads all scores,
and targets that are filled up with the number that it ignores: its value and its gradients stay
what they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.operators import (
    CLASS_LOSSES,
    CONVERSIONS,
    COPIES,
    NARROWS,
    RESHAPES,
    SWAPS,
    family,
)
from merak.graph.segment.cut import copy_graph
from merak.graph.tensor_parallel.placement import Operator, argument, positive, shape_of
from merak.graph.tensor_parallel.rules.indexing import extent
from merak.ops.vocab_parallel import vocab_parallel_cross_entropy

aten = torch.ops.aten

_LOSSES = CLASS_LOSSES | {vocab_parallel_cross_entropy.__name__}
ONE_BY_ONE = COPIES | CONVERSIONS | RESHAPES | SWAPS | NARROWS
"""Operators that move the values of tokens, or change their type, and compute nothing."""

_MEAN, _SUM = 1, 2


class _Form(Enum):
    """How scores lie: (…, tokens, classes), (tokens, classes), or (…, classes, tokens)."""

    ROWS = "rows"
    FLAT = "flat"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class _Shifted:
    """A loss of all tokens but the last ones.

    Args:
        loss: its operator.
        narrowed: the slice of scores without their last tokens.
        between: the operators from the slice to the loss, which treat tokens one by one.
        lead: sizes in front of the tokens.
        tokens: how many tokens the scores have.
        kept: how many of them the loss reads.
    """

    loss: fx.Node
    narrowed: fx.Node
    between: tuple[fx.Node, ...]
    lead: tuple[int, ...]
    tokens: int
    kept: int


def read_all_tokens(graph: fx.Graph, lengths: Collection[int]) -> fx.Graph:
    """The graph with losses that read the scores of all tokens; itself where none drops any.

    Args:
        graph: a segment's operators.
        lengths: numbers of tokens that ranks share out.
    """
    found = [shifted for node in graph.nodes if (shifted := _shifted(node, lengths)) is not None]
    if not found:
        return graph
    new, _ = copy_graph(graph)
    copies = dict(zip(graph.nodes, new.nodes, strict=True))
    for shifted in found:
        _rewrite(new, shifted, copies)
    new.lint()
    return new


def _shifted(loss: fx.Node, lengths: Collection[int]) -> _Shifted | None:
    """A loss that reads scores without their last tokens; None for any other operator."""
    if loss.op != "call_function" or family(loss.target) not in _LOSSES:
        return None
    target = argument(loss, "target")
    if argument(loss, "reduction", _MEAN) not in (_MEAN, _SUM):
        return None
    if target.meta["tensor"].dtype.is_floating_point:
        return None
    between: list[fx.Node] = []
    node = loss.args[0]
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        kept = _kept(node)
        if kept is not None:
            *lead, tokens, _ = shape_of(node.args[0])
            found = _Shifted(loss, node, tuple(reversed(between)), tuple(lead), tokens, kept)
            return found if tokens in lengths and _are_all_tokens(found) else None
        if family(node.target) not in ONE_BY_ONE:
            return None
        between.append(node)
        node = node.args[0]
    return None


def _kept(node: fx.Node) -> int | None:
    """How many tokens a slice keeps in front, of scores of (…, tokens, classes); else None."""
    source = node.args[0]
    if family(node.target) not in NARROWS or not isinstance(source, fx.Node):
        return None
    shape = shape_of(source)
    dim = argument(node, "dim", 0)
    if len(shape) < 2 or not isinstance(dim, int) or positive(dim, len(shape)) != len(shape) - 2:
        return None
    start, stop = extent(Operator(node, {}, 1), shape[-2])
    is_dense = argument(node, "step", 1) == 1
    return stop if is_dense and start == 0 and 0 < stop < shape[-2] else None


def _are_all_tokens(shifted: _Shifted) -> bool:
    """Whether the loss reads (tokens, classes), or (…, classes, tokens), of the slice's tokens."""
    forms = _forms(shifted)
    if forms is None:
        return False
    scores, target = shape_of(shifted.loss.args[0]), shape_of(argument(shifted.loss, "target"))
    is_read = scores == _sizes(shifted, forms[-1], shifted.kept) and forms[-1] is not _Form.ROWS
    return is_read and target == (scores[0], *scores[2:])


def _forms(shifted: _Shifted) -> list[_Form] | None:
    """How the scores lie in the slice, and behind each operator; None if in another way."""
    forms = [_Form.ROWS]
    for node in shifted.between:
        form: _Form | None = forms[-1]
        shape = shape_of(node)
        if family(node.target) in RESHAPES and shape == _sizes(shifted, _Form.FLAT, shifted.kept):
            form = _Form.FLAT if form is not _Form.COLUMNS else None
        elif family(node.target) in SWAPS:
            dims = {positive(dim, len(shape)) for dim in node.args[1:] if isinstance(dim, int)}
            is_last = dims == {len(shape) - 2, len(shape) - 1} and form is _Form.ROWS
            form = _Form.COLUMNS if is_last else None
        if form is None or shape != _sizes(shifted, form, shifted.kept):
            return None
        forms.append(form)
    return forms if shifted.lead else [_Form.FLAT if f is _Form.ROWS else f for f in forms]


def _sizes(shifted: _Shifted, form: _Form, tokens: int) -> tuple[int, ...]:
    """Sizes of scores of so many tokens."""
    lead, classes = shifted.lead, shape_of(shifted.narrowed)[-1]
    if form is _Form.FLAT:
        return (math.prod(lead) * tokens, classes)
    return (*lead, tokens, classes) if form is _Form.ROWS else (*lead, classes, tokens)


def _rewrite(graph: fx.Graph, shifted: _Shifted, copies: dict[fx.Node, fx.Node]) -> None:
    """Let a loss read all tokens."""
    narrowed, loss = copies[shifted.narrowed], copies[shifted.loss]
    cut, forms = [narrowed], _forms(shifted)
    assert forms is not None
    for node, form in zip(shifted.between, forms[1:], strict=True):
        new, shape = copies[node], _sizes(shifted, form, shifted.tokens)
        new.meta = {**new.meta, "tensor": replace(new.meta["tensor"], shape=shape)}
        if family(node.target) in RESHAPES:
            new.target, new.args, new.kwargs = aten.reshape.default, (new.args[0], [*shape]), {}
        elif family(node.target) in NARROWS:
            cut.append(new)
    for node in cut:
        (source,) = node.all_input_nodes
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    target = argument(shifted.loss, "target")
    ignored = argument(shifted.loss, "ignore_index", -100)
    filled = _filled(graph, shifted, loss, copies[target], ignored)
    loss.args = tuple(filled if given is copies[target] else given for given in loss.args)
    loss.kwargs = {k: filled if v is copies[target] else v for k, v in loss.kwargs.items()}


def _filled(
    graph: fx.Graph, shifted: _Shifted, loss: fx.Node, target: fx.Node, ignored: Any
) -> fx.Node:
    """Targets of all tokens: those behind the kept ones are ignored."""
    meta: TensorMeta = target.meta["tensor"]
    lead, missing = shifted.lead, shifted.tokens - shifted.kept
    steps: list[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = [
        (aten.reshape.default, ([*lead, shifted.kept],), (*lead, shifted.kept)),
        (aten.constant_pad_nd.default, ([0, missing], ignored), (*lead, shifted.tokens)),
    ]
    if len(meta.shape) == 1:
        rows = math.prod(lead) * shifted.tokens
        steps.append((aten.reshape.default, ([rows],), (rows,)))
    kept = {key: value for key, value in loss.meta.items() if key in ("module", "source")}
    for function, args, shape in steps:
        with graph.inserting_before(loss):
            target = graph.call_function(function, (target, *args))
        target.meta = {**kept, "tensor": replace(meta, shape=shape)}
    return target
