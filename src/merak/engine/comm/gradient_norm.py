"""The norm of all gradients of a model, over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from merak.core.gradients import is_low_precision
from merak.core.shards import ParameterShard, RowShard


def pipeline_norm(
    gradients: Mapping[str, torch.Tensor],
    order: Sequence[str],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> torch.Tensor:
    """The 2-norm of all gradients of a pipeline without shards, to the last bit torch's own.

    torch takes the norm of the parameters' norms, in the model's order; so must the ranks. Those of
    a lower precision than float32, which torch rounds to that precision, are not rounded here.

    Args:
        gradients: those that this rank counts, by name.
        order: names of all parameters of the pipeline that have gradients, in the model's order.
        group: the pipeline's ranks; None for one alone.
        device: where the result is.

    Returns:
        A scalar, the same on every rank, float64 where this rank's gradients are and else float32;
        nothing is synchronised with the host.
    """
    is_exact = any(gradient.dtype == torch.float64 for gradient in gradients.values())
    # Ranks without gradients do not know how exact those of others are; float32 fits into float64.
    known = [name for name in order if name in gradients]
    values = [_values(gradients[name]) for name in known]
    own = dict(zip(known, _norms(values)))
    # Nothing is indexed, for which the host would send places and wait.
    here = values[0].device if values else device  # the optimizer's, which may be in host memory
    nothing = torch.zeros((), device=here, dtype=torch.float64)
    norms = torch.stack([*(own.get(name, nothing) for name in order), nothing]).double().to(device)
    if group is not None:
        dist.all_reduce(norms, group=group)  # of each norm and zeros: it stays as it is
    total: torch.Tensor = torch.linalg.vector_norm(norms if is_exact else norms.float())
    return total


def _norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each gradient, in float32 where the gradient has a lower precision."""
    found: dict[int, torch.Tensor] = {}
    for dtype in (None, torch.float32):
        chosen = [i for i, g in enumerate(gradients) if is_low_precision(g) is (dtype is not None)]
        if chosen:
            norms = torch._foreach_norm([gradients[i] for i in chosen], 2, dtype)
            found |= dict(zip(chosen, norms, strict=True))
    return [found[i] for i in range(len(gradients))]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a gradient without the zeros of a sparse one."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def global_norm(
    parameters: Sequence[torch.nn.Parameter],
    sharded: Mapping[int, ParameterShard],
    degree: int,
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device,
    rows: Mapping[int, RowShard] | None = None,
) -> torch.Tensor:
    """The 2-norm of all gradients of the model, every parameter counted once.

    Args:
        parameters: this rank's parameters, without those another stage counts.
        sharded: by id, the shards of those that are split; each rank of a split holds the others.
        degree: the number of ranks that a parameter is split over, and that hold the others.
        groups: the groups of this rank over which parameters or their rows differ.
        device: where the result is.
        rows: by id, which rows those are of which this rank has only some.

    Returns:
        A scalar, the same on every rank, float64 where this rank's gradients are and else float32;
        nothing is synchronised with the host.
    """
    # Ranks without gradients do not know how exact those of others are.
    total = torch.zeros((), device=device, dtype=torch.float64)
    pieces = [
        piece
        for p in parameters
        if p.grad is not None
        for piece in pieces_of(_values(p.grad), sharded.get(id(p)), (rows or {}).get(id(p)), degree)
    ]
    for copies in sorted({copies for _, copies in pieces}):
        gradients = [gradient for gradient, own in pieces if own == copies]
        norms = torch.stack(_norms(gradients)).double()
        total += norms.square().sum() / copies
    for group in groups:
        if group is not None:
            dist.all_reduce(total, group=group)
    is_exact = any(gradient.dtype == torch.float64 for gradient, _ in pieces)
    return total.sqrt() if is_exact else total.sqrt().float()


def pieces_of(
    gradient: torch.Tensor, shard: ParameterShard | None, rows: RowShard | None, degree: int
) -> list[tuple[torch.Tensor, int]]:
    """A gradient, or its fused parts where only some are split; and how many ranks have each.

    Args:
        gradient: of a parameter, or another tensor of its shape.
        shard: which shard that is; None for the whole.
        rows: which rows of the shard; None for all.
        degree: over how many ranks parameters are split, which have the same of what is not.
    """
    if shard is None:
        return [(gradient, degree)]
    if not shard.whole:
        return [(gradient, shard.copies)]
    sizes = shard.sizes(0)  # of what is split in parts, all ranks have as much
    if rows is not None and shard.dim == 0:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        inside = [min(max(end, rows.start), rows.stop) - rows.start for end in ends]
        sizes = tuple(b - a for a, b in zip([0, *inside], inside))
    parts = gradient.split(sizes, shard.dim)
    return [(part, degree if i in shard.whole else 1) for i, part in enumerate(parts)]


def clip_gradients(
    parameters: Sequence[torch.nn.Parameter], norm: torch.Tensor, max_norm: float
) -> None:
    """Scale gradients so that their global norm is at most `max_norm`, as torch does."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradients[0].device)
        torch._foreach_mul_(gradients, factor)
