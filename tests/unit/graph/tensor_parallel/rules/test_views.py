import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from merak.core.shards import ParameterShard, take
from merak.graph.tensor_parallel.placement import Shard
from merak.graph.tensor_parallel.rules.views import reshaped

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5)


def share(whole: torch.Tensor, placed: Shard, degree: int, rank: int) -> torch.Tensor:
    return take(whole, ParameterShard(placed.dim, placed.parts, degree), rank)


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[int], Shard, int]:
    """Two shapes of the same elements made by merging neighbours, and a split of the first."""
    atoms = draw(SIZES)
    degree = draw(st.sampled_from([2, 3]))
    old, new = (_merge(atoms, draw(st.sets(st.integers(1, 4)))) for _ in range(2))
    dim = draw(st.integers(0, len(old) - 1))
    parts = draw(_partitions(old[dim], degree))
    return old, new, Shard(dim, parts), degree


def _merge(atoms: list[int], cuts: set[int]) -> list[int]:
    edges = [0, *sorted(c for c in cuts if c < len(atoms)), len(atoms)]
    return [math.prod(atoms[a:b]) for a, b in pairwise(edges)]


def _partitions(size: int, degree: int) -> st.SearchStrategy[tuple[int, ...]]:
    fits = [n for n in range(1, size + 1) if size % n == 0 and size // n % degree == 0]
    even = [(size // n,) * n for n in fits]
    uneven = [(size - degree, degree)] if size > degree and size % degree == 0 else []
    return st.sampled_from([*even, *uneven] or [(size * degree,)])


@given(views())
def test_shards_of_the_view_are_views_of_the_shards(
    case: tuple[list[int], list[int], Shard, int],
) -> None:
    old, new, placed, degree = case
    if sum(placed.parts) != old[placed.dim]:
        return  # no split of this dim fits
    after = reshaped(old, new, placed, degree)
    if after is None:
        return
    whole = torch.arange(math.prod(old)).reshape(old)
    local = list(new)
    local[after.dim] //= degree
    for rank in range(degree):
        expected = share(whole.reshape(new), after, degree, rank)
        assert torch.equal(share(whole, placed, degree, rank).reshape(local), expected)


def test_what_models_do() -> None:
    heads = Shard(2, (32,))
    assert reshaped((2, 8, 32), (2, 8, 4, 8), heads, 2) == Shard(2, (4,))
    assert reshaped((2, 8, 4, 8), (2, 8, 32), Shard(2, (4,)), 2) == heads
    assert reshaped((2, 8, 32), (16, 32), heads, 2) == Shard(1, (32,))
    # query, key and value fused: outermost, and innermost of a head
    assert reshaped((2, 96), (2, 3, 4, 8), Shard(1, (32, 32, 32)), 2) == Shard(2, (4,))
    assert reshaped((2, 96), (2, 4, 24), Shard(1, (96,)), 2) == Shard(1, (4,))
    # batch and heads merged, and taken apart
    assert reshaped((2, 4, 8, 8), (8, 8, 8), Shard(1, (4,)), 2) == Shard(0, (4, 4))
    assert reshaped((8, 8, 8), (2, 4, 8, 8), Shard(0, (4, 4)), 2) == Shard(1, (4,))


def test_what_cannot_be() -> None:
    assert reshaped((2, 24), (2, 3, 8), Shard(1, (24,)), 2) is None
    assert reshaped((2, 96), (2, 4, 24), Shard(1, (32, 32, 32)), 2) is None
