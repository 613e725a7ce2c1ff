"""Full reductions of whole parameters in steps over shards, beside those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from merak.core.errors import TrainingError
from merak.plan.optimizer.whole_reductions import (
    Combine,
    CutParameter,
    Partial,
    WholeReductions,
)

WHOLE = torch.linspace(-2.0, 3.0, 24, dtype=torch.float64).view(6, 4)
Reduce = Callable[[torch.Tensor], torch.Tensor]


def parts_of(reduce: Reduce, shards: Sequence[torch.Tensor], **cut: Any) -> list[Partial]:
    """What each shard contributes to a reduction."""
    found: list[Partial] = []

    def note(parts: Sequence[Partial]) -> list[torch.Tensor]:
        found.extend(parts)
        return [part.value for part in parts]

    for piece in shards:
        own = CutParameter("weight", WHOLE.numel(), tuple(piece.shape), **cut)
        with WholeReductions({piece: own}, note):
            reduce(piece)
    return found


def on_shards(reduce: Reduce, shards: Sequence[torch.Tensor], **cut: Any) -> torch.Tensor:
    """The reduction that the first shard gets when all parts are combined."""
    parts = parts_of(reduce, shards, **cut)
    values = torch.stack([part.value for part in parts])
    total = values.sum() if parts[0].combine is Combine.SUM else values.max()
    own = CutParameter("weight", WHOLE.numel(), tuple(shards[0].shape), **cut)
    with WholeReductions({shards[0]: own}, lambda _: [total]):
        found = reduce(shards[0])
    return found


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.norm(),
        lambda x: torch.linalg.vector_norm(x, 1),
        lambda x: torch.linalg.vector_norm(x, float("inf"), keepdim=True),
        lambda x: torch.linalg.vector_norm(x, float("-inf")),
        lambda x: torch.linalg.vector_norm(x, 0),
        lambda x: (2 * x).square().sum(),
        lambda x: x.mean(),
        lambda x: x.sum((0, 1), keepdim=True),
        lambda x: x.max(),
        lambda x: x.min(),
        lambda x: torch.amax(x, (0, 1)),
        lambda x: torch.dot(x.view(-1), x.sin().view(-1)),
        lambda x: torch._foreach_norm([x])[0],
        lambda x: (x > 2.9).any(),
        lambda x: (x > -3.0).all(),
        lambda x: torch.count_nonzero(x > 0),
        lambda x: x.float().norm(),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_give_the_reduction_of_the_whole(reduce: Reduce, dim: int) -> None:
    pieces = [piece.contiguous() for piece in WHOLE.tensor_split(3, dim)]
    expected, found = reduce(WHOLE), on_shards(reduce, pieces)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found, expected)


def test_padding_and_copies_count_once() -> None:
    padded = torch.cat([WHOLE, torch.full((2, 4), 7.0, dtype=torch.float64)])
    pieces = [*padded.split(4), *padded.split(4)]  # each twice
    sizes = iter([4, 2, 4, 2, 4])

    def counted(piece: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        return [(piece[: next(sizes)], 2)]

    found = on_shards(lambda x: x.mean(), pieces, pieces=counted)
    torch.testing.assert_close(found, WHOLE.mean())


def test_what_depends_on_a_reduction_waits_for_one_exchange() -> None:
    first, second, exchanges = WHOLE.clone(), WHOLE.clone() + 1.0, list[int]()
    cuts = {x: CutParameter(str(id(x)), 48, (6, 4)) for x in (first, second)}

    def double(parts: Sequence[Partial]) -> list[torch.Tensor]:
        exchanges.append(len(parts))
        return [2 * part.value for part in parts]

    with WholeReductions(cuts, double) as mode:
        for one in (first, second):
            ratio = one.sum() / 10.0
            scaled = one * ratio
            one.mul_(0.5)  # waits, since what reads it waits
            one.sub_(scaled.view(-1).view(6, 4))
    assert exchanges == [2] and mode.num_reads == 0
    torch.testing.assert_close(first, 0.5 * WHOLE - WHOLE * 2 * WHOLE.sum() / 10)
    torch.testing.assert_close(second, (WHOLE + 1) * (0.5 - 2 * (WHOLE + 1).sum() / 10))
    torch.testing.assert_close(scaled, (WHOLE + 1) * 2 * (WHOLE + 1).sum() / 10)


def test_reductions_of_reductions_are_exchanged_one_after_another() -> None:
    own, exchanges = WHOLE.clone(), list[int]()

    def same(parts: Sequence[Partial]) -> list[torch.Tensor]:
        exchanges.append(len(parts))
        return [part.value for part in parts]

    with WholeReductions({own: CutParameter("weight", 24, (6, 4))}, same):
        own.sub_((own / own.norm()).abs().max())
    assert exchanges == [1, 1]
    torch.testing.assert_close(own, WHOLE - (WHOLE / WHOLE.norm()).abs().max())


def test_a_number_is_read_behind_an_exchange() -> None:
    cuts = {WHOLE: CutParameter("weight", 24, (6, 4))}
    with WholeReductions(cuts, lambda _: [WHOLE.new_ones(())]) as mode:
        assert float(WHOLE.norm()) == 1.0
    assert mode.num_reads == 1


@pytest.mark.parametrize("call", [lambda x: x.mean(0), lambda x: x @ x.T, lambda x: x.cumsum(0)])
def test_what_needs_whole_tensors_is_named(call: Any) -> None:
    cuts = {WHOLE: CutParameter("weight", 24, (6, 4))}
    mode = WholeReductions(cuts, lambda parts: [part.value for part in parts])
    with pytest.raises(TrainingError, match=r"aten.* on shards of 'weight', of which"), mode:
        call(WHOLE)
