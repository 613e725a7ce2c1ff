"""CTC losses in a trace: one operator, since its inner sizes depend on the labels' values.

A model often selects the labels that are not padding first, `labels.masked_select(labels >= 0)`:
their number depends on the batch's values, which a trace does not have. If they go nowhere but into
the loss, the operator selects them itself when the segment runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import ctc_loss
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import Role, register
from merak.ops.recording import one_operator

aten = torch.ops.aten

_SELECTS = (torch.masked_select, torch.Tensor.masked_select)
_PASSING = frozenset("to long int cpu contiguous detach clone".split())
"""Methods that commute with the selection of labels."""

_SIGNATURE = inspect.signature(ctc_loss)


def _run(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: str,
    zero_infinity: bool,
    cudnn: bool,
) -> torch.Tensor:
    if runs_apart(log_probs, targets):
        given = targets, mask, input_lengths, target_lengths, blank, zero_infinity
        losses: torch.Tensor = _Losses.apply(log_probs, *given)  # type: ignore[no-untyped-call]
        if zero_infinity:
            losses = torch.where(losses == torch.inf, losses.new_zeros(()), losses)
        if reduction == "mean":
            return (losses / target_lengths.to(losses.device).clamp_min(1)).mean()
        return losses.sum() if reduction == "sum" else losses
    if _has_no_numbers(log_probs):
        losses = _fake_states(log_probs, targets).square().sum((-2, -1))
        return losses if reduction == "none" else losses.sum()
    selected = targets if mask is None else targets.masked_select(mask)
    with nullcontext() if cudnn else torch.backends.cudnn.flags(enabled=False):
        return ctc_loss(
            log_probs, selected, input_lengths, target_lengths, blank, reduction, zero_infinity
        )


def runs_apart(log_probs: torch.Tensor | TensorMeta, targets: torch.Tensor | TensorMeta) -> bool:
    """Whether the forward and the backward of a loss are an operator each.

    They are not where cuDNN may compute the loss, with operators of its own.

    Args:
        log_probs: (frames, samples, classes), or of a single sample without that dim.
        targets: the labels; cuDNN takes those of int32 alone.
    """
    return len(log_probs.shape) == 3 and targets.dtype != torch.int32


def _has_no_numbers(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _fake_states(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What the backward reads besides: two states of each label and frame, for as many as fit."""
    num_samples = log_probs.shape[1] if log_probs.ndim == 3 else 1
    longest = targets.shape[1] if targets.ndim == 2 else -(-targets.numel() // num_samples)
    states = log_probs[..., :1].expand(*log_probs.shape[:-1], 2 * longest + 1)
    return (states.transpose(0, 1) if log_probs.ndim == 3 else states).exp()


class _Losses(torch.autograd.Function):
    """The loss of every sample."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, *given: Any) -> torch.Tensor:
        """Losses of the samples; `given` is what `_losses` takes behind `log_probs`."""
        losses, states = _losses(log_probs, *given)
        *tensors, blank, zero_infinity = given
        ctx.save_for_backward(log_probs, *tensors, losses, states)
        ctx.options = blank, zero_infinity
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the probabilities' logarithms."""
        return _gradient(gradient, *ctx.saved_tensors, *ctx.options), *[None] * 6


@one_operator
def _losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the samples, and what their backward reads: states of every label and frame."""
    if _has_no_numbers(log_probs):
        return log_probs.new_empty(log_probs.shape[1]), _fake_states(log_probs, targets)
    given = _selected(log_probs, targets, mask), input_lengths, target_lengths
    return aten._ctc_loss.Tensor(log_probs, *given, blank, zero_infinity)  # type: ignore[no-any-return]


@one_operator
def _gradient(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    losses: torch.Tensor,
    states: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Gradient of the probabilities' logarithms."""
    if _has_no_numbers(log_probs):
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    given = _selected(log_probs, targets, mask), input_lengths, target_lengths, losses, states
    found: torch.Tensor = aten._ctc_loss_backward.Tensor(
        gradient, log_probs, *given, blank, zero_infinity
    )
    return found


def _selected(
    log_probs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    selected = targets if mask is None else targets.masked_select(mask)
    return selected.to(log_probs.device, torch.long)


CTC_LOSS = register(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor? mask, Tensor input_lengths, "
    "Tensor target_lengths, int blank, str reduction, bool zero_infinity, bool cudnn) -> Tensor",
    Role.KERNEL,
    _run,
    is_deterministic=True,
)


class CtcLosses(TorchFunctionMode):
    """Function mode that records a CTC loss of fake tensors as one operator."""

    def __init__(self) -> None:
        super().__init__()
        self._selected = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a loss; labels selected for anything else are selected at once."""
        kwargs = kwargs or {}
        if func is ctc_loss:
            return self._loss(_SIGNATURE.bind(*args, **kwargs))
        if (found := _selection_of(func, args, kwargs)) is not None:
            return self._stand_in(*found)
        if not any(isinstance(a, FakeTensor) and a in self._selected for a in tree_leaves(args)):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _PASSING and args[0] in self._selected:
            source, mask = self._selected[args[0]]
            return self._stand_in(func(source, *args[1:], **kwargs), mask)
        args, kwargs = tree_map_only(FakeTensor, self._now, (args, kwargs))
        return func(*args, **kwargs)

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor stands for labels that a mask selects."""
        return tensor in self._selected

    def _stand_in(self, source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """An empty tensor that stands for selected labels."""
        made = source.new_empty(source.numel())
        self._selected[made] = source, mask
        return made

    def _now(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._selected:
            return tensor
        source, mask = self._selected[tensor]
        return torch.masked_select(source, mask)

    def _loss(self, call: inspect.BoundArguments) -> torch.Tensor:
        call.apply_defaults()
        found = call.arguments
        if not isinstance(found["log_probs"], FakeTensor):
            return ctc_loss(*call.args, **call.kwargs)
        targets, mask = self._selected.get(found["targets"], (found["targets"], None))
        recorded: torch.Tensor = CTC_LOSS(
            found["log_probs"],
            targets,
            mask,
            _lengths(found["input_lengths"]),
            _lengths(found["target_lengths"]),
            found["blank"],
            found["reduction"],
            found["zero_infinity"],
            torch.backends.cudnn.enabled,
        )
        return recorded


def _selection_of(
    func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The tensor and the mask, if integers are selected from one by the other."""
    if func in _SELECTS:
        given = (*args, *(kwargs[n] for n in ("input", "self", "mask") if n in kwargs))
    elif func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor):
        # Integers index too, with as many results as a trace may not know.
        given = args if args[1].dtype is torch.bool and args[1].shape == args[0].shape else ()
    else:
        return None
    if len(given) != 2 or not all(isinstance(each, FakeTensor) for each in given):
        return None
    source, mask = given
    is_pick = mask.dtype is torch.bool and not source.dtype.is_floating_point
    return (source, mask) if is_pick else None


def _lengths(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.long)
