"""The search finds what brute force over the whole space finds, and says what it leaves out."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from merak.core.errors import PlanError
from merak.plan.options import ParallelOptions
from merak.plan.recompute_spec import RECOMPUTES
from merak.plan.search.neighbours import Neighbours
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import search_job
from merak.plan.search.space import space_of
from merak.plan.search.variants import ContextClimb, try_context
from merak.schedule import registry
from tests.tiers import one_in
from tests.unit.plan.search.doubles import Double, job_of

MANY = 10**6


def brute_force(job, double, pinned, top):
    """Step times of the fastest candidates that fit, by pricing every one.

    Of those that differ in recomputation alone, the ranking has the one with the least.
    """
    found, fitting = [], set()
    for candidate in space_of(job, pinned).candidates:
        try:
            price = double.price(candidate)
        except PlanError:
            continue
        if price.fits:
            found.append(price)
            fitting.add(str(candidate))

    def saves_more(own):
        others = RECOMPUTES[: RECOMPUTES.index(own.recompute)]
        return any(str(replace(own, recompute=other)) in fitting for other in others)

    return sorted(own.step_s for own in found if not saves_more(own.candidate))[:top]


@one_in(5)
@pytest.mark.parametrize("seed", range(30))
def test_the_ranking_is_that_of_brute_force(seed):
    draw = random.Random(seed)
    weights = tuple(draw.uniform(0.0, size) for size in (0.3, 0.2, 0.8, 0.5, 0.05))
    double = Double(weights, draw.choice((15.0, 40.0, 120.0)), draw.choice((None, "1f1b")))
    batch, segments = draw.choice((8, 16, 24)), draw.choice((2, 5, 9))
    job = job_of(draw.choice((4, 6, 8)), batch, segments)
    top = draw.choice((1, 3, 5))
    found = search_job(job, double, Pinned(), top, MANY)
    assert found.is_proved
    assert [price.step_s for price in found.plans] == brute_force(job, double, Pinned(), top)


@pytest.mark.parametrize("names", [("dp", "pp"), ("dp",), ("pp",), ("dp", "cp")])
def test_degrees_that_are_left_out_take_no_more_devices_than_there_are(names):
    job = job_of(4, per_node=4)
    found = space_of(job, Pinned(**dict.fromkeys(names, 2))).candidates
    assert found and max(own.world_size for own in found) <= 4


def test_most_candidates_are_never_priced():
    double = Double()
    found = search_job(job_of(), double, Pinned(), 1, MANY)
    assert found.num_priced == len(double.priced) < found.num_candidates / 3
    whole = len(found.plans) + sum(own.count for own in found.rejected)
    assert whole == found.num_candidates


def test_what_is_not_priced_is_said():
    found = search_job(job_of(), Double(), Pinned(), 3, 3)
    assert found.num_priced == 3 and not found.is_proved
    assert any(own.what == "not priced" for own in found.rejected)


@pytest.mark.parametrize("budget", [24, 40])
@one_in(3)
@pytest.mark.parametrize("seed", range(6))
def test_no_neighbour_of_the_first_plan_is_faster(seed, budget):
    """Estimates that know nothing of what a larger microbatch saves mislead; prices do not."""
    draw = random.Random(seed)
    double = Double((0.05, 0.02, 0.3, draw.uniform(5.0, 20.0), 0.01), draw.choice((60.0, 120.0)))
    job = job_of(8, 64, 9)
    found = search_job(job, double, Pinned(), 3, budget)
    assert found.num_priced <= budget
    (best, *_) = found.plans
    for own in Neighbours(space_of(job, Pinned()).candidates).of(best.candidate):
        price = double.price(own)
        assert not price.fits or price.step_s >= best.step_s, own


class DeepIsUnderrated(Double):
    """Deep pipelines are estimated too fast, and take longer than any other plan."""

    def rough_s(self, own):
        return super().rough_s(own) * (0.3 if own.pp > 2 else 1.0)

    def price(self, own):
        found = super().price(own)
        return replace(found, step_s=found.step_s * (4.0 if own.pp > 2 else 1.0))


def test_an_estimate_that_is_wrong_for_all_plans_of_some_degrees_costs_few_prices():
    job, double = job_of(8, 64, 12), DeepIsUnderrated(device_bytes=200.0)
    (found,) = search_job(job, double, Pinned(), 1, 24).plans
    assert found.candidate.pp <= 2


def test_neighbours_are_one_step_away():
    space = space_of(job_of(8, 64, 9), Pinned()).candidates
    wanted = (2, 2, 2, 2, 1, "1f1b", "selective", "off", False)
    names = ("dp", "tp", "pp", "microbatch", "zero", "schedule", "recompute", "sub_pipelining")
    own = next(
        c for c in space
        if (*(getattr(c, name) for name in names), c.sequence_parallel) == wanted
    )  # fmt: skip
    found = list(Neighbours(space).of(own))
    assert len(set(map(id, found))) == len(found) and own not in found
    sizes = {(c.dp, c.tp, c.pp, c.microbatch, c.recompute) for c in found}
    assert {(2, 2, 2, 4, "selective"), (2, 2, 2, 4, "full"), (2, 2, 2, 1, "off")} <= sizes
    assert {(4, 1, 2, 2, "selective"), (1, 2, 4, 2, "selective")} <= sizes  # zero=0 where dp=1
    assert all(c.dp * c.microbatch * c.num_microbatches == 64 for c in found)
    others = [c for c in found if (c.dp, c.tp, c.microbatch, c.recompute) == (2, 2, 2, "selective")]
    assert {c.zero for c in others} == {0, 1, 2, 3}
    assert {c.schedule for c in others} >= {"1f1b", "interleaved_1f1b", "zero_bubble_v"}


EXPERTS = replace(job_of(8, 64, 9), experts=4)


def test_experts_are_spread_over_as_many_replicas_as_divide_them():
    space = space_of(EXPERTS, Pinned()).candidates
    found = {(own.tp, own.replicas, own.ep) for own in space}
    spread = {(tp, replicas, ep) for tp, replicas, ep in found if ep > 1}
    over_replicas = {(1, 8, 2), (1, 8, 4), (1, 4, 2), (1, 4, 4), (1, 2, 2)}
    inside_tp = {(2, 4, 2), (2, 2, 2), (2, 1, 2), (4, 2, 4), (4, 1, 4)}
    assert spread == over_replicas | inside_tp
    assert {(tp, replicas, 1) for tp, replicas, _ in found} <= found
    assert not any(own.ep > 1 for own in space_of(EXPERTS, Pinned(ep=1)).candidates)


def test_a_pinned_ep_leaves_tensor_parallel_ranks_or_replicas_with_the_experts():
    space = space_of(EXPERTS, Pinned(ep=4))
    assert {own.ep for own in space.candidates} == {4}
    assert {(own.tp, own.replicas) for own in space.candidates} >= {(4, 2), (4, 1), (1, 8), (1, 4)}
    assert all(own.tp == 4 or own.replicas % 4 == 0 for own in space.candidates)
    left_out = {own.what: own.why for own in space.rejected.values()}
    assert left_out["dp=2, tp=1"] == "ep=4 does not divide the 2 replicas"
    with pytest.raises(PlanError, match="ep=3 does not divide the cluster's 8 devices; use 1, 2"):
        space_of(EXPERTS, Pinned(ep=3))


def test_experts_that_do_not_fit_are_left_out_by_name():
    refusing = replace(EXPERTS, problem=lambda tp, cp, ep: "no stack" if ep > 1 else None)
    space = space_of(refusing, Pinned())
    assert {own.ep for own in space.candidates} == {1}
    assert {own.what for own in space.rejected.values()} >= {"ep=4, tp=1", "ep=4, tp=4"}


def test_neighbours_spread_experts_over_the_replicas_that_they_have():
    space = space_of(EXPERTS, Pinned()).candidates
    own = next(c for c in space if (c.dp, c.tp, c.pp, c.ep, c.zero) == (8, 1, 1, 4, 1))
    found = {(c.dp, c.tp, c.pp, c.ep) for c in Neighbours(space).of(own)}
    assert {(8, 1, 1, 1), (4, 1, 2, 4), (4, 1, 2, 1), (4, 2, 1, 1)} <= found


def test_neighbours_step_over_context_parallelism():
    space = space_of(replace(job_of(8, 64, 9), cps=(2, 4)), Pinned()).candidates
    own = next(c for c in space if (c.dp, c.tp, c.pp, c.cp, c.zero) == (2, 2, 1, 2, 1))
    found = list(Neighbours(space).of(own))
    degrees = {(c.dp, c.tp, c.pp, c.cp) for c in found}
    assert {(1, 2, 1, 4), (2, 1, 1, 4), (1, 2, 2, 2)} <= degrees
    assert all(c.world_size == 8 and c.dp * c.microbatch * c.num_microbatches == 64 for c in found)
    assert {c.zero for c in found if c.dp == 1} == {1}  # replicas of cp shard the state, too


def test_a_job_fits_nowhere_only_where_every_candidate_was_looked_at():
    """With few prices, all of them spent on plans that do not fit."""
    found = search_job(job_of(), Double(device_bytes=16.0, misjudged=0.0), Pinned(), 1, 1)
    assert found.fits_nowhere and found.num_priced > 1
    assert found.plans and not found.is_proved


@pytest.mark.parametrize("misjudged", [0.1, 1.0, 100.0])
def test_estimates_of_memory_change_the_order_alone(misjudged):
    found = search_job(job_of(), Double(misjudged=misjudged), Pinned(), 3, MANY)
    assert [p.step_s for p in found.plans] == brute_force(job_of(), Double(), Pinned(), 3)


def test_every_rejected_region_has_its_reason():
    reasons = {
        own.what: own.why for own in search_job(job_of(12, 24, 6, 12), Double(), Pinned()).rejected
    }
    assert reasons["tp=3"] == "3 heads"
    assert reasons["pp≥12"] == "the model has 6 segments"
    assert reasons["zero_bubble_v, pp≥4"] == "8 stages or more for 6 segments"
    opaque = replace(job_of(12, 24, 6, 12), few_segments="inner (Branch) is opaque, for x.py:3")
    reasons = {own.what: own.why for own in search_job(opaque, Double(), Pinned()).rejected}
    assert reasons["pp≥12"] == "the model has 6 segments: inner (Branch) is opaque, for x.py:3"
    reasons = {own.what: own.why for own in search_job(job_of(), Double(), Pinned()).rejected}
    assert "span more than the 4 devices of a node" in reasons["tp≥8"]


def test_what_does_not_fit_is_said_with_its_bytes():
    found = search_job(job_of(2), Double(device_bytes=42e0), Pinned(pp=2, dp=1, tp=1), 1)
    assert not found.plans
    lines = [f"{own.what}: {own.why}" for own in found.rejected]
    assert any("45 B a device of 42 B" in line for line in lines), lines
    found = search_job(job_of(2), Double(device_bytes=48e0), Pinned(pp=2, dp=1, tp=1), 1)
    lines = [f"{own.what}: {own.why}" for own in found.rejected]
    assert not found.plans and any("49 B on pp rank 0 of 48 B" in line for line in lines), lines
    assert found.fits_nowhere[0].peak_memory_bytes == (49, 49)


def test_pinned_choices_are_left_as_they_are():
    pinned = Pinned(tp=2, pp=2, zero=1, schedule="1f1b", recompute="full", microbatch=2)
    found = search_job(job_of(), Double(), pinned)
    for price in found.plans:
        own = price.candidate
        assert (own.dp, own.tp, own.pp, own.zero) == (2, 2, 2, 1)
        assert (own.schedule, own.recompute, own.microbatch) == ("1f1b", "full", 2)
        assert own.num_microbatches == 4


@pytest.mark.parametrize(
    ("pinned", "sentence"),
    [
        (Pinned(dp=16), "dp=16 takes 16 devices, but the cluster has 8; use smaller degrees or"),
        (Pinned(pp=3), "pp=3 does not divide the cluster's 8 devices; use 1, 2, 4 or 8."),
        (
            Pinned(dp=2, tp=3),
            "dp=2 × tp=3 does not divide the cluster's 8 devices; use a product of 1, 2, 4 or 8.",
        ),
        (
            Pinned(dp=8, microbatch=4),
            "dp=8 × microbatch=4 does not divide the global batch of 16 samples; use a global "
            "batch of 32, or a product of 1, 2, 4, 8 or 16.",
        ),
        (
            Pinned(tp=2, pp=2, microbatch=3),
            "dp=2, which tp=2 × pp=2 leaves of 8 devices, × microbatch=3 does not divide the "
            "global batch of 16 samples; use a global batch of 12 or 18, or a product of ",
        ),
        (Pinned(tp=0), "tp=0 is too small; use 1 or more."),
    ],
)
def test_pinned_choices_that_contradict_the_job_are_refused(pinned, sentence):
    with pytest.raises(PlanError, match=re.escape(sentence)):
        search_job(job_of(), Double(), pinned)


@pytest.mark.parametrize(
    ("name", "degrees", "why"),
    [
        ("shifted_critical_path", {2, 3, 6}, "needs at least 2"),
        ("chimera", {2, 6}, "an even number of stages"),
        ("interleaved_1f1b", {1, 2, 3}, "12 stages or more for 6 segments"),
    ],
)
def test_a_pinned_schedule_leaves_out_the_layouts_that_cannot_have_it(name, degrees, why):
    """However few prices there are: none is spent on a layout that the schedule has not."""
    found = search_job(job_of(6, 12, 6, 1), Double(), Pinned(schedule=name), 3, 3)
    assert found.plans
    assert {own.candidate.pp for own in found.plans} <= degrees
    space = space_of(job_of(6, 12, 6, 1), Pinned(schedule=name))
    assert {own.pp for own in space.candidates} == degrees
    said = [own.why for own in found.rejected if own.what.startswith(f"{name}, pp")]
    assert any(why in one for one in said)


def test_a_schedule_that_no_layout_can_have_says_why():
    found = search_job(job_of(), Double(), Pinned(schedule="chimera", pp=1), 3, 3)
    assert not found.plans and "an even number of stages; got 1" in str(found.refusal)
    stages = Pinned(partition=(3, 3), pp=4)
    assert not search_job(job_of(), Double(), stages, 3, 3).num_candidates


def test_a_pinned_partition_leaves_out_other_numbers_of_stages():
    pinned = Pinned(schedule="1f1b", partition=(3, 3))
    assert {own.pp for own in space_of(job_of(), pinned).candidates} == {2}
    assert 1 not in {own.pp for own in space_of(job_of(), Pinned(partition=(3, 3))).candidates}


def test_every_searched_schedule_is_in_the_space():
    space = space_of(job_of(4, 64, 16), Pinned(zero=0, recompute="off"))
    assert {own.schedule for own in space.candidates} == {name for name, _ in registry.searched()}
    for own in space.candidates:
        assert own.world_size == 4
        assert own.dp * own.microbatch * own.num_microbatches == 64
        assert not (own.sequence_parallel and own.sub_pipelining == "on")


@pytest.mark.parametrize(
    ("changes", "stages", "what"),
    [
        ({"low_sums": True}, {0, 1, 2}, "zero=3"),
        ({"drops_layers": True}, {0, 1, 2}, "zero=3"),
        ({"common": ParallelOptions(gradient_compression="bf16")}, {0}, "zero=2"),
        ({"common": ParallelOptions(local_steps=4)}, {0}, "zero=1"),
    ],
)
def test_stages_of_zero_that_the_engine_refuses_are_left_out(changes, stages, what):
    job = job_of(4, 64, 16)
    assert {own.zero for own in space_of(job, Pinned()).candidates} == {0, 1, 2, 3}
    space = space_of(replace(job, **changes), Pinned())
    assert {own.zero for own in space.candidates} == stages
    assert [own.why for own in space.rejected.values() if own.what == what] != []


class Waits(Double):
    """Prices of a job whose waits cp halves: with dp and tp of at most 2, and a pp that idles."""

    def price(self, own):
        found = super().price(own)
        bubble_s = 0.5 * found.step_s * (own.pp - 1)
        step_s = found.step_s / own.cp + bubble_s
        return replace(found, step_s=step_s, bubble_s=bubble_s)


def test_context_parallelism_is_tried_where_the_best_plan_waits():
    job = job_of(8, 2, 6, per_node=2)
    waits = Waits()
    best = search_job(job, waits, Pinned(), 1).plans[0]
    assert best.bubble_s > 0 and best.candidate.pp > 1
    found = try_context(best, waits, Pinned(), None)
    assert found.best.step_s < best.step_s and found.best.candidate.cp > 1
    assert found.best.candidate.world_size == 8 and not found.best.candidate.sequence_parallel
    slower = try_context(found.best, waits, Pinned(), None)
    assert slower.best is found.best
    without = Double()
    best = search_job(job, without, Pinned(), 1).plans[0]
    assert try_context(best, without, Pinned(), None) == ContextClimb(best)  # it never waits


def test_context_parallelism_that_cannot_be_says_why():
    job = job_of(8, 2, 6, per_node=2)
    best = search_job(job, Waits(), Pinned(), 1).plans[0]
    found = try_context(best, Waits(), Pinned(), lambda own: "the job has no cp")
    assert found.best is best and found.num_priced == 0
    assert found.rejected is not None
    assert (found.rejected.what, found.rejected.why) == ("cp≥2", "the job has no cp")
    degrees = best.candidate
    pinned = Pinned(dp=degrees.dp, tp=degrees.tp, pp=degrees.pp)
    assert try_context(best, Waits(), pinned, None).best is best
