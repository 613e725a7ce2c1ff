"""Checkpoints that were written once go on, in the same layout and on one rank; and a plan."""

from __future__ import annotations

import json

import pytest

from tests.golden import files
from tests.golden.formats import LOSSES, STEPS, STORED, WRITINGS, Writing, losses, num_ranks
from tests.multirank.ranks import RankPool
from tests.tiers import slow

ESSENTIAL = ("zero2-masters", "tp-whole-tensors")
AFTER = range(STEPS, 2 * STEPS)
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("name", [n if n in ESSENTIAL else slow(n, id=n) for n in WRITINGS])
def test_a_checkpoint_goes_on(pool: RankPool, name: str) -> None:
    writing, folder = WRITINGS[name], str(STORED / name)
    expected = pytest.approx(json.loads(LOSSES.read_text())[name], rel=ROUNDING[writing.dtype])
    for found in pool.run(losses, num_ranks(writing), writing, AFTER, folder, None):
        assert found == expected
    if writing.options.get("schedule") == "pipedream_2bw":
        return  # its weights are those of one rank, and not its next steps
    masters = {k: v for k, v in writing.options.items() if k == "master_weights"}
    alone = Writing({}, masters, writing.optimizer, writing.dtype)
    (found,) = pool.run(losses, 1, alone, AFTER, folder, None)
    assert found == expected


def test_a_plan_is_followed(pool: RankPool) -> None:
    expected = pytest.approx(files.known()["training by plan"], rel=1e-5)
    for found in pool.run(files.losses_of_plan, 2, str(files.STORED)):
        assert found == expected
