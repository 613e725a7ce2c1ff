"""Memory of a GPU that holds no tensor, and the groups whose communicators it counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merak.core.mesh import Mesh
from merak.plan.cluster.fit import non_tensor_on, usable_by_pp_rank
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.data_sheets import CONNECTION_BYTES
from merak.plan.cost.device import PRESETS, from_json, preset, to_json
from merak.plan.memory.non_tensor import NonTensorMemory, non_tensor_memory, usable_bytes

GIB = 2**30


def mesh_of(dp: int, tp: int, pp: int, cp: int = 1, ep: int = 1) -> Mesh:
    return Mesh(dp, tp, pp, 0, torch.device("cpu"), None, cp=cp, ep=ep)


def of(*degrees: int) -> NonTensorMemory:
    return non_tensor_memory(80 * GIB, mesh_of(*degrees))


def test_one_rank_has_no_communicator_and_every_sheet_room_for_tensors() -> None:
    assert of(1, 1, 1).communicators == of(1, 1, 1).num_communicators == 0
    for name in PRESETS:
        memory = preset(name).memory_bytes
        assert memory is not None
        for mesh in (None, mesh_of(1, 1, 1), mesh_of(4, 8, 4)):
            assert 0.75 * memory < usable_bytes(memory, mesh) < memory - GIB // 2
    assert usable_bytes(100) == 50


@pytest.mark.parametrize(
    ("degrees", "axes", "transfers"),
    [
        (mesh_of(2, 1, 1), {"dp"}, 0),
        (mesh_of(2, 2, 1), {"dp", "tp"}, 0),
        (mesh_of(1, 1, 2), {"pp"}, 2),
        (mesh_of(1, 1, 8), {"pp"}, 4),
        (mesh_of(2, 1, 1, cp=2), {"dp", "cp", "replicas"}, 0),
        (mesh_of(4, 1, 1, ep=2), {"dp", "expert_replicas", "ep"}, 0),
        (mesh_of(2, 2, 1, ep=2), {"dp", "tp"}, 0),  # experts over tp have its group
    ],
)
def test_communicators_are_those_of_the_mesh_and_of_transfers(
    degrees: Mesh, axes: set[str], transfers: int
) -> None:
    assert set(degrees.group_axes) == axes
    assert non_tensor_memory(80 * GIB, degrees).num_communicators == len(axes) + transfers


def test_more_groups_leave_less_and_transfers_have_small_buffers() -> None:
    left = [usable_bytes(80 * GIB, mesh_of(*own)) for own in [(1, 1, 1), (2, 1, 1), (2, 2, 1)]]
    assert left == sorted(left, reverse=True) and len(set(left)) == 3
    a_collective, transfers = of(1, 2, 1).communicators, of(1, 1, 8).communicators
    assert 4 * a_collective > transfers - a_collective
    # Where more than two ranks of a node reduce in its switch.
    assert of(1, 4, 1).communicators > of(1, 2, 1).communicators
    assert of(2, 8, 1).communicators < of(8, 1, 1).communicators + of(8, 1, 1).communicators


def test_a_measured_communicator_counts_instead_of_the_estimate() -> None:
    cluster, mesh = parse_cluster("h100:2"), mesh_of(2, 1, 1)
    (kind,) = cluster.nodes
    (before, *_) = usable_by_pp_rank(cluster, mesh)
    device = replace(kind.device, communicator_bytes=GIB)
    measured = replace(cluster, nodes=(replace(kind, device=device),))
    assert usable_by_pp_rank(measured, mesh)[0] == before + of(2, 1, 1).communicators - GIB
    assert usable_by_pp_rank(measured, mesh_of(1, 1, 1))[0] == usable_bytes(
        device.memory_bytes or 0
    )
    assert from_json(to_json(device), "here").communicator_bytes == GIB


def test_communicators_have_the_channels_of_their_link(tmp_path: Path) -> None:
    def of_node(link: str) -> tuple[int, int]:
        file = tmp_path / "cluster.yaml"
        file.write_text(f"nodes:\n  - {{device: a100, devices_per_node: 4, link: {link}}}\n")
        (node,) = parse_cluster(str(file)).nodes
        found = [non_tensor_on(node.device, mesh_of(*own)) for own in [(2, 1, 1), (1, 1, 2)]]
        collective, pipeline = (own.communicators for own in found if own is not None)
        return collective, pipeline - collective

    nvlink, pcie = of_node("nvlink3"), of_node("pcie4-host")
    assert nvlink[0] == 12 * pcie[0]  # 24 channels, and 2
    assert nvlink[1] == 2 * 8 * CONNECTION_BYTES and pcie[1] == 2 * 2 * CONNECTION_BYTES
    for name, sheet in PRESETS.items():
        has_own = preset(name).communicator_bytes is not None
        assert has_own == sheet.link.startswith("pcie")


def test_profiles_of_former_versions_have_no_communicator() -> None:
    text = (
        to_json(preset("h100")).replace('"communicator_bytes": null', "").replace(",\n  \n", "\n")
    )
    assert "communicator_bytes" not in text
    assert from_json(text, "here") == preset("h100")


def test_it_says_what_it_counts() -> None:
    assert str(of(2, 1, 2)).startswith("CUDA's context 643.8 MB, 4 NCCL communicators ")
    assert "communicator" not in str(of(1, 1, 1))
