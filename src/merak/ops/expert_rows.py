"""Rows of experts in traced graphs: every rank multiplies those of its own experts.

Rows that are sorted by expert are rotated, so that the rank's own come first, as grouped products
begin at the first row; those behind them are in no group and cost nothing. Sizes are those of all
rows, whatever the routing, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from merak.ops.collectives import axis_degree, axis_rank
from merak.ops.grouped_product import grouped_product, product_by_kernel
from merak.ops.linear import linear


def enter_experts(rows: torch.Tensor, offsets: torch.Tensor, axis: str) -> torch.Tensor:
    """Rotation of rows sorted by expert, so that the rank's own come first.

    Args:
        rows: (rows, …), the same on every rank of the axis.
        offsets: (experts,), where every expert's rows end.
        axis: name of the mesh axis.

    Returns:
        The rotated rows; of their gradient, each rank has a part.
    """
    start, _ = _own_rows(offsets, axis)
    return _enter(rows, start)


def leave_experts(rows: torch.Tensor, offsets: torch.Tensor, axis: str) -> torch.Tensor:
    """Rotation of the rank's own rows back to their places, with zeros in the place of the others.

    Args:
        rows: (rows, …), the rank's own in front.
        offsets: (experts,), where every expert's rows end in the whole value.
        axis: name of the mesh axis.

    Returns:
        The rank's summand of the whole value.
    """
    return _leave(rows, *_own_rows(offsets, axis))


def grouped_mm_rows(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, axis: str
) -> torch.Tensor:
    """Grouped product of the rank's own rows, which come first; the others give zeros.

    Args:
        rows: (rows, inputs).
        weight: (own experts, inputs, outputs).
        offsets: (all experts,), where every expert's rows end in the whole value.
        axis: name of the mesh axis.

    Returns:
        (rows, outputs); the gradient of the other rows is zero too.
    """
    return product_by_kernel(rows, weight, _own_ends(offsets, axis))


def grouped_mm_fallback_rows(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, axis: str
) -> torch.Tensor:
    """Grouped product as `grouped_mm_rows`, of every dtype."""
    return grouped_product(rows, weight, _own_ends(offsets, axis))


def grouped_linear_rows(  # as `merak::grouped_linear`, and the axis
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    skips_idle: bool,
    is_transposed: bool,
    axis: str,
) -> torch.Tensor:
    """Grouped product as `grouped_mm_rows`, where experts have weights of their own.

    Args:
        rows: (rows, inputs), the rank's own in front.
        weights: of all experts; those of other ranks' experts are empty.
        offsets: (experts,), where every expert's rows end in the whole value.
        skips_idle: whether an expert without rows gets no gradient.
        is_transposed: whether weights are (outputs, inputs).
        axis: name of the mesh axis.

    Returns:
        (rows, outputs), zeros behind the rank's own.
    """
    ends = _own_ends(offsets, axis)
    return own_grouped_linear(rows, weights, ends, skips_idle, is_transposed, axis)


def own_grouped_linear(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    skips_idle: bool,
    is_transposed: bool,
    axis: str,
) -> torch.Tensor:
    """`grouped_linear_rows`, with offsets (own experts,) of the rank's own rows alone."""
    own, product = _own_of(weights, axis), torch.ops.merak.grouped_linear
    result: torch.Tensor = product(rows, own, offsets, skips_idle, is_transposed)
    return result


def grouped_values_rows(
    rows: torch.Tensor,
    values: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    skips_idle: bool,
    axis: str,
) -> torch.Tensor:
    """The value of its expert for each of the rank's own rows, such as biases; zeros behind.

    Args:
        rows: as many as the whole value has.
        values: one of each expert; those of other ranks' experts are empty.
        offsets: (experts,), where every expert's rows end in the whole value.
        skips_idle: whether an expert without rows gets no gradient.
        axis: name of the mesh axis.

    Returns:
        (rows, …), the rank's own in front.
    """
    return own_grouped_values(rows, values, _own_ends(offsets, axis), skips_idle, axis)


def own_grouped_values(
    rows: torch.Tensor,
    values: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    skips_idle: bool,
    axis: str,
) -> torch.Tensor:
    """`grouped_values_rows`, with offsets (own experts,) of the rank's own rows alone."""
    own = _own_of(values, axis)
    result: torch.Tensor = torch.ops.merak.grouped_values(rows, own, offsets, skips_idle)
    return result


def pick_expert_rows(values: torch.Tensor, experts: torch.Tensor, axis: str) -> torch.Tensor:
    """Values of the rank's experts, one for each of its own rows; zeros behind.

    Args:
        values: (own experts, …), as of biases.
        experts: (rows,), every row's expert, in ascending order.
        axis: name of the mesh axis.

    Returns:
        (rows, …), the rank's own in front.
    """
    num_own = values.shape[0]
    first = axis_rank(axis) * num_own
    own = _rotated(experts, (experts < first).sum()) - first
    is_other = (own < 0) | (own >= num_own)
    picked = values[own.clamp(0, num_own - 1)]
    return picked.masked_fill(_as_column(is_other, picked), 0)


def _rotated_back(rows: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return _rotated(rows, -start)


def _returned(rows: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """Own rows in their places, zeros in those of the others."""
    place = torch.arange(rows.shape[0], device=rows.device)
    is_other = _as_column((place < start) | (place >= stop), rows)
    return _rotated(rows, -start).masked_fill_(is_other, 0)


def _entered(rows: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """Own rows in front, zeros behind."""
    place = torch.arange(rows.shape[0], device=rows.device)
    return _rotated(rows, start).masked_fill_(_as_column(place >= stop - start, rows), 0)


def _rotated(rows: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Rows from `start` on, then those before it."""
    count = rows.shape[0]
    place = torch.arange(count, device=rows.device) + start
    return rows.index_select(0, place.remainder(max(count, 1)))


def _own_rows(offsets: torch.Tensor, axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of the rank's own rows, and the one behind the last."""
    num_own = offsets.shape[0] // axis_degree(axis)
    first = axis_rank(axis) * num_own
    start = offsets[first - 1] if first else torch.zeros_like(offsets[0])
    return start, offsets[first + num_own - 1]


def _own_of(weights: Sequence[torch.Tensor], axis: str) -> list[torch.Tensor]:
    """Of a parameter that every expert has one of, those of the rank's own experts."""
    num_own = len(weights) // axis_degree(axis)
    first = axis_rank(axis) * num_own
    return list(weights[first : first + num_own])


def _own_ends(offsets: torch.Tensor, axis: str) -> torch.Tensor:
    """Where the rows of the own experts end, counted from the first of them."""
    num_own = offsets.shape[0] // axis_degree(axis)
    start, _ = _own_rows(offsets, axis)
    return offsets.narrow(0, axis_rank(axis) * num_own, num_own) - start


def _as_column(mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *(1 for _ in rows.shape[1:]))


_enter = linear(_rotated, _rotated_back)
_leave = linear(_returned, _entered)
