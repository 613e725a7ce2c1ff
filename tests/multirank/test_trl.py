"""TRL's trainers on several ranks train as TRL's own do in one process."""

from __future__ import annotations

import pytest

from tests.multirank.logged import expect_equal
from tests.multirank.ranks import RankPool
from tests.multirank.training import alone
from tests.multirank.trl_jobs import Case, train, train_alone
from tests.tiers import slow

pytest.importorskip("trl")

PADDED = Case("SFT", {"eval_strategy": "steps"})
WRAPPED = Case("SFT", {"packing": True, "packing_strategy": "wrapped", "max_length": 24}, lora=True)
PACKED = Case("SFT", {"packing": True, "pad_to_multiple_of": None}, lora=True)
PREFERS = Case("DPO", {"eval_strategy": "steps"}, lora=True)
PRECOMPUTED = Case("DPO", {"precompute_ref_log_probs": True})
BESIDE = Case("DPO", {"eval_strategy": "steps"}, reference=True)
SYNCED = Case("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 3}, reference=True)
REWARDS = Case("Reward")
_IN_ORDER = {"train_sampling_strategy": "sequential", "eval_strategy": "steps"}
JUDGED = Case("KTO", _IN_ORDER, reference=True)
JUDGED_ADAPTERS = Case("KTO", _IN_ORDER, lora=True)
JUDGED_BEFORE = Case("KTO", {**_IN_ORDER, "precompute_ref_log_probs": True})
UNPAIRED = Case(
    "KTO",
    {
        "loss_type": "apo_zero_unpaired",
        "precompute_ref_log_probs": True,
        "eval_strategy": "steps",
    },
)
ALL = [PADDED, PACKED, PREFERS, PRECOMPUTED, BESIDE, SYNCED, REWARDS]
ALL_JUDGED = [JUDGED, JUDGED_ADAPTERS, JUDGED_BEFORE, UNPAIRED]


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        pytest.param((1, 1, 2), [WRAPPED, SYNCED], id="pp-essential"),
        slow((1, 1, 2), ALL, id="pp"),
        slow((1, 2, 1), ALL, id="tp"),
        slow((2, 1, 1), ALL, id="dp"),
        slow((1, 1, 2), ALL_JUDGED, id="judged-pp"),
        slow((1, 2, 1), ALL_JUDGED, id="judged-tp"),
        slow((2, 1, 1), ALL_JUDGED, id="judged-dp"),
    ],
)
def test_as_in_one_process(
    pool: RankPool, cache: str, layout: tuple[int, ...], cases: list[Case]
) -> None:
    with alone():
        expected = [train_alone(case) for case in cases]
    for rank, outcomes in enumerate(pool.run(train, 2, layout, cases, cache)):
        for found, wanted in zip(outcomes, expected, strict=True):
            assert len(found.logs) == len(wanted.logs)
            if rank == 0:
                expect_equal(found, wanted)
