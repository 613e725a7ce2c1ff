"""Reduction of gradients by their signs, with error feedback.

A replica sends one bit of every element and the mean magnitude of every row; what that leaves out
is added to its next gradient. torch has no compressor of one bit.

Sources: Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014), section 2; arXiv
2102.02888 (1-bit Adam), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from merak.ops.flat_collectives import all_gather
from merak.plan.gradient_compression import SCALE_BYTES, compressed_bytes, num_scales


def reduce_signs(
    gradients: Sequence[torch.Tensor], errors: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Sum compressed gradients over all ranks of a group, in place; all of them call it together.

    Args:
        gradients: of parameters, each contiguous and with at least one element.
        errors: what this rank has left out before, of the same shapes; what it leaves out now
            afterwards.
        group: the replicas.
    """
    for gradient, error in zip(gradients, errors, strict=True):
        error.add_(gradient)
    if not gradients:
        return
    own = torch.cat([_encoded(error) for error in errors])
    every = own.new_empty(group.size() * own.numel())
    all_gather(every, own, group=group)
    rows, start = every.view(group.size(), -1), 0
    for gradient, error in zip(gradients, errors, strict=True):
        end = start + compressed_bytes("1bit", gradient.shape, gradient.element_size())
        error.sub_(_decoded(own[start:end], gradient))
        gradient.zero_()
        for row in rows:
            gradient.add_(_decoded(row[start:end], gradient))
        start = end


def _encoded(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of the scales, each row's mean magnitude in float32, and of signs, eight to a byte."""
    flat = (tensor.reshape(-1) >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = (bits << _places(tensor.device)).sum(dim=1, dtype=torch.uint8)
    scales = tensor.reshape(num_scales(tensor.shape), -1).abs().float().mean(dim=1)
    return torch.cat([scales.view(torch.uint8), packed])


def _decoded(encoded: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Scales times signs, in the shape and type of a tensor."""
    rows = num_scales(like.shape)
    scales = encoded[: rows * SCALE_BYTES].clone().view(torch.float32)
    bits = (encoded[rows * SCALE_BYTES :, None] >> _places(encoded.device)) & 1
    signs = bits.reshape(-1)[: like.numel()].to(torch.float32).mul_(2).sub_(1)
    return (signs.view(rows, -1) * scales[:, None]).to(like.dtype).view_as(like)


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
