"""sentence-transformers' losses as one graph, also those that compute gradients by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import OnlineContrastiveLoss, matryoshka
from torch import nn

from merak.core.errors import ArgumentsError
from merak.graph.trace.calls.eager_loss import eager_loss

NAME = "of_losses"
"""Of the submodule that holds modules of losses."""


eager_loss(OnlineContrastiveLoss)  # which selects the hard pairs of a batch


@contextmanager
def as_one_graph(*, merges_columns: bool) -> Iterator[None]:
    """Context in which losses are functions of the model alone, as a trace takes them.

    A cached loss then has the whole batch's embeddings at once: whatever it computes of
    mini-batches, its value and its gradients are those.

    Args:
        merges_columns: whether all columns of a batch go through the model together, padded to one
            length, where sentence-transformers lets the first one go alone. Layers in stages of a
            pipeline are then called once.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (CachedLossMixin, "forward_cached", _forward_at_once),
        (matryoshka.CachedLossDecorator, "__call__", _at_each_size),
    ]
    if merges_columns:  # of the function, since every loss has it by a name of its own
        replaced.append((embed_columns, "__defaults__", (False,)))
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _forward_at_once(loss: Any, sentence_features: Any, labels: Any) -> Any:
    """The value of a cached loss, without mini-batches of embeddings."""
    embeddings = embed_columns(loss.model, sentence_features)
    return loss.calculate_loss([[each] for each in embeddings], labels)


def _at_each_size(
    decorator: Any, embeddings: list[list[torch.Tensor]], *args: Any, **kwargs: Any
) -> Any:
    """The sum of a cached loss at each size of embeddings, as one function of these."""
    if 0 < decorator.n_dims_per_step < len(decorator.matryoshka_dims):
        raise ArgumentsError(
            f"n_dims_per_step={decorator.n_dims_per_step} draws sizes anew in every step, which a "
            "cached loss cannot here; leave it out, or take the loss that is not cached."
        )
    kwargs.pop("with_backward", None)
    loss: Any = 0.0
    for dim, weight in zip(decorator.matryoshka_dims, decorator.matryoshka_weights, strict=True):
        cut = [[matryoshka.shrink(each, dim) for each in column] for column in embeddings]
        loss += weight * decorator.fn(cut, *args, **kwargs)
    return loss


def gathers(losses: Iterable[nn.Module]) -> bool:
    """Whether one of some losses takes rows from all replicas."""
    modules = (module for loss in losses for module in loss.modules())
    return any(getattr(module, "gather_across_devices", False) for module in modules)


class _OfLosses(nn.ModuleList):
    """Holds modules of losses in the mode that they are in, whatever that of the model around."""

    def train(self, mode: bool = True) -> _OfLosses:
        """Leave them in their mode."""
        return self


def hold_modules(model: Any, losses: Iterable[nn.Module]) -> None:
    """Make modules of losses, such as a classifier, a part of the model, and of no state dict.

    Args:
        model: a `SentenceTransformer`, whose first module holds them: its children are called in
            turn.
        losses: that call it.

    Raises:
        ArgumentsError: a loss has parameters outside of modules.
    """
    held = [module for loss in losses for module in _own_modules(loss, model)]
    first = next(iter(model.children()))
    if not held and NAME not in first._modules:
        return
    if NAME not in first._modules:
        first.register_state_dict_post_hook(_without_losses)
    first.add_module(NAME, _OfLosses(dict.fromkeys(held)))


@contextmanager
def without_held_modules(model: Any) -> Iterator[None]:
    """Context in which modules of losses are in the losses alone, under the names of these."""
    slots = next(iter(model.children()))._modules
    held = slots.pop(NAME, None)
    try:
        yield
    finally:
        slots |= {} if held is None else {NAME: held}


def _own_modules(loss: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """The largest submodules of a loss that have parameters and not the model."""
    for name, _ in loss.named_parameters(recurse=False):
        raise ArgumentsError(
            f"{type(loss).__name__} has a parameter {name!r} of its own, which would not be "
            "trained; put it into a module of its own inside the loss."
        )
    for child in loss.children():
        if any(module is model for module in child.modules()):
            yield from () if child is model else _own_modules(child, model)
        elif any(True for _ in child.parameters()):
            yield child


def _without_losses(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}{NAME}.")]:
        del state[key]
