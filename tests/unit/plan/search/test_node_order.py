"""The order of unequal nodes: all orders are searched, and the fastest is taken and said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.workload import Workload
from merak.plan.search import node_order
from merak.plan.search.node_order import order_of, orders, search_orders
from merak.plan.search.pinned import Pinned
from merak.plan.search.ranking import Ranking

THREE = "h100-sxm:8x2+a100-80gb:4x1+l40s:2x3"


def searched(monkeypatch: pytest.MonkeyPatch, cluster: str, seconds: dict[str, float]) -> Any:
    """A search in which the fastest plan's time follows from the first kind of node."""

    def search(_: object, own: Any, *__: object, **___: object) -> Ranking:
        step_s = seconds.get(own.nodes[0].device.name)
        plans = () if step_s is None else (SimpleNamespace(step_s=step_s),)
        return Ranking(plans=cast(Any, plans), rejected=())

    monkeypatch.setattr(node_order, "search", search)
    return search_orders(cast(Workload, None), parse_cluster(cluster), Pinned())


def test_all_orders_of_three_kinds_are_tried_the_given_one_first():
    found = [order_of(own) for own in orders(parse_cluster(THREE))]
    assert found[0] == THREE and len(set(found)) == len(found) == 6
    assert {own.count(":") for own in found} == {3}
    four = [order_of(own) for own in orders(parse_cluster(f"{THREE}+t4"))]
    assert four == [f"{THREE}+t4:1x1", "t4:1x1+l40s:2x3+a100-80gb:4x1+h100-sxm:8x2"]


def test_the_fastest_order_is_taken_and_the_given_one_is_said(monkeypatch):
    found = searched(monkeypatch, "h100:8+a100:8", {"h100-sxm": 2.0, "a100-80gb": 1.0})
    assert found.is_changed and order_of(found.cluster) == "a100-80gb:8x1+h100-sxm:8x1"
    (note,) = found.ranking.notes
    assert "in the order a100-80gb:8x1+h100-sxm:8x1" in note and "a step takes 2.000 s" in note
    (other,) = found.ranking.rejected
    assert other.what == "nodes in the order h100-sxm:8x1+a100-80gb:8x1"


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        ({"h100-sxm": 2.0, "a100-80gb": 1.999}, "a step takes 1.999 s"),  # not worth a change
        ({"h100-sxm": 2.0}, "nothing fits"),
    ],
)
def test_the_given_order_stays_where_no_other_is_faster(monkeypatch, seconds, why):
    found = searched(monkeypatch, "h100:8+a100:8", seconds)
    assert not found.is_changed and not found.ranking.notes
    assert [own.why for own in found.ranking.rejected] == [why]


def test_an_order_in_which_the_job_fits_is_taken(monkeypatch):
    found = searched(monkeypatch, "h100:8+a100:8", {"a100-80gb": 1.0})
    assert found.is_changed and "in the given order, nothing fits" in found.ranking.notes[0]


def test_equal_nodes_have_one_order(monkeypatch):
    found = searched(monkeypatch, "h100:8x4", {"h100-sxm": 1.0})
    assert not found.is_changed and found.ranking.rejected == ()
