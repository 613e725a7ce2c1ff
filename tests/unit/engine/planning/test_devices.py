"""Devices at hand as a cluster, and the memory that a budget leaves of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merak.core.errors import PlanError
from merak.core.mesh import Mesh
from merak.engine.planning import devices
from merak.engine.planning.devices import devices_here
from merak.plan.cluster.cluster import Cluster
from merak.plan.cluster.fit import usable_by_pp_rank
from merak.plan.cluster.parse import parse_cluster
from merak.plan.profile.profile_file import save_profile
from merak.plan.profile.saved import find_saved, save_for_jobs
from tests.unit.plan.profile.helpers import MACHINE, profile

MESH = Mesh(2, 1, 1, 0, torch.device("cpu"), None)


def test_a_named_cluster_has_as_many_devices_as_the_job_ranks() -> None:
    cluster = devices_here(MESH, "h100:2", None, 10**9)
    assert cluster is not None and cluster.num_devices == 2
    assert usable_by_pp_rank(cluster, MESH) == (10**9,)  # all of a budget is for tensors
    with pytest.raises(PlanError, match=r"has 8 devices, but the job has 2 ranks; name a cluster"):
        devices_here(MESH, "h100:8", None, None)


def test_known_gpus_are_those_of_their_data_sheets() -> None:
    ranks = [devices._Device(host, "NVIDIA H100 80GB HBM3", 85 * 10**9) for host in "aabb"]
    cluster = devices._known(ranks, None)
    assert cluster is not None
    assert [(own.devices_per_node, own.count) for own in cluster.nodes] == [(2, 2)]
    assert cluster.nodes[0].device.memory_bytes == 85 * 10**9
    assert devices._known([replace(own, name="unheard of") for own in ranks], None) is None


def test_hosts_have_the_memory_of_the_smallest_unless_they_say_theirs() -> None:
    ranks = [devices._Device("a", "", None, own) for own in (3 * 10**9, 2 * 10**9)]
    cluster = parse_cluster("h100:1x2")
    (found,) = devices._with_hosts(cluster, ranks).nodes
    assert found.host_memory_bytes == 2 * 10**9
    (own,) = devices._with_hosts(Cluster((replace(found, host_memory_bytes=5),)), ranks).nodes
    assert own.host_memory_bytes == 5
    here = devices_here(MESH, "h100:2", None, None)
    assert here is not None and (here.nodes[0].host_memory_bytes or 10**9) >= 10**9


def test_a_profile_is_found_for_equal_devices_alone(tmp_path: Path) -> None:
    measured = profile(machine=replace(MACHINE, torch=torch.__version__))
    save_for_jobs(tmp_path, measured)
    name, hosts = measured.machine.device, dict(measured.hosts)
    assert find_saved(tmp_path, name, hosts) == measured
    assert find_saved(tmp_path, "another", hosts) is None
    assert find_saved(tmp_path, name, Counter({"h": 7})) is None
    (saved,) = tmp_path.glob("profiles/*.json")
    saved.write_text("{")
    assert find_saved(tmp_path, name, hosts) is None  # and measured anew


def test_a_profile_of_other_devices_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = replace(MACHINE, device="Elsewhere", torch="1.0")
    own = profile(machine=machine, hosts=(("h", 2),))
    save_profile(tmp_path / "profile.json", own)
    devices_here(MESH, str(tmp_path / "profile.json"), None, None)
    assert "The profile is of 'Elsewhere', but the device here is" in caplog.text
    assert "measured with torch 1.0, but this is torch" in caplog.text
