"""Heads that make their logits a chunk of rows at a time: a last rewriting of the last segment.

A cross entropy of a linear layer's results, between them at most scales, caps and conversions of
single logits and other shapes of the rows, becomes one operator, `ops.chunked_loss`. It is found in
what tensor and context parallelism have made of the segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from merak.graph.chunked_rows import (
    changes_rows,
    is_less_in_chunks,
    of_rows,
    rows_in_chunks,
    with_shape,
)
from merak.graph.expert_parallel.apply import LocalRewrite
from merak.graph.float8 import Float8
from merak.graph.further_rewrite import FurtherRewrite
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.mutation import eliminate_dead_code
from merak.graph.ir.operators import CONVERSIONS, CROSS_ENTROPIES, family
from merak.graph.segment.cut import copy_graph, slice_outputs
from merak.graph.tensor_parallel.placement import shape_of
from merak.graph.trace.calls.host_reads import READ
from merak.ops.chunked_loss import STEPS, ChunkedHead, Step, chunked_cross_entropy
from merak.ops.chunked_rows import RowFunction, chunked_rows
from merak.ops.context_parallel import (
    chunked_token_cross_entropy,
    token_cross_entropy,
    token_vocab_parallel_cross_entropy,
)
from merak.ops.vocab_parallel import Layout, vocab_parallel_cross_entropy

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross entropy of logits, (rows, classes).

    Args:
        node: of the loss.
        logits: what it reads.
        target: class of each row.
        class_weight: of each class; None where all weigh 1.
        reduction: as torch numbers them.
        ignore_index: target of rows that do not count.
        label_smoothing: share of the target that goes to all classes alike.
        layout: how the classes are split; None where they are not.
        token_axis: of the ranks that have the other tokens; "" for none.
    """

    node: fx.Node
    logits: fx.Node
    target: fx.Node
    class_weight: fx.Node | None
    reduction: int
    ignore_index: int
    label_smoothing: float
    layout: Layout | None = None
    token_axis: str = ""


@dataclass(frozen=True, slots=True)
class _Head:
    """A linear layer whose results a loss alone reads.

    Args:
        hidden: what it reads.
        weight: of the layer.
        bias: of the layer, or None.
        steps: what is done to each logit, in order.
        shapes: what is done to rows, in order.
    """

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    steps: tuple[Step, ...]
    shapes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkedLoss(FurtherRewrite):
    """Rewriting of a model's segments into those of a rank, with a head in chunks.

    Args:
        chunk_bytes: of float32 logits of a chunk; a head that makes no more is left as it is.
        one_pass: whether forwards make the head's gradients, of which one microbatch's at a time
            wait for their backward.
    """

    chunk_bytes: int
    one_pass: bool

    def changed(self, segment: Segment) -> fx.Graph | None:
        """Graph with such a head."""
        return in_chunks(segment.graph, self.chunk_bytes, self.one_pass)


RankRewrite = LocalRewrite | Float8 | ChunkedLoss
"""What makes a model's segments those of one rank."""


def with_chunked_loss(
    rewrite: LocalRewrite | Float8 | None, chunk_bytes: int, one_pass: bool
) -> RankRewrite | None:
    """What makes a model's segments those of one rank, in training.

    Args:
        rewrite: the same but for the head.
        chunk_bytes: the option `loss_chunk_bytes`, 0 for whole heads.
        one_pass: whether the schedule's last stage holds one microbatch at a time; where it holds
            more, each would hold the gradient of the head's weight.
    """
    return ChunkedLoss(rewrite, chunk_bytes, one_pass) if chunk_bytes else rewrite


def for_evaluation(rewrite: RankRewrite | None) -> LocalRewrite | None:
    """A rewriting of evaluations that return logits: all of them, in the weights' precision.

    Args:
        rewrite: that of training.
    """
    found: Any = rewrite
    while isinstance(found, FurtherRewrite):
        found = found.within
    whole: LocalRewrite | None = found
    return whole


def with_loss_alone(graph: ModelGraph, rewrite: RankRewrite | None) -> ModelGraph | None:
    """Graph of an evaluation that gives its loss and no logits; None if no head has chunks for it.

    Args:
        graph: of the evaluation, with all outputs.
        rewrite: of training.
    """
    if not isinstance(rewrite, ChunkedLoss) or graph.loss is None:
        return None
    outputs = {n: v for n, v in graph.outputs.items() if v == graph.loss or n.startswith(READ)}
    segments, wanted = list(graph.segments), set(outputs.values())
    for place, segment in reversed(list(enumerate(segments))):
        segments[place] = slice_outputs(segment, wanted)
        wanted.update(segments[place].inputs)
    alone = replace(graph, segments=tuple(segments), outputs=outputs)
    fitted, fit = rewrite.fit(alone)
    ends = [s for s in fitted.segments if any(_family(n) in _LOSSES for n in s.graph.nodes)]
    ends = ends or list(fitted.segments[-1:])
    return alone if any(chunked_heads(fit(segment)[0] for segment in ends)) else None


def chunked_heads(segments: Iterable[Segment]) -> Iterator[tuple[str, int, int]]:
    """Name of the weight of each head in chunks, the rows of a chunk, and all rows.

    Args:
        segments: as a rank runs them.
    """
    for segment in segments:
        for node in segment.graph.nodes:
            if node.target is chunked_cross_entropy:
                hidden, weight, *_, how = node.args
                rows = ChunkedHead(*how).rows
            elif node.target is chunked_token_cross_entropy:
                hidden, weight, *_, how, _ = node.args
                rows = ChunkedHead(*how).rows
            elif node.target is chunked_rows:
                function = RowFunction.first_of(node.args)
                hidden, weight, *_ = node.args[len(function) :]
                rows = function.rows_of(shape_of(hidden))
            else:
                continue
            while weight.op != "placeholder":
                weight = weight.all_input_nodes[0]
            yield weight.meta["name"], rows, math.prod(shape_of(hidden)[:-1])


def in_chunks(graph: fx.Graph, chunk_bytes: int, one_pass: bool = True) -> fx.Graph | None:
    """Graph of a segment whose large heads are in chunks.

    Args:
        graph: as a rank runs it; left as it is.
        chunk_bytes: as of `ChunkedLoss`.
        one_pass: as of `ChunkedLoss`.

    Returns:
        A copy; None where there is no such head.
    """
    losses = [node for node in graph.nodes if _family(node) in _LOSSES]
    if not any(_chunked(node, chunk_bytes) for node in losses):
        return rows_in_chunks(graph, chunk_bytes)
    new, _ = copy_graph(graph)
    for node in [node for node in new.nodes if _family(node) in _LOSSES]:
        found = _chunked(node, chunk_bytes)
        if found is not None:
            _replace(*found, one_pass)
    eliminate_dead_code(new, new.find_nodes(op="placeholder"))
    new.lint()
    return rows_in_chunks(new, chunk_bytes) or new


def _chunked(node: fx.Node, chunk_bytes: int) -> tuple[_Loss, _Head, int] | None:
    """A loss, its head, and the rows of a chunk; None where it stays as it is."""
    loss = _LOSSES[_family(node)](node)
    if len(shape_of(loss.logits)) != 2 or shape_of(loss.target) != shape_of(loss.logits)[:1]:
        return None
    num_rows, num_classes = shape_of(loss.logits)
    rows = max(chunk_bytes // (4 * num_classes), 1)
    head = _head_of(loss) if rows < num_rows else None
    if head is None:
        return None
    gradients = num_rows * num_classes * head.weight.meta["tensor"].dtype.itemsize
    whole = 2 * loss.logits.meta["tensor"].num_bytes  # and their gradients
    if head.steps and not loss.layout:
        whole += gradients  # beside what they are converted, scaled or capped from
    pays = is_less_in_chunks(head.weight, whole, gradients, chunk_bytes)
    return (loss, head, rows) if pays else None


def _head_of(loss: _Loss) -> _Head | None:
    """The layer whose results a loss reads; None where there is none that nothing else reads."""
    steps: list[Step] = []
    shapes: list[fx.Node] = []
    node = loss.logits
    while len(node.users) == 1 and isinstance(node.args[0], fx.Node):
        if node.target is aten.linear.default:
            weight, bias, *_ = (*node.args[1:], None)
            assert isinstance(weight, fx.Node)
            return _Head(node.args[0], weight, bias, tuple(steps[::-1]), tuple(shapes[::-1]))  # type: ignore[arg-type]
        step = _step(node)
        if step is not None:
            steps.append(step)
        elif changes_rows(node):
            shapes.append(node)
        else:
            return None
        node = node.args[0]
    return None


def _step(node: fx.Node) -> Step | None:
    name, meta = _family(node), node.meta["tensor"]
    if name == "tanh":
        return name, None
    if name in CONVERSIONS:
        return ("to", meta.dtype) if meta.dtype in _TYPES else None
    if name not in STEPS or len(node.args) != 2 or node.kwargs:
        return None
    return (name, node.args[1]) if isinstance(node.args[1], int | float) else None


_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _replace(loss: _Loss, head: _Head, rows: int, one_pass: bool) -> None:
    """Put one operator in the place of a loss and its head."""
    graph, hidden = loss.node.graph, head.hidden
    size = shape_of(hidden)[-1]
    with graph.inserting_before(loss.node):
        for shape in head.shapes:
            hidden = of_rows(shape, hidden)
        if len(shape_of(hidden)) != 2:
            wanted = (math.prod(shape_of(hidden)[:-1]), size)
            hidden = with_shape(aten.reshape.default, (hidden, list(wanted)), hidden, wanted)
        layout = loss.layout or (1, shape_of(loss.logits)[1], "")
        of_loss = (loss.ignore_index, loss.label_smoothing, layout)
        how = ChunkedHead(head.steps, *of_loss, rows, one_pass)
        args = (hidden, head.weight, head.bias, loss.target, loss.class_weight)
        if loss.token_axis:
            function: Any = chunked_token_cross_entropy
            rest: tuple[Any, ...] = (tuple(how), loss.token_axis)
        else:
            function, rest = chunked_cross_entropy, (loss.reduction, tuple(how))
        new = graph.call_function(function, (*args, *rest))
    new.meta = dict(loss.node.meta)
    loss.node.replace_all_uses_with(new)
    graph.erase_node(loss.node)


def _family(node: fx.Node) -> str:
    return family(node.target) if node.op == "call_function" else ""


def _of_torch(node: fx.Node) -> _Loss:
    given = dict(zip(("self", "target", "weight", "reduction", "ignore_index"), node.args))
    given |= {"label_smoothing": node.args[5]} if len(node.args) > 5 else {}
    given |= node.kwargs
    return _Loss(
        node,
        given["self"],  # type: ignore[arg-type]
        given["target"],  # type: ignore[arg-type]
        given.get("weight"),  # type: ignore[arg-type]
        given.get("reduction", 1),  # type: ignore[arg-type]
        given.get("ignore_index", -100),  # type: ignore[arg-type]
        given.get("label_smoothing", 0.0),  # type: ignore[arg-type]
    )


def _of_function(node: fx.Node) -> _Loss:
    """Of arguments in the order of `_Loss`, but for the reduction of a rank's own tokens."""
    args: list[Any] = list(node.args)
    if node.target in (token_cross_entropy, token_vocab_parallel_cross_entropy):
        args.insert(3, 2)
    if node.target is token_cross_entropy:
        args.insert(6, None)
    return _Loss(node, *args)


_LOSSES: Mapping[str, Callable[[fx.Node], _Loss]] = {
    **dict.fromkeys(CROSS_ENTROPIES, _of_torch),
    vocab_parallel_cross_entropy.__name__: _of_function,
    token_cross_entropy.__name__: _of_function,
    token_vocab_parallel_cross_entropy.__name__: _of_function,
}
"""Losses whose head can be in chunks."""
