"""Reductions of the largest elements of tensors, with error feedback.

A replica sends the largest elements of every tensor with their places, and adds the others to the
next ones. Which they are differs by replica, so that each gets those of all others.

Sources: arXiv 1704.05021 (TopK); arXiv 1712.01887 (Deep Gradient Compression), section 3.2, for
momentum correction and momentum factor masking. torch has no hook for either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from merak.ops.collectives import all_gather
from merak.plan.gradient_compression import num_largest


def reduce_largest(
    flat: torch.Tensor,
    counts: Sequence[int],
    kept: Sequence[torch.Tensor],
    fraction: float,
    group: dist.ProcessGroup,
) -> None:
    """Sum the largest elements over all ranks of a group; all of them call it together.

    Args:
        flat: tensors, one after another; afterwards the sum of what all ranks have sent of them.
        counts: elements of each tensor.
        kept: flat tensors like it: this rank's elements with those that it has left out, and others
            that are to be zero, too, where an element is sent.
        fraction: of the elements of a tensor that is sent.
        group: the replicas.
    """
    places, start = [], 0
    for own in kept[0].split(list(counts)):
        found = torch.topk(own.abs(), num_largest(own.numel(), fraction), sorted=False).indices
        places.append(found + start)
        start += own.numel()
    index = torch.cat(places)
    values = kept[0][index]
    for own in kept:
        own[index] = 0.0
    # Four bytes each, but for buckets of a tensor that has more than 2**31 elements.
    narrow = index.int() if flat.numel() < 2**31 else index
    sent = torch.cat([values.view(torch.uint8), narrow.view(torch.uint8)])
    every = sent.new_empty(group.size() * sent.numel())
    all_gather(every, sent, group=group)
    flat.zero_()
    for row in every.view(group.size(), -1):  # each place once: the order of sums is that of ranks
        theirs = row[: values.nbytes].clone().view(values.dtype)
        flat.index_add_(0, row[values.nbytes :].clone().view(narrow.dtype), theirs)
