"""`merak check` of small models of the zoo, each for a part in which ranks easily go wrong."""

from __future__ import annotations

from typing import Any

import pytest

from merak.check import CheckOptions, Job, Layout
from merak.zoo.check_by_name import small_version
from merak.zoo.request import Request
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow

PARTS: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "norms-of-heads": ("Qwen3ForCausalLM", {}, Layout(tp=2)),
    "router-loss": (
        "MixtralForCausalLM",
        {"output_router_logits": True, "router_aux_loss_coef": 0.3},
        Layout(pp=2),
    ),
    "tied-weights": ("GPT2LMHeadModel", {}, Layout(pp=2)),
    "row-parallel-biases": ("GPT2LMHeadModel", {}, Layout(tp=2)),
    "tokens-of-ranks": ("LlamaForCausalLM", {}, Layout(cp=2)),
}
"""The model, fields of its config, and the degrees."""

ESSENTIAL = ("norms-of-heads", "router-loss")


@pytest.mark.parametrize("part", [p if p in ESSENTIAL else slow(p, id=p) for p in PARTS])
def test_it_trains_as_in_one_process(pool: RankPool, part: str) -> None:
    name, fields, layout = PARTS[part]
    options = CheckOptions(num_microbatches=2, steps=2)
    trained = small_version(Request(name, given=fields), layout, options)
    job = Job(trained.job.case, layout, options)
    check_on(pool, job, trained.outcome)
