"""Plans that leave devices unused: they are first where they are faster, and named where nearly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from merak.core.errors import PlanError
from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.search import fewer_devices
from merak.plan.search.fewer_devices import (
    half_cluster,
    search_some,
    with_fewer_devices,
    without_slow_nodes,
)
from merak.plan.search.node_order import Ordered, order_of
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Ranking
from tests.unit.plan.search.doubles import Double

OWN = Candidate(dp=4, tp=2, pp=4, num_microbatches=2, zero=1, sequence_parallel=True)


@dataclass
class Waiting(Double):
    """Prices of work that all devices share, and of waits that grow with the devices.

    Args:
        wait_s: for every device.
        work_s: of one device.
    """

    wait_s: float = 1.0
    work_s: float = 64.0

    def bound_s(self, own: Candidate) -> float:
        return self.work_s / own.world_size

    def price(self, own: Candidate) -> Price:
        price = super().price(own)
        return replace(price, step_s=self.bound_s(own) + self.wait_s * own.world_size)


def ranked(double, pinned=None, own=OWN):
    found = Ranking(plans=(double.price(own),), rejected=())
    double.priced.clear()
    return with_fewer_devices(found, double, pinned or Pinned(), 5)


def test_the_first_plan_has_as_many_devices_as_are_fastest():
    found = ranked(Waiting())
    assert found.plans[0].candidate.world_size == 8 and found.plans[0].step_s == 16.0
    assert found.plans[-1].candidate == OWN
    (note,) = found.notes
    assert "uses 8 of the 32 devices" in note and "34.000 s (dp=4 tp=2 pp=4)" in note
    assert found.num_priced == found.num_candidates > 0
    for price in found.plans:
        own = price.candidate
        assert own.dp * own.microbatch * own.num_microbatches == 8
        assert own.dp > 1 or own.zero == 0
        assert own.tp > 1 or not own.sequence_parallel


def test_half_of_the_devices_that_are_nearly_as_fast_are_named():
    found = ranked(Waiting(wait_s=1.0, work_s=600.0))
    assert [own.candidate for own in found.plans] == [OWN]
    (note,) = found.notes
    assert note.startswith("16 devices would do nearly as well: 53.500 s a step with dp=")


def test_devices_that_compute_are_left_in_use_without_a_price():
    double = Waiting(wait_s=0.001, work_s=64.0)
    found = ranked(double)
    assert [own.candidate for own in found.plans] == [OWN] and not found.notes
    assert double.priced == []


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_pinned_degrees_stay(axis):
    found = ranked(Waiting(), Pinned(**{axis: getattr(OWN, axis)}))
    assert {getattr(own.candidate, axis) for own in found.plans} == {getattr(OWN, axis)}
    assert found.plans[0].candidate.world_size < OWN.world_size


def test_plans_that_do_not_fit_or_cannot_be_are_none():
    small = Waiting(device_bytes=40.0)
    assert all(own.fits for own in ranked(small).plans[:-1])

    class Refusing(Waiting):
        def price(self, own):
            if own.world_size < OWN.world_size:
                raise PlanError("fewer pp ranks have no such schedule.")
            return super().price(own)

    assert [own.candidate for own in ranked(Refusing()).plans] == [OWN]


def test_a_job_that_fits_nowhere_has_no_plan_with_fewer_devices():
    none = Ranking(plans=(), rejected=())
    assert with_fewer_devices(none, Waiting(), Pinned(), 5) is none


@pytest.mark.parametrize(
    ("cluster", "half"),
    [
        ("h100:8x4", "h100-sxm:8x2"),
        ("h100:7", "h100-sxm:3x1"),
        ("h100:8x3+a100:4", "h100-sxm:8x1+a100-80gb:2x1"),
        ("t4", "t4:1x1"),
    ],
)
def test_half_of_a_cluster(cluster, half):
    assert order_of(half_cluster(parse_cluster(cluster))) == half


@pytest.mark.parametrize(("most", "devices"), [(23, 8), (7, 4), (1, 1), (0, None)])
def test_where_no_layout_has_all_devices_the_largest_part_is_planned(monkeypatch, most, devices):
    def searched(_, cluster, *__, **___):
        plans = (Waiting().price(OWN),) if cluster.num_devices <= most else ()
        return Ordered(cluster, Ranking(plans=plans, rejected=()))

    monkeypatch.setattr(fewer_devices, "search_orders", searched)
    found = search_some(None, parse_cluster("h100:8x3"), Pinned())
    if devices is None:
        assert found is None
        return
    assert found.cluster.num_devices == devices <= most
    assert f"uses all 24 devices; the plans are for {devices} of them" in found.ranking.notes[0]


def test_pinned_degrees_that_take_more_devices_end_the_search(monkeypatch):
    def searched(*_, **__):
        raise PlanError("dp=8 takes 8 devices, but the cluster has 4.")

    monkeypatch.setattr(fewer_devices, "search_orders", searched)
    assert search_some(None, parse_cluster("h100:8"), Pinned(dp=8)) is None


ALL = "a100-80gb:8x1+h100-sxm:8x2+t4:4x2"
FAST, FASTEST = "a100-80gb:8x1+h100-sxm:8x2", "h100-sxm:8x2"
IN_BF16 = SimpleNamespace(autocast=torch.bfloat16)


@pytest.mark.parametrize(
    ("seconds", "planned", "said"),
    [
        ({ALL: 3.0, FAST: 2.0, FASTEST: 1.0}, FASTEST, "with all of them a step takes 3.000 s"),
        ({ALL: 3.0, FAST: 2.0, FASTEST: 4.0}, FAST, f"{FASTEST} alone: a step takes 4.000 s"),
        ({ALL: 3.0, FAST: 2.999}, ALL, f"{FAST} alone: a step takes 2.999 s"),
        ({ALL: 3.0}, ALL, f"{FAST} alone: nothing fits"),
    ],
)
def test_slow_nodes_are_left_out_where_the_others_are_faster(monkeypatch, seconds, planned, said):
    def searched(_, cluster, *__, **___):
        step_s = seconds.get(order_of(cluster))
        plans = () if step_s is None else (replace(Waiting().price(OWN), step_s=step_s),)
        return Ordered(cluster, Ranking(plans=plans, rejected=()))

    monkeypatch.setattr(fewer_devices, "search_orders", searched)
    found = without_slow_nodes(IN_BF16, searched(None, parse_cluster(ALL)), Pinned())
    assert order_of(found.cluster) == planned
    left_out = [f"{own.what}: {own.why}" for own in found.ranking.rejected]
    assert any(said in own for own in (*found.ranking.notes, *left_out))


def test_fast_nodes_that_are_few_are_not_tried_alone(monkeypatch):
    monkeypatch.setattr(fewer_devices, "search_orders", None)
    cluster = parse_cluster("h100:1x1+l40s:8x2")
    given = Ordered(cluster, Ranking(plans=(Waiting().price(OWN),), rejected=()))
    assert without_slow_nodes(IN_BF16, given, Pinned()) == given
