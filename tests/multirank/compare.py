"""Compare what many ranks saw of a job with what one process saw."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from merak.core.shards import join
from tests.multirank.training import Outcome
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

Tensors = dict[str, torch.Tensor]


def whole(ranks: Sequence[Outcome], kind: str) -> Tensors:
    """The whole model's tensors, out of those of all ranks; copies must be equal to the last bit.

    Args:
        ranks: what every rank saw.
        kind: the field of `Outcome`.
    """
    found: Tensors = {}
    groups: dict[tuple[int, int], list[Outcome]] = {}
    for rank in sorted(ranks, key=lambda r: r.place[1]):
        groups.setdefault((rank.place[0], rank.place[2]), []).append(rank)
    for own in groups.values():
        for name in getattr(own[0], kind):
            shares = [getattr(rank, kind)[name] for rank in own]
            shard = own[0].shards.get(name)
            if shard is None:
                for other in shares[1:]:
                    assert torch.equal(shares[0], other), f"{name} differs among tp ranks"
            value = shares[0] if shard is None else join(shares, shard)
            known = found.setdefault(name, value)
            assert torch.equal(known, value), f"{name} differs among ranks that hold it"
    return found


def assert_same_losses_everywhere(ranks: Sequence[Outcome]) -> None:
    assert ranks[0].losses
    for rank in ranks[1:]:
        assert rank.losses == ranks[0].losses
        assert rank.norms == ranks[0].norms


def assert_identical(ranks: Sequence[Outcome], expected: Outcome) -> None:
    """Losses, first gradients and final parameters are those of one process, bit for bit."""
    assert_same_losses_everywhere(ranks)
    assert ranks[0].losses == expected.losses
    for kind in ("initial", "first", "final"):
        found, wanted = whole(ranks, kind), getattr(expected, kind)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(found[name], value), f"{kind} of {name}"


def assert_close(ranks: Sequence[Outcome], expected: Outcome) -> None:
    """Losses within 1e-5, first gradients within 1e-5 of their largest magnitude."""
    assert_same_losses_everywhere(ranks)
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert ranks[0].norms[0] == pytest.approx(expected.norms[0], rel=1e-5)
    initial = whole(ranks, "initial")
    for name, value in expected.initial.items():
        assert torch.equal(initial[name], value), name
    assert_gradients_equal(whole(ranks, "first"), expected.first)
