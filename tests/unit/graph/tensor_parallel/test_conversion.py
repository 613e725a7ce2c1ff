"""The table from (placement, need) to collectives: what is run, and what is sent."""

from __future__ import annotations

import pytest

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.conversion import Ways, entering, steps
from merak.graph.tensor_parallel.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    PartlySharded,
    Placement,
    Shard,
)
from merak.ops.linear import SENDS

ROWS, COLUMNS = Shard(0, (8,)), Shard(1, (8,))
SHARED = Shard(0, (8,), copies=2)
FUSED = PartlySharded(0, (8, 2), frozenset((1,)))
PLAIN, SCATTERS, EXCHANGES = Ways(), Ways(scatters=True), Ways(scatters=True, exchanges=True)


@pytest.mark.parametrize(
    ("placed", "need", "ways", "run", "sent"),
    [
        (PARTIAL, REPLICATE, PLAIN, "reduce_from", "all_reduce"),
        (PARTIAL, COLUMNS, PLAIN, "reduce_from slice_to", "all_reduce, all_gather back"),
        (PARTIAL, COLUMNS, SCATTERS, "reduce_scatter_to", "reduce_scatter, all_gather back"),
        (REPLICATE, PARTIAL, PLAIN, "replicate_to_partial", ""),
        (REPLICATE, ROWS, PLAIN, "slice_to", "all_gather back"),
        (REPLICATE, REPLICATE_PARTIAL_GRAD, PLAIN, "copy_to", "all_reduce back"),
        (REPLICATE_PARTIAL_GRAD, REPLICATE, PLAIN, "leave_partial_grad", ""),
        (REPLICATE_PARTIAL_GRAD, ROWS, SCATTERS, "local_slice", ""),
        (REPLICATE, SHARED, PLAIN, "copy_to local_slice", "all_reduce back"),
        (
            ROWS,
            REPLICATE_PARTIAL_GRAD,
            SCATTERS,
            "gather_with_partial_grad",
            "all_gather, reduce_scatter back",
        ),
        (ROWS, REPLICATE, SCATTERS, "gather_from", "all_gather"),
        (ROWS, COLUMNS, EXCHANGES, "exchange_shards", "all_to_all, all_to_all back"),
        (SHARED, ROWS, PLAIN, "own_share", ""),
        (SHARED, REPLICATE, PLAIN, "gather_shared", "all_gather"),
        (FUSED, REPLICATE, PLAIN, "gather_parts", "all_gather"),
        (REPLICATE, REPLICATE, PLAIN, "", ""),
    ],
)
def test_conversions(placed: Placement, need: Placement, ways: Ways, run: str, sent: str) -> None:
    found = list(steps(placed, need, ways))
    kinds = [SENDS[step.target] for step in found]
    assert " ".join(step.target.__name__ for step in found) == run
    there, back = [k.there for k in kinds if k.there], [f"{k.back} back" for k in kinds if k.back]
    assert ", ".join([*there, *back]) == sent


@pytest.mark.parametrize("placed", [ROWS, SHARED])
def test_shards_along_two_dims_are_refused_without_an_exchange(placed: Shard) -> None:
    with pytest.raises(ShardError, match=r"is split (along two dims|in two ways)"):
        list(steps(placed, COLUMNS, PLAIN))


def test_placeholders_whose_gradient_is_summed() -> None:
    kinds = [REPLICATE_PARTIAL_GRAD, SHARED, FUSED, ROWS, REPLICATE]
    found = [entering(placed, 2, "tp") for placed in kinds]
    names = [None if step is None else step.target.__name__ for step in found]
    assert names == ["copy_to", "copy_shared_to", "copy_parts_to", None, None]
