"""The slowest group of an axis, and links between ranks."""

from __future__ import annotations

import pytest
import torch

from merak.core.errors import PlanError
from merak.core.mesh import REPLICAS, Mesh
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.groups import group_of, send_link
from merak.plan.cluster.hierarchy import lines_of, replicas_of_stage
from merak.plan.cluster.parse import parse_cluster
from merak.schedule.registry import build


def places(group):
    return group.num_nodes, group.most_on_node, group.fewest_on_node


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (1, 1, (1, 1, 1)),
        (8, 1, (1, 8, 8)),
        (4, 8, (4, 1, 1)),
        (4, 2, (1, 4, 4)),
        (8, 4, (4, 2, 2)),
        (32, 1, (4, 8, 8)),
        (6, 1, (2, 4, 2)),  # ranks 6 to 11, with six on a node
        (3, 3, (2, 2, 1)),
    ],
)
def test_a_group_is_on_the_nodes_of_its_ranks(size, stride, expected):
    assert places(group_of(parse_cluster("h100:8x4"), size, stride)) == expected


def test_the_slowest_group_counts():
    """Of two kinds of nodes, and of groups inside and across nodes."""
    fast, slow = parse_cluster("h100:8x2").nodes[0], parse_cluster("a100:8x2").nodes[0]
    cluster = Cluster((fast, slow))
    assert group_of(cluster, 8, 1).link.name == "nvlink3"
    assert group_of(cluster, 4, 8).network.name == "infiniband-hdr"
    assert group_of(Cluster((fast,)), 8, 1).link.name == "nvlink4"


def test_uneven_nodes():
    cluster = Cluster((parse_cluster("a100:4").nodes[0], parse_cluster("a100:8").nodes[0]))
    assert places(group_of(cluster, 12, 1)) == (2, 8, 4)
    assert places(group_of(cluster, 8, 1)) == (2, 4, 4)
    assert cluster.place(3)[1] == 0 and cluster.place(4)[1] == 1


def test_all_devices_share_the_adapters_of_their_node():
    many, one = parse_cluster("a100:8x2").nodes[0], parse_cluster("rtx-3090:8x2").nodes[0]
    assert many.network_of(1).bytes_per_s == many.network_of(8).bytes_per_s == 24e9
    assert one.network.bytes_per_s == one.network_of(8).bytes_per_s == 12e9 / 8
    assert one.network_of(1).bytes_per_s == 12e9
    assert one.network_of(2).bytes_per_s == 6e9
    # A group of all devices of both nodes has the whole adapter; eight groups share it.
    cluster = Cluster((one,))
    assert group_of(cluster, 16, 1).network.bytes_per_s * 8 == 12e9
    assert group_of(cluster, 2, 8).bytes_per_s == 12e9 / 8


def test_the_link_of_a_message():
    cluster = parse_cluster("h100:8x2")
    assert send_link(cluster, 0, 7).name == "nvlink4"
    assert send_link(cluster, 7, 8).name == "infiniband-ndr"
    assert send_link(parse_cluster("3090:4x2"), 0, 4, senders=1).bytes_per_s == 12e9


def test_a_group_that_is_too_large_is_refused():
    with pytest.raises(PlanError, match="4 ranks at a distance of 8 need 32 devices, but the clus"):
        group_of(parse_cluster("h100:8x2"), 4, 8)


def test_large_clusters_take_little_work():
    """As many groups look alike as there are nodes, and each kind is looked at once."""
    cluster = parse_cluster("h100:8x2048")
    assert places(group_of(cluster, 8, 1)) == (1, 8, 8)
    assert places(group_of(cluster, 16, 1024)) == (16, 1, 1)
    assert places(group_of(cluster, 16384, 1)) == (2048, 8, 8)


def test_copies_of_a_stage_are_reduced_together():
    """By Chimera with dp=2 and pp=4, ranks 0, 1, 6 and 7 hold stage 3 (and stage 0)."""
    mesh = Mesh(dp=2, tp=1, pp=4, rank=0, device=torch.device("cpu"), device_mesh=None)
    stage = build("chimera", 4, 8).ranks_of(3)
    assert lines_of(mesh, stage, REPLICAS) == [[0, 1, 6, 7]]
    group = replicas_of_stage(parse_cluster("a100:4x2"), mesh, stage)
    assert (group.size, *places(group)) == (4, 2, 2, 2)
    group = replicas_of_stage(parse_cluster("a100:2x4"), mesh, stage)
    assert (group.size, *places(group)) == (4, 2, 2, 2)
    group = replicas_of_stage(parse_cluster("a100:1x8"), mesh, stage)
    assert (group.size, *places(group)) == (4, 4, 1, 1)
