"""All-reduces of tensors as signs, with error feedback on both ways.

A replica sends one bit of every element and the mean magnitude of every row. Each replica serves
some rows: it adds up what all have sent of them, and sends the sum on as signs again. What either
leaves out is added to what comes next. So a replica sends n / 8 bytes of n elements twice, however
many replicas there are. torch has no compressor of one bit.

Sources: Seide et al., "1-bit stochastic gradient descent" (Interspeech 2014), section 2; arXiv
2102.02888 (1-bit Adam), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from merak.ops.collectives import all_gather
from merak.plan.gradient_compression import SCALE_BYTES, num_scales

Rows = tuple[int, int]
"""Of a tensor, the first row that a replica serves, and the one behind the last."""


def served_rows(shapes: Sequence[Sequence[int]], server: int, size: int) -> list[Rows]:
    """The rows of each tensor that a replica serves: whole ones, since each has one scale.

    They depend on the tensor's shape and place alone, so that tensor parallel ranks which hold the
    same tensor beside shards of different shapes get the same sum, bit by bit.

    Args:
        shapes: of the tensors.
        server: number of the replica.
        size: number of replicas.
    """
    found, vectors = [], 0  # which replicas serve in turn
    for shape in shapes:
        rows, slot = num_scales(shape), (server + vectors) % size
        found.append((rows * slot // size, rows * (slot + 1) // size))
        vectors += rows == 1
    return found


def served_pieces(tensors: Sequence[torch.Tensor], rows: Sequence[Rows]) -> list[torch.Tensor]:
    """Views of some rows of each tensor, as matrices.

    Args:
        tensors: contiguous, each with at least one element.
        rows: of each.
    """
    return [
        tensor.view(num_scales(tensor.shape), -1)[start:stop]
        for tensor, (start, stop) in zip(tensors, rows, strict=True)
    ]


def reduce_signs(
    tensors: Sequence[torch.Tensor],
    errors: Sequence[torch.Tensor],
    served_error: torch.Tensor,
    group: dist.ProcessGroup,
) -> None:
    """Sum compressed tensors over all ranks of a group, in place; all of them call it together.

    Args:
        tensors: each contiguous and with at least one element.
        errors: what this rank has left out before, of the same shapes; what it leaves out now
            afterwards.
        served_error: likewise of the sums, flat, of all rows that this rank serves.
        group: the replicas.
    """
    if not tensors:
        return
    size, rank = group.size(), group.rank()
    for tensor, error in zip(tensors, errors, strict=True):
        error.add_(tensor)
    shapes = [tensor.shape for tensor in tensors]
    rows = [served_rows(shapes, server, size) for server in range(size)]
    lengths = [_lengths(served_pieces(tensors, own)) for own in rows]
    scales = [_scales(error.view(num_scales(error.shape), -1)) for error in errors]
    parts = []
    for own in rows:
        of_rows = [of[start:stop] for of, (start, stop) in zip(scales, own, strict=True)]
        parts.append(_encoded(served_pieces(errors, own), of_rows))
    sizes = [part.numel() for part in parts]
    received = parts[0].new_empty(size * sizes[rank])
    dist.all_to_all_single(received, torch.cat(parts), [sizes[rank]] * size, sizes, group=group)
    for own, part, length in zip(rows, parts, lengths, strict=True):
        _add(served_pieces(errors, own), _decoded(part, length, errors[0].dtype), alpha=-1)
    for part in received.view(size, sizes[rank]):
        served_error.add_(_decoded(part, lengths[rank], served_error.dtype))
    sums = _like(served_error, served_pieces(tensors, rows[rank]))
    part = _encoded(sums, [_scales(piece) for piece in sums])
    served_error.sub_(_decoded(part, lengths[rank], served_error.dtype))
    answer = part.new_zeros(max(sizes))  # as long on all ranks, as all_gather wants it
    answer[: part.numel()] = part
    answers = answer.new_empty(size * answer.numel())
    all_gather(answers, answer, group=group)
    for tensor in tensors:
        tensor.zero_()
    for own, part, length in zip(rows, answers.view(size, -1), lengths, strict=True):
        _add(served_pieces(tensors, own), _decoded(part, length, tensors[0].dtype))


def _add(pieces: Sequence[torch.Tensor], flat: torch.Tensor, alpha: int = 1) -> None:
    torch._foreach_add_(list(pieces), _like(flat, pieces), alpha=alpha)


def _like(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a flat tensor in the shapes of pieces, one after another."""
    split = flat.split([piece.numel() for piece in pieces])
    return [own.view(piece.shape) for own, piece in zip(split, pieces, strict=True)]


def _lengths(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements of each row of the pieces."""
    lengths = [piece.shape[1] for piece in pieces for _ in range(piece.shape[0])]
    return torch.tensor(lengths, dtype=torch.int64).to(pieces[0].device, non_blocking=True)


def _scales(matrix: torch.Tensor) -> torch.Tensor:
    """The mean magnitude of each row, in float32."""
    return matrix.abs().float().mean(dim=1)


def _encoded(pieces: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bytes of the scales of all rows, and of signs, eight to a byte."""
    flat = (torch.cat([piece.reshape(-1) for piece in pieces]) >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    packed = (bits << _places(flat.device)).sum(dim=1, dtype=torch.uint8)
    return torch.cat([torch.cat(list(scales)).view(torch.uint8), packed])


def _decoded(encoded: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales times signs, flat, of rows of the given lengths, from the first of some bytes."""
    begin = len(lengths) * SCALE_BYTES
    scales = encoded[:begin].clone().view(torch.float32)
    bits = (encoded[begin:, None] >> _places(encoded.device)) & 1
    of_each = torch.repeat_interleave(scales, lengths)
    signs = bits.reshape(-1)[: len(of_each)].to(torch.float32).mul_(2).sub_(1)
    return signs.mul_(of_each).to(dtype)


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
