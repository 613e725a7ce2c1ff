"""Cross entropy of a head whose logits are made a chunk of rows at a time, and never all.

In one pass, the forward makes of a chunk's logits the loss and the gradients of the sum of all
losses, which the backward scales by the one number that it is given. In two passes, the forward
keeps two numbers of each row, its loss and the logarithm of the sum of its exponentials, and the
backward makes the logits of a chunk again, and their gradients of them. Rows that are ignored are
left out before any product. Classes may be split over the ranks of an axis, as in
`merak.ops.vocab_parallel`, whose losses and gradients of rows these are.

Source: Liger Kernel (arXiv 2410.10989, section 3.2), whose chunks these are; Cut Your Losses (arXiv
2411.09009), which leaves out rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from merak.ops.linear import Sent, operator_sends, sends
from merak.ops.recording import one_operator
from merak.ops.vocab_parallel import (
    Layout,
    Smoothed,
    Targets,
    compute_dtype,
    find_targets,
    gradients_of_probabilities,
    local_rows,
    padded_with,
    position_gradients,
    position_losses,
    reduced,
    sums_of_positions,
    weights_of,
)

Step = tuple[str, Any]
"""What is done to every logit: one of `STEPS`, and its number or type."""

STEPS = frozenset(("mul", "div", "add", "sub", "tanh", "to"))
"""Scales and caps of logits, and conversions of their type."""


class ChunkedHead(NamedTuple):
    """A head and its loss but for tensors.

    Attributes:
        steps: what is done to logits before their loss.
        ignore_index: target of rows that do not count.
        label_smoothing: share of the target that goes to all classes alike.
        layout: how the classes are split; its dim is 1.
        rows: of a chunk.
        one_pass: whether the forward makes the gradients of a loss that is a mean or a sum.
    """

    steps: tuple[Step, ...]
    ignore_index: int
    label_smoothing: float
    layout: Layout
    rows: int
    one_pass: bool = False

    @classmethod
    def last_of(cls, args: Any) -> ChunkedHead:
        """The head that the arguments of an operator end with, field by field."""
        return cls(*args[-len(cls._fields) :])


def sent_by_chunks(hidden: Any, _: Any, __: Any, target: Any, *how: Any) -> Sent:
    """Collectives inside an operator that makes the losses of chunks, of its arguments."""
    head = ChunkedHead.last_of(how)
    axis = head.layout[2]
    if not axis:
        return ()
    chunks = math.ceil(hidden.shape[0] / head.rows)
    of_all: Sent = sums_of_positions(target, head.label_smoothing, axis)
    each = tuple((kind, size // chunks, axis) for kind, size, axis in of_all)
    return each * int(chunks)


def _sent_by_loss(hidden: Any, weight: Any, bias: Any, target: Any, *how: Any) -> Sent:
    return sent_by_chunks(hidden, weight, bias, target, *how[2])


@sends(inside=_sent_by_loss)
def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    class_weight: torch.Tensor | None,
    reduction: int,
    head: ChunkedHead,
) -> torch.Tensor:
    """Cross entropy of `linear(hidden, weight, bias)`.

    Args:
        hidden: what the head reads, (rows, hidden size).
        weight: of the rank's classes, padding included, (classes, hidden size).
        bias: of these classes, or None.
        target: class of each row, (rows,); the same on every rank.
        class_weight: a weight for each class of the whole, or None.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        head: the rest.

    Returns:
        The loss, the same on every rank: of every row, or a scalar.
    """
    head = ChunkedHead(*head)
    *_, dtype = (hidden.dtype, *(operand for name, operand in head.steps if name == "to"))
    precise = torch.promote_types(dtype, torch.float32)
    weights = weights_of(target, class_weight, head.ignore_index, precise)
    tensors = (hidden, weight, bias, target, weights, class_weight)
    if head.one_pass and reduction:
        total: torch.Tensor = _OnePass.apply(*tensors, head)  # type: ignore[no-untyped-call]
        return (total / weights.sum() if reduction == 1 else total).to(dtype)
    losses: torch.Tensor = _ChunkedLosses.apply(*tensors, head)  # type: ignore[no-untyped-call]
    return reduced(losses, weights, reduction).to(dtype)


class _OnePass(torch.autograd.Function):
    """The sum of all losses, whose gradients the forward makes."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """Sum of the losses; for the backward, its gradients."""
        *tensors, head = args
        ctx.wanted, ctx.rows = ctx.needs_input_grad[:3], head.rows
        if not any(ctx.wanted):
            return chunk_losses(*tensors, *head)[0].sum()
        losses, *gradients = chunk_losses_and_gradients(*tensors, ctx.wanted, *head)
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of what the head reads, and of its weight and bias."""
        made = iter(scale_gradients(gradient, ctx.rows, *ctx.saved_tensors))
        return (*(next(made) if is_wanted else None for is_wanted in ctx.wanted), *(None,) * 4)


class _ChunkedLosses(torch.autograd.Function):
    """The loss of every row."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """Losses, and for the backward a number of each row."""
        *tensors, head = args
        losses, normaliser = chunk_losses(*tensors, *head)
        ctx.save_for_backward(*tensors, normaliser)
        ctx.head = head
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of what the head reads, and of its weight and bias."""
        wanted = ctx.needs_input_grad[:3]
        made = iter(chunk_gradients(gradient, *ctx.saved_tensors, wanted, *ctx.head))
        return (*(next(made) if is_wanted else None for is_wanted in wanted), *(None,) * 4)


@one_operator
@operator_sends(inside=sent_by_chunks)
def chunk_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    weights: torch.Tensor,
    class_weight: torch.Tensor | None,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row, and the logarithm of the sum of its exponentials; 0 where it is ignored.

    Args:
        hidden: as of `chunked_cross_entropy`, as all but `weights` are.
        weight: of the rank's classes.
        bias: of these classes.
        target: class of each row.
        weights: of each row.
        class_weight: of each class.
        *how: the fields of `ChunkedHead`.
    """
    head = ChunkedHead(*how)
    smoothed = Smoothed(head.label_smoothing, class_weight, head.layout)
    losses = torch.zeros_like(weights)
    normaliser = torch.zeros_like(weights)
    for chunk in _chunks(target, head):
        own = _logits(hidden[chunk], weight, bias, head)
        targets = find_targets(target[chunk], weights[chunk], head.ignore_index, head.layout)
        losses[chunk], normaliser[chunk], _ = position_losses(own, targets, smoothed, True)
        del own
    return losses, normaliser


@one_operator
def chunk_gradients(
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    weights: torch.Tensor,
    class_weight: torch.Tensor | None,
    normaliser: torch.Tensor,
    wanted: tuple[bool, bool, bool],
    *how: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of what a head reads, its weight and its bias: of those that are wanted.

    Those of the weight and bias are as precise as they are summed over chunks, and so is what a
    joint graph gives of them: to round them would take memory, and sums of them are as precise.

    Args:
        gradient: of each row's loss.
        hidden: as of `chunk_losses`, as the further ones are.
        weight: of the rank's classes.
        bias: of these classes.
        target: class of each row.
        weights: of each row.
        class_weight: of each class.
        normaliser: what `chunk_losses` gives beside the losses.
        wanted: of `hidden`, `weight` and `bias`, which are.
        *how: the fields of `ChunkedHead`.
    """
    head = ChunkedHead(*how)
    smoothed = Smoothed(head.label_smoothing, class_weight, head.layout)

    def of_logits(own: torch.Tensor, targets: Targets, chunk: Chunk) -> torch.Tensor:
        given = (gradient[chunk], own, targets, normaliser[chunk], smoothed)
        return position_gradients(*given, overwrites=True)

    return _gradients(of_logits, hidden, weight, bias, target, weights, wanted, head)


@one_operator
@operator_sends(inside=sent_by_chunks)
def chunk_losses_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    weights: torch.Tensor,
    class_weight: torch.Tensor | None,
    wanted: tuple[bool, bool, bool],
    *how: Any,
) -> tuple[torch.Tensor, ...]:
    """Loss of each row, and the gradients of their sum: of those that are wanted.

    Args:
        hidden: as of `chunk_losses`, as the further ones are.
        weight: of the rank's classes.
        bias: of these classes.
        target: class of each row.
        weights: of each row.
        class_weight: of each class.
        wanted: as of `chunk_gradients`, whose results come behind the losses.
        *how: the fields of `ChunkedHead`.
    """
    head = ChunkedHead(*how)
    smoothed = Smoothed(head.label_smoothing, class_weight, head.layout)
    losses = torch.zeros_like(weights)

    def of_logits(own: torch.Tensor, targets: Targets, chunk: Chunk) -> torch.Tensor:
        losses[chunk], _, total = position_losses(own, targets, smoothed, overwrites=True)
        given = (torch.ones_like(total), own, total, targets, smoothed)
        return gradients_of_probabilities(*given)

    return losses, *_gradients(of_logits, hidden, weight, bias, target, weights, wanted, head)


@one_operator
def scale_gradients(
    gradient: torch.Tensor, rows: int, *gradients: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of a sum times the sum's own, in place; products are rounded once.

    Args:
        gradient: of the sum, a scalar.
        rows: of a low precision that are made precise at a time.
        *gradients: those of `chunk_losses_and_gradients`.
    """
    for one in gradients:
        if one.dtype == compute_dtype(one):
            one.mul_(gradient)
            continue
        for part in one.split(rows):
            part.copy_(part.to(gradient.dtype).mul_(gradient))
    return gradients


def _gradients(
    of_logits: Callable[[torch.Tensor, Targets, Chunk], torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    weights: torch.Tensor,
    wanted: tuple[bool, bool, bool],
    head: ChunkedHead,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `chunk_gradients`, of a chunk's logits by a function that overwrites them."""
    of_hidden = torch.zeros_like(hidden) if wanted[0] else None
    of_weight = sum_like(weight) if wanted[1] else None
    of_bias = sum_like(bias) if bias is not None and wanted[2] else None
    for chunk in _chunks(target, head):
        rows = hidden[chunk]
        states: list[State] = []
        own = _logits(rows, weight, bias, head, states)
        targets = find_targets(target[chunk], weights[chunk], head.ignore_index, head.layout)
        found = of_logits(own, targets, chunk)
        found = _undone(found, head.steps, states).to(rows.dtype)
        found = padded_with(found, 1, weight.shape[0])
        del own, states
        if of_hidden is not None:
            of_hidden[chunk] = found @ weight
        if of_weight is not None:
            add_product(of_weight, found, rows)
        if of_bias is not None:
            of_bias += found.sum(0, dtype=of_bias.dtype)
        del found
    return tuple(one for one in (of_hidden, of_weight, of_bias) if one is not None)


def sum_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros for a sum over chunks of gradients of a tensor, of float32 or more."""
    return torch.zeros_like(tensor, dtype=compute_dtype(tensor))


def add_product(total: torch.Tensor, of_logits: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the gradient of a weight, which takes no more memory than the logits do."""
    if total.dtype == rows.dtype:
        total.addmm_(of_logits.t(), rows)
        return
    num_parts = math.ceil(rows.shape[1] / (2 * max(rows.shape[0], 1)))
    size = max(math.ceil(total.shape[0] / num_parts), 1)
    for own, part in zip(total.split(size), of_logits.split(size, 1), strict=True):
        own += part.t() @ rows


Chunk = slice | torch.Tensor
"""Rows of a chunk."""


def _chunks(target: torch.Tensor, head: ChunkedHead) -> Iterator[Chunk]:
    """Rows of each chunk; those that are ignored are in none, where targets have values."""
    if not isinstance(target, FakeTensor):
        (counted,) = (target != head.ignore_index).nonzero(as_tuple=True)
        if len(counted) < len(target):
            yield from counted.split(head.rows)
            return
    for start in range(0, len(target), head.rows):
        yield slice(start, start + head.rows)


State = torch.Tensor | torch.dtype | None
"""What the backward of a step reads."""


def _logits(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    head: ChunkedHead,
    states: list[State] | None = None,
) -> torch.Tensor:
    """Logits of the rank's classes behind all steps, which may be overwritten.

    Args:
        rows: of a chunk.
        weight: of the rank's classes.
        bias: of these classes.
        head: its steps.
        states: gains what the backward of each step reads; None where there is none.
    """
    start, stop = local_rows(*head.layout[1:])
    own = functional.linear(rows, weight, bias).narrow(1, 0, stop - start)
    is_kept = False  # for the backward
    for name, operand in head.steps:
        before = own
        if name == "to":
            own = own.to(operand)
        else:
            step = getattr(own, name if is_kept else f"{name}_")
            own = step() if name == "tanh" else step(operand)
        state: State = own if name == "tanh" else before.dtype if name == "to" else None
        if states is not None:
            states.append(state)
            is_kept = name == "tanh" or (is_kept and own is before)
    wide = own.to(compute_dtype(own))
    return wide.clone() if is_kept and wide is own else wide


def _undone(gradient: torch.Tensor, steps: tuple[Step, ...], states: list[State]) -> torch.Tensor:
    """Gradient of logits before all steps, of that behind them; both are overwritten."""
    for (name, operand), state in zip(reversed(steps), reversed(states), strict=True):
        if isinstance(state, torch.dtype):
            gradient = gradient.to(state)
        elif isinstance(state, torch.Tensor):
            slope = state.square_().neg_().add_(1)
            gradient = gradient.to(state.dtype).mul_(slope)
        elif name in ("mul", "div"):
            gradient = getattr(gradient, f"{name}_")(operand)
    return gradient
