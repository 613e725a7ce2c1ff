"""Loss of models whose own is a mean over a microbatch: here it is one over the whole step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from merak.cli.recipe.data.packing import IGNORED


def mean_over_labels(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Compute the cross entropy of a microbatch as its part of the mean over a step.

    The sum of these over the microbatches of a step does not depend on how the step is cut. Models
    that mask tokens, write spans or classify images would each give the mean of their microbatch,
    which transformers' trainer adds up.

    Args:
        outputs: of the model, with `logits`, (…, classes).
        labels: (…): one for each row of logits; `-100` for those that do not count.
        num_items_in_batch: labels of the step; None for the mean over those here.
    """
    logits = outputs.logits.flatten(0, -2).float()
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
