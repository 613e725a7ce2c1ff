"""Schedules that the planner has never heard of are searched, bounded, ranked and rejected."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import merak
from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.workload import Workload
from merak.plan.search.bounds import JobPricing
from merak.plan.search.pinned import Pinned
from merak.plan.search.search import job_of, search
from merak.plan.search.space import space_of
from merak.schedule import registry
from merak.schedule.costs import uniform
from merak.schedule.ir import USUAL, Schedule
from merak.schedule.search.auto import auto
from merak.schedule.serialize import to_text
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

CLUSTER = parse_cluster("h100:4x1")
# Interleaving is defined for no three microbatches.
PINNED = Pinned(tp=1, cp=1, zero=3, microbatch=1, recompute="off")


def whole_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, down the ranks and back up, for any number of microbatches."""
    if num_ranks > 2:
        raise ValueError(f"no order is known for {num_ranks} ranks")
    return auto(num_ranks, num_microbatches, costs=uniform(2 * num_ranks), split=False)


@pytest.fixture(scope="module")
def workload() -> Workload:
    config = GPT2Config(
        n_embd=64, n_layer=4, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0
    )
    return example_workload(ModelSource(GPT2LMHeadModel, config, None), global_batch=6, sequence=32)


@pytest.fixture
def own_names() -> Iterator[None]:
    """Leave no registered name behind."""
    before = dict(registry._BUILDERS)
    yield
    registry._BUILDERS.clear()
    registry._BUILDERS.update(before)


def test_an_own_builder_wins_where_it_is_faster_and_is_rejected_where_it_is_none(
    workload: Workload, own_names: None
) -> None:
    for other in registry.names():  # of which some gather weights less often, or fill idle time
        if other not in (USUAL, "gpipe", "interleaved_1f1b"):
            registry._BUILDERS.pop(other)
    before = search(workload, CLUSTER, PINNED)
    registry.register("whole_v", whole_v)
    found = search(workload, CLUSTER, PINNED)
    assert "whole_v" not in before.kinds
    assert found.plans[0].candidate.schedule == "whole_v"
    assert found.plans[0].step_s < before.plans[0].step_s
    assert found.kinds[USUAL] == before.kinds[USUAL]
    reasons = {own.what: own.why for own in found.rejected}
    assert reasons["whole_v"] == "whole_v: no order is known for 4 ranks"


def test_an_own_builder_that_is_not_to_be_searched_is_not(
    workload: Workload, own_names: None
) -> None:
    def stale(num_ranks: int, num_microbatches: int) -> Schedule:
        return registry.build("pipedream", num_ranks, num_microbatches)

    registry.register("whole_v", whole_v, searched=())
    registry.register("stale", stale)
    space = space_of(job_of(workload, CLUSTER, PINNED), PINNED)
    assert {own.schedule for own in space.candidates}.isdisjoint({"whole_v", "stale"})
    reasons = {own.what: own.why for own in space.rejected.values()}
    assert "several versions of the weights" in reasons["stale"]


@pytest.mark.parametrize("name", ["whole_v", "gems", "shifted_critical_path", "pipedream", "file"])
def test_bounds_and_estimates_of_a_schedule_without_formula(
    workload: Workload, own_names: None, tmp_path: Path, name: str
) -> None:
    """The simulator knows its bubble: estimates follow the price, and no bound is above it."""
    registry.register("whole_v", whole_v)
    if name == "file":
        name = str(tmp_path / "own.txt")
        Path(name).write_text(to_text(registry.build("chimera", 2, 3)))
    pinned = Pinned(schedule=name, dp=2, tp=1, pp=2, zero=0, microbatch=1)
    pricing = JobPricing(workload, CLUSTER)
    usual = pricing.rough_s(
        space_of(
            job_of(workload, CLUSTER, pinned),
            Pinned(schedule=USUAL, dp=2, tp=1, pp=2, zero=0, microbatch=1),
        ).candidates[0]
    )
    space = space_of(job_of(workload, CLUSTER, pinned), pinned)
    assert len(space.candidates) == 3  # recomputations
    for own in space.candidates:
        price = pricing.price(own)
        assert 0 < pricing.bound_s(own) <= price.step_s
        assert pricing.rough_bytes(own) > 0
    slower = pricing.rough_s(space.candidates[0]) / usual
    assert slower > 1.2 if name == "gems" else slower < 1.05


def test_no_module_outside_of_schedules_knows_one_by_name() -> None:
    """What decides by a schedule's name decides wrongly for one of a user's own."""
    root = Path(merak.__file__).parent
    names = set(registry.names()) - {"auto"}  # which is a choice of many options
    found = [
        f"{path.relative_to(root)}:{node.lineno}: {node.value}"
        for path in sorted(root.rglob("*.py"))
        if "schedule" not in path.relative_to(root).parts[:1]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert found == []


def test_options_of_a_schedule_may_be_lists(workload: Workload) -> None:
    options = {"recompute": [True, False]}
    pinned = Pinned(schedule="auto", schedule_options=options, dp=2, tp=1, pp=2, microbatch=1)
    found = search(workload, CLUSTER, pinned, top=1)
    assert found.plans[0].candidate.schedule_options == options
