"""All-gather and reduce-scatter of flat tensors, by the names that this torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Gather the tensors of all ranks, one after the other."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(output_tensor, input_tensor, **kwargs)


def reduce_scatter(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Reduce the tensors of all ranks, and receive this one's shard."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return collective(output_tensor, input_tensor, **kwargs)
