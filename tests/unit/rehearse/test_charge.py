"""Charges of collectives and transfers, by the links of a cluster."""

from __future__ import annotations

import pytest
import torch

from merak.core.mesh import Mesh
from merak.plan.cluster.collectives import collective_seconds, send_seconds
from merak.plan.cluster.groups import group_of, send_link
from merak.plan.cluster.parse import parse_cluster
from merak.rehearse.charge import axis_of, call_seconds, charges, seconds_inside
from merak.rehearse.fake_group import Call
from merak.schedule.ir import Action, Kind

CLUSTER = parse_cluster("h100:8x4")
MESH = Mesh(2, 4, 4, 13, torch.device("cpu"), None)  # pp rank 1, dp rank 1, tp rank 1
FORWARD = Action(Kind.FORWARD, 1, 0)
TP = Call("all_reduce", 2**20, (12, 13, 14, 15), FORWARD)
DP = Call("reduce_scatter", 2**24, (9, 13), None)
SEND = Call("send", 2**22, (13, 21), FORWARD)
RECEIVE = Call("receive", 2**22, (13, 5), FORWARD)


def test_calls_lie_along_axes():
    assert [axis_of(call, MESH) for call in (TP, DP, SEND, RECEIVE)] == ["tp", "dp", "pp", "pp"]
    assert axis_of(Call("all_reduce", 4, tuple(range(32)), None), MESH) == "job"


def test_calls_are_charged_by_their_links():
    assert call_seconds(TP, CLUSTER) == collective_seconds(
        "all_reduce", 2**20, group_of(CLUSTER, 4, 1)
    )
    expected = collective_seconds("reduce_scatter", 2**24, group_of(CLUSTER, 2, 4))
    assert call_seconds(DP, CLUSTER) == expected
    assert call_seconds(SEND, CLUSTER) == send_seconds(2**22, send_link(CLUSTER, 13, 21))
    assert call_seconds(RECEIVE, CLUSTER) == send_seconds(2**22, send_link(CLUSTER, 5, 13))
    assert call_seconds(Call("barrier", 0, (0, 1), None), CLUSTER) == 0.0
    # The two pipes of chimera have a stage on ranks at the cluster's ends.
    assert call_seconds(Call("all_reduce", 2**20, (5, 29), None), CLUSTER) > 0


def test_charges_are_summed_by_axis_and_kind():
    found = charges([TP, TP, DP, SEND, RECEIVE], MESH, CLUSTER)
    assert [(c.axis, c.kind, c.ranks, c.calls, c.num_bytes) for c in found] == [
        ("dp", "reduce_scatter", 2, 1, 2**24),
        ("pp", "receive", 2, 1, 2**22),
        ("pp", "send", 2, 1, 2**22),
        ("tp", "all_reduce", 4, 2, 2**21),
    ]
    assert found[3].seconds == pytest.approx(2 * call_seconds(TP, CLUSTER))


def test_collectives_over_tp_belong_to_their_actions():
    place = (Kind.FORWARD, 1)
    inside = seconds_inside([TP, TP, TP, TP, DP, SEND], MESH, CLUSTER, {place: 2})
    assert inside == {place: pytest.approx(2 * call_seconds(TP, CLUSTER))}
