"""Variants of the fastest plan: recomputation that fills the memory, microbatches, schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from merak.core.doctor.memory import FEWEST_BYTES
from merak.core.errors import PlanError
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.price.step import price
from merak.plan.search.fewer_devices import _smaller
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Ranking
from merak.plan.search.search import search, search_job
from merak.plan.search.variants import _doubled, with_variants
from merak.schedule import registry
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload
from tests.unit.plan.search.doubles import Double, job_of


@dataclass
class WithAuto(Double):
    """Prices of plans, of which those with "auto" take a fraction of the plan with "full".

    Args:
        fraction: of the seconds of the same plan with recompute="full"; None where it is refused.
        becomes: what "auto" chose.
        peak: bytes of it.
    """

    fraction: float | None = 0.9
    becomes: str = "0,1,"
    peak: int = 10

    def price(self, own: Candidate) -> Price:
        if own.recompute != "auto":
            return super().price(own)
        if self.fraction is None:
            raise PlanError("auto needs what this test has not.")
        full = super().price(replace(own, recompute="full"))
        return replace(
            full,
            candidate=replace(own, recompute=self.becomes),
            step_s=self.fraction * full.step_s,
            peak_memory_bytes=(self.peak,) * own.pp,
        )


def ranking(double, pinned, refusal=None):
    only = Pinned(**pinned.choices, ep=1)
    found = search_job(job_of(), double, only, 3)
    plan = replace(found.plans[0], candidate=replace(found.plans[0].candidate, recompute="full"))
    found = replace(found, plans=(plan, *found.plans[1:]))
    kept = Pinned(
        **only.choices, schedule="1f1b", offload_activations="off", offload_optimizer="off"
    )
    return found, with_variants(found, double, kept, 3, refusal)


def test_a_faster_one_is_the_first_plan():
    before, after = ranking(WithAuto(fraction=0.1), Pinned())
    assert after.plans[0].candidate.recompute == "0,1,"
    assert len(after.plans) == len(before.plans) == 3
    assert after.plans[1:] == before.plans[:2]
    assert after.num_priced == before.num_priced + 1
    assert after.num_candidates == before.num_candidates + 1


def test_one_that_recomputes_may_overtake_one_that_does_not():
    double = WithAuto(fraction=0.85)
    found = search_job(job_of(), double, Pinned(ep=1), 3)
    first = replace(found.plans[0].candidate, schedule="v_half", schedule_options={}, pp=2)
    other = replace(found.plans[0].candidate, schedule="1f1b", recompute="full")
    full = double.price(other)
    best = replace(full, candidate=first, step_s=0.9 * full.step_s)
    kept = Pinned(schedule="1f1b", ep=1, offload_activations="off", offload_optimizer="off")
    after = with_variants(replace(found, plans=(best, full), behind=()), double, kept, 3, None)
    assert [plan.candidate.recompute for plan in after.plans] == ["0,1,", "off", "full"]
    far = replace(best, step_s=0.7 * full.step_s)
    found = replace(found, plans=(far, full), behind=())
    assert with_variants(found, double, kept, 3, None) == found


def test_other_degrees_may_fill_the_memory_better():
    """The fastest with them recomputes nothing: then twice the microbatch fills it."""
    double = WithAuto(fraction=0.85)
    found = search_job(job_of(), double, Pinned(ep=1), 3)
    some = replace(found.plans[0].candidate, dp=2, tp=1, pp=1, num_microbatches=4)
    best = replace(double.price(replace(some, recompute="full")), step_s=1.0)
    pipeline = replace(some, dp=1, pp=2, microbatch=1, recompute="off")
    other = replace(double.price(pipeline), step_s=1.1)
    ranking = replace(found, plans=(best, other), behind=())
    kept = Pinned(schedule="1f1b", ep=1, offload_activations="off", offload_optimizer="off")
    with_variants(ranking, double, kept, 3, None)
    larger = replace(pipeline, microbatch=2, num_microbatches=2, recompute="full")
    assert double.priced[-1] == replace(larger, partition=None)  # of which "auto" takes a part
    so_far = len(double.priced)
    with_variants(ranking, double, Pinned(**kept.choices, microbatch=1), 3, None)
    far = replace(ranking, plans=(best, replace(other, step_s=1.4)))
    with_variants(far, double, kept, 3, None)
    assert all(own.pp == 1 for own in double.priced[so_far:])


def test_each_schedule_fills_the_memory_of_the_layout_that_it_recomputes_in():
    """One recomputes with twice the microbatch, the other with the plan's own, and wins."""
    double = WithAuto(fraction=0.8)
    found = search_job(job_of(), double, Pinned(ep=1), 3)
    first = replace(found.plans[0].candidate, dp=1, tp=1, pp=4, num_microbatches=8, recompute="off")
    best = replace(double.price(first), step_s=1.0)
    larger = replace(first, microbatch=2, num_microbatches=4, recompute="full")
    other = replace(first, schedule="zero_bubble_h1", recompute="full")
    one, two = (replace(double.price(own), step_s=s) for own, s in ((larger, 1.1), (other, 1.2)))
    kept = Pinned(schedule="1f1b", ep=1, offload_activations="off", offload_optimizer="off")
    so_far = len(double.priced)
    with_variants(replace(found, plans=(best, one, two), behind=()), double, kept, 3, None)
    filled = [own for own in double.priced[so_far:] if own.recompute == "full"]
    assert filled == [replace(own, partition=None) for own in (larger, other)]


def left_out(found):
    return [own.why for own in found.rejected if own.what == "recompute=auto"]


def test_a_slower_one_is_told_with_both_times():
    before, after = ranking(WithAuto(fraction=100.0), Pinned())
    assert after.plans[0] == before.plans[0]
    why, *_ = left_out(after)
    assert "with recompute=full" in why and f"{before.plans[0].step_s:.3g} s" in why


def test_one_that_does_not_fit_names_its_memory():
    before, after = ranking(WithAuto(peak=10**12), Pinned())
    assert after.plans == before.plans
    why, *_ = left_out(after)
    assert "1.0 TB of 100 B" in why


def test_one_that_cannot_be_or_may_not_be_says_why():
    before, after = ranking(WithAuto(fraction=None), Pinned())
    assert after.plans == before.plans
    assert set(left_out(after)) == {"auto needs what this test has not"}
    before, after = ranking(WithAuto(), Pinned(), lambda own: "the job has no such")
    assert after.plans == before.plans and set(left_out(after)) == {"the job has no such"}


def test_what_chose_full_recomputation_again_is_no_further_plan():
    before, after = ranking(WithAuto(becomes="full", fraction=1.0), Pinned())
    assert after.plans == (before.plans[0], *before.plans[1:])


def test_pinned_recomputation_has_no_variants():
    double = WithAuto()
    before, after = ranking(double, Pinned(recompute="full"))
    assert after == before


def devices(memory_bytes: int) -> Cluster:
    cluster = parse_cluster("a100:2x1")
    (nodes,) = cluster.nodes
    device = replace(nodes.device, memory_bytes=memory_bytes)
    return replace(cluster, nodes=(replace(nodes, device=device),))


LLAMA = ModelSource(
    LlamaForCausalLM,
    LlamaConfig(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
    ),
    None,
)  # fmt: skip


def test_the_memory_between_two_plans_is_filled() -> None:
    workload = example_workload(LLAMA, global_batch=8, sequence=1024)
    pinned = Pinned(
        pp=2, tp=1, microbatch=1, zero=0, schedule="1f1b", sub_pipelining="off",
        offload_activations="off", offload_optimizer="off",
    )  # fmt: skip
    base = Candidate(pp=2, num_microbatches=8)
    least, most = (
        max(price(workload, devices(2**40), replace(base, recompute=own)).peak_memory_bytes)
        for own in ("selective", "off")
    )
    half_used = least + most  # of a memory this small, half is usable
    found = search(workload, devices(half_used), pinned, top=3)
    best = found.plans[0]
    assert best.fits and best.candidate.recompute not in ("off", "selective", "full")
    assert found.plans[1].candidate.recompute in ("selective", "full")
    assert max(best.peak_memory_bytes) > max(found.plans[1].peak_memory_bytes)


def test_larger_microbatches_are_priced_where_the_largest_that_is_searched_is_the_best():
    double = Double(weights=(0.05, 0.02, 0.3, 40.0, 0.01), device_bytes=10_000.0)
    only = Pinned(ep=1, recompute="off", schedule="1f1b")
    job = job_of(8, 1024, 9)
    found = search_job(job, double, only, 3)
    assert found.plans[0].candidate.microbatch == 8
    after = with_variants(found, double, only, 3, None)
    best = after.plans[0]
    assert best.candidate.num_microbatches == 1  # all samples of a replica at once
    assert best.candidate.microbatch * best.candidate.dp == 1024
    assert best.step_s < found.plans[0].step_s


def test_larger_microbatches_of_other_degrees_that_are_as_good_are_priced():
    double = Double(device_bytes=10_000.0)
    kept = Pinned(ep=1, recompute="off", schedule="1f1b")
    found = search_job(job_of(8, 1024, 9), double, kept, 3)
    some = replace(found.plans[0].candidate, microbatch=8, num_microbatches=16)
    best, other = (replace(some, dp=dp, tp=1, pp=8 // dp) for dp in (4, 8))
    for factor, is_tried in ((1.01, True), (1.05, False)):
        double.priced.clear()
        plans = [replace(double.price(best), step_s=100.0)]
        plans.append(replace(double.price(other), step_s=100.0 * factor))
        with_variants(replace(found, plans=tuple(plans), behind=()), double, kept, 3, None)
        larger = [own.dp for own in double.priced if own.microbatch == 16]
        assert larger == ([4, 8] if is_tried else [4])


def test_a_pinned_schedule_keeps_several_pipeline_ranks():
    """Neither more context parallelism nor fewer devices may take the schedule away."""
    own = Candidate(dp=2, pp=2, microbatch=1, num_microbatches=8, schedule="chimera")
    for pinned, degrees in ((Pinned(), {1, 2}), (Pinned(schedule="chimera"), {2})):
        assert {half.pp for half in _doubled(own, pinned)} == degrees
        assert {half.pp for half in _smaller(own, pinned)} == degrees
    four = replace(own, pp=4)
    assert {half.pp for half in _smaller(four, Pinned(schedule="chimera"))} == {2, 4}


@dataclass
class BySchedule(Double):
    """Prices that a schedule takes a part of.

    Args:
        parts: of the seconds of a step, by schedule.
        larger: schedules that fit only where everything is recomputed.
    """

    parts: Mapping[str, float] = field(default_factory=dict)
    larger: Collection[str] = ()

    def price(self, own: Candidate) -> Price:
        found = super().price(own)
        is_large = own.schedule in self.larger and own.recompute != "full"
        peak = (10**12 if is_large else 10,) * own.pp
        part = self.parts.get(own.schedule, 1.0)
        return replace(found, step_s=part * found.step_s, peak_memory_bytes=peak)


def tried(double: Double, **pinned: Any) -> Ranking:
    only = Pinned(**{"ep": 1, "pp": 2, "tp": 1, "recompute": "off"} | pinned)
    found = search_job(job_of(), double, only, 3)
    return with_variants(found, double, only, 3, None)


def test_every_synchronous_schedule_is_tried_in_the_layout_of_the_best_pipeline():
    double = BySchedule()
    found = tried(double)
    synchronous = set(registry.names()) - {"pipedream", "pipedream_2bw"}
    assert set(found.kinds) == synchronous
    options = {own.schedule: set() for own in double.priced}
    for own in double.priced:
        options[own.schedule].add(str(dict(own.schedule_options)))
    assert len(options["chimera"]) == 5 and len(options["shifted_critical_path"]) == 2
    assert {own.zero for own in double.priced if own.schedule in ("chimera", "gems")} == {0}


def test_a_schedule_that_is_faster_there_is_first_with_the_microbatch_that_suits_it():
    found = tried(BySchedule(parts={"gems": 0.1}))
    assert found.plans[0].candidate.schedule == next(iter(found.kinds)) == "gems"
    gems = [own.candidate for own in found.priced if own.candidate.schedule == "gems"]
    assert len({own.microbatch for own in gems}) == 3  # that of the best pipeline, half and twice


def test_one_that_is_too_large_there_is_priced_with_full_recomputation():
    double = BySchedule(larger=("gpipe",))
    assert "gpipe" not in tried(double).kinds
    found = tried(double, recompute=None, tp=1)
    assert found.kinds["gpipe"].candidate.recompute == "full"


def test_a_pinned_schedule_is_the_only_kind():
    assert set(tried(BySchedule(), schedule="1f1b").kinds) == {"1f1b"}


def test_an_optimizer_leaves_the_device_where_nothing_fits_else() -> None:
    workload = example_workload(LLAMA, global_batch=8, sequence=16, optimizer=torch.optim.AdamW)
    base = Candidate(pp=2, num_microbatches=8, recompute="full")
    here, away = (
        max(price(workload, devices(2**40), replace(base, offload_optimizer=o)).peak_memory_bytes)
        for o in ("off", "cpu")
    )
    pinned = Pinned(pp=2, tp=1, schedule="1f1b", ep=1)
    found = search(workload, devices(here + away), pinned)  # of this, half is usable
    assert {own.candidate.offload_optimizer for own in found.plans} == {"cpu"}
    kept = Pinned(**pinned.choices, offload_optimizer="off")
    assert not search(workload, devices(here + away), kept).plans
    delayed = replace(workload, common=replace(workload.common, delay_optimizer_update=True))
    asked = search(delayed, devices(2**40), pinned)  # only there are updates delayed
    assert {own.candidate.offload_optimizer for own in asked.plans} == {"cpu"}
    # Nor does it fit where its host has not the memory.
    needed = found.plans[0].host
    assert needed.num_ranks == 2 and needed.usable_bytes is None
    for room, why in ((needed.needed_bytes, None), (needed.needed_bytes // 4, "memory of a host")):
        (nodes,) = devices(here + away).nodes
        nodes = replace(nodes, host_memory_bytes=2 * FEWEST_BYTES + room)
        pinned = Pinned(**pinned.choices | {"offload_optimizer": "cpu"})
        limited = search(workload, Cluster((nodes,)), pinned)
        assert bool(limited.plans) is (why is None)
        assert why is None or any(why in own.why for own in limited.rejected)


def test_the_fastest_of_other_kinds_are_named_with_what_they_take_more():
    base = Double().price(Candidate(pp=2, microbatch=1, num_microbatches=8))

    def plan(step_s: float, **choices: Any) -> Price:
        return replace(base, candidate=replace(base.candidate, **choices), step_s=step_s)

    found = Ranking(
        plans=(plan(1.0, schedule="zero_bubble_h1"),),
        rejected=(),
        behind=(plan(1.5), plan(1.04, pp=1, dp=2), plan(1.2), plan(1.1, schedule="zero_bubble_h1")),
    )
    assert found.of_other_kinds() == "no pipeline +4%, 1f1b +20%"
    assert found.of_other_kinds(most=1) == "no pipeline +4%"
    assert replace(found, behind=()).of_other_kinds() == ""
