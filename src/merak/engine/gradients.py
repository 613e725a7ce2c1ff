"""Gradients across ranks: summed over data parallel replicas, and over the holders of a parameter.

A stage's gradients are reduced in buckets, each as soon as the last microbatch's backward has
passed the segments in it, while the earlier segments still compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class GradientReducer:
    """Sums gradients over a group in buckets, without waiting until told to.

    Args:
        group: the data parallel replicas; None for a single one.
        bucket_bytes: a bucket is sent as soon as it holds this much.
    """

    def __init__(self, group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._bucket: list[torch.nn.Parameter] = []
        self._size = 0
        self._open: list[tuple[dist.Work, torch.Tensor, list[torch.nn.Parameter]]] = []

    def ready(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Some parameters' gradients are final on this rank."""
        if self._group is None:
            return
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            if self._bucket and self._bucket[0].dtype != parameter.dtype:
                self.flush()
            self._bucket.append(parameter)
            self._size += parameter.numel() * parameter.element_size()
            if self._size >= self._bucket_bytes:
                self.flush()

    def flush(self) -> None:
        """Start the sum of what the open bucket holds."""
        if not self._bucket:
            return
        # A replica without a microbatch, or a parameter that took no part, gives zeros.
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None
        self._open.append((work, flat, self._bucket))
        self._bucket, self._size = [], 0

    def wait(self) -> None:
        """Put the sums in the place of the gradients."""
        self.flush()
        for work, flat, parameters in self._open:
            work.wait()
            pieces = flat.split([p.numel() for p in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)
        self._open.clear()

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._open.clear()
        self._bucket, self._size = [], 0


def add_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def global_norm(
    parameters: Sequence[torch.nn.Parameter],
    sharded: frozenset[int],
    tp_degree: int,
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device,
) -> torch.Tensor:
    """The 2-norm of all gradients of the model, every parameter counted once.

    Args:
        parameters: this rank's parameters, without those another stage counts.
        sharded: ids of those that are split over tp; every tp rank holds the others whole.
        tp_degree: how many ranks hold the whole ones.
        groups: the tp and pp groups of this rank.
        device: where the result is.

    Returns:
        A scalar, float32, the same on every rank; nothing is synchronised with the host.
    """
    total = torch.zeros((), device=device)
    for split in (True, False):
        counted = [p.grad for p in parameters if (id(p) in sharded) is split]
        gradients = [gradient for gradient in counted if gradient is not None]
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients)).float()
            total += norms.square().sum() / (1 if split else tp_degree)
    for group in groups:
        if group is not None:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_gradients(
    parameters: Sequence[torch.nn.Parameter], norm: torch.Tensor, max_norm: float
) -> None:
    """Scale gradients so that their global norm is at most `max_norm`, as torch does."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(gradients, factor)
