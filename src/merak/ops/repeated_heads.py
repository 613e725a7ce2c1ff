"""Heads of a projection, each several times, as of keys that several ranks use."""

from __future__ import annotations

import torch


def repeat_heads(weight: torch.Tensor, heads: int, copies: int) -> torch.Tensor:
    """A projection of whose outputs each head comes several times, one after another.

    Args:
        weight: (heads · size, …), a weight or a bias.
        heads: the number of heads.
        copies: how often each is there.

    Returns:
        (heads · copies · size, …).
    """
    apart = weight.view(heads, -1, *weight.shape[1:])
    repeated: torch.Tensor = apart.repeat_interleave(copies, 0, output_size=heads * copies)
    return repeated.flatten(0, 1)


def own_heads(weight: torch.Tensor) -> torch.Tensor:
    """What `repeat_heads` gives on a rank that holds one copy of its heads: these.

    Args:
        weight: of the rank's heads.
    """
    return weight
