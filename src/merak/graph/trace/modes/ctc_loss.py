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

from merak.graph.ir.custom_operators import Role, register

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
    if isinstance(log_probs, FakeTensor) or log_probs.is_meta:
        return _fake_loss(log_probs, targets, reduction)
    selected = targets if mask is None else targets.masked_select(mask)
    with nullcontext() if cudnn else torch.backends.cudnn.flags(enabled=False):
        return ctc_loss(
            log_probs, selected, input_lengths, target_lengths, blank, reduction, zero_infinity
        )


def _fake_loss(log_probs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    """A fake loss of the same shape and memory: it saves `log_probs` and two states per label."""
    num_samples = log_probs.shape[1] if log_probs.ndim == 3 else 1
    longest = targets.shape[1] if targets.ndim == 2 else -(-targets.numel() // num_samples)
    states = log_probs[..., :1].expand(*log_probs.shape[:-1], 2 * longest + 1).exp()
    each = log_probs.square().sum((0, -1)) + states.sum((0, -1))
    return each if reduction == "none" else each.sum()


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
