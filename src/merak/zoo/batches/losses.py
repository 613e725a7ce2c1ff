"""Losses for models that compute none themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from merak.graph.trace.calls.outputs import LOSS, named_outputs


def class_loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the cross entropy of a model's class scores, for models that compute no loss.

    Args:
        outputs: what the model returned; its first tensor with a row of scores for each sample.
        batch: the batch, `labels` among its columns, (microbatch,), whole numbers.
    """
    labels = batch["labels"]
    values = outputs.values() if hasattr(outputs, "values") else outputs
    scores = next(v for v in values if isinstance(v, torch.Tensor) and v.ndim == 2)
    return F.cross_entropy(scores, labels)


def pair_loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the contrastive loss of pairs, for models that score every image and text.

    Args:
        outputs: what the model returned; its `logits_per_image` are (images, texts).
        batch: the batch, whose images belong to its texts in their order.

    Source: arXiv:2103.00020, figure 3.
    """
    scores = outputs["logits_per_image"]
    right = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def outputs_loss(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the distance of all outputs from fixed values: every output counts, none cancels.

    Args:
        outputs: what the model returned; all of its floating point tensors are taken.
        batch: the batch, of which nothing is read.

    Raises:
        KeyError: there is no such tensor.
    """
    named = dict(named_outputs(outputs))
    found = [_distance(v) for n, v in named.items() if n != LOSS and v.is_floating_point()]
    if not found:
        raise KeyError(LOSS)
    return torch.stack(found).mean()


def _distance(values: torch.Tensor) -> torch.Tensor:
    """Compute the mean square of differences from a wave, the same one for every sample."""
    shape = values.shape[1:]
    places = torch.arange(shape.numel(), device=values.device, dtype=values.dtype)
    return (values - torch.cos(places).reshape(shape)).square().mean()
