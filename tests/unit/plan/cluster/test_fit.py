"""Host memory that the ranks of a node take, and have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from merak.core.doctor.memory import FEWEST_BYTES
from merak.core.mesh import Mesh
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.fit import HostUse, fullest_host
from merak.plan.cluster.parse import parse_cluster


def mesh(dp: int, tp: int, pp: int) -> Mesh:
    return Mesh(dp, tp, pp, 0, torch.device("cpu"), None)


def test_ranks_of_a_node_share_its_memory() -> None:
    """Ranks are counted in the order (pp, dp, tp): two pp ranks of two on each node of four."""
    cluster = parse_cluster("h100:4x2")
    found = fullest_host(cluster, mesh(2, 1, 4), [5, 7, 2, 1])
    assert found == HostUse(4, 2 * (5 + 7)) and found.fits
    across = fullest_host(parse_cluster("h100:3x3"), mesh(2, 2, 2), [5, 7])
    assert across == HostUse(3, 2 * 7 + 5)  # the ranks 3 to 5
    assert fullest_host(cluster, mesh(2, 1, 4), [0] * 4) == HostUse()


@pytest.mark.parametrize(("room", "fits"), [(20, True), (19, False)])
def test_the_node_with_least_left_decides(room: int, fits: bool) -> None:
    large, small = parse_cluster("h100:4").nodes[0], parse_cluster("h100:2").nodes[0]
    large = replace(large, host_memory_bytes=10**12)
    small = replace(small, host_memory_bytes=2 * FEWEST_BYTES + room)
    found = fullest_host(Cluster((large, small)), mesh(1, 1, 6), [30, 30, 30, 30, 15, 5])
    assert found == HostUse(2, 20, room) and found.fits is fits
