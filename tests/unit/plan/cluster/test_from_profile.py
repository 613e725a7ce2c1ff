"""Clusters made from profiles."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merak.plan.cluster.collectives import collective_seconds
from merak.plan.cluster.from_profile import cluster_of, device_of, fit_link
from merak.plan.cluster.groups import group_of
from merak.plan.cluster.parse import parse_cluster
from merak.plan.cost.calibration import Curve
from merak.plan.cost.device import preset
from merak.plan.cost.efficiency import ProductShape
from merak.plan.cost.kernels.kernel_time import work_seconds
from merak.plan.cost.operators import Work
from merak.plan.profile.profile_file import save_profile
from tests.unit.plan.profile.helpers import MACHINE, SPEEDS, line, profile


def product(side: int) -> Work:
    shape = ProductShape(side, side, side)
    return Work(0, 2.0 * side**3, torch.float32, shape=shape)


def test_hosts_and_links_are_those_measured() -> None:
    (nodes,) = cluster_of(profile()).nodes
    assert (nodes.devices_per_node, nodes.count, nodes.adapters) == (2, 2, 1)
    assert (nodes.link.latency_s, nodes.link.bytes_per_s) == pytest.approx((1e-5, 4e9))
    assert (nodes.network.latency_s, nodes.network.bytes_per_s) == pytest.approx((1e-4, 5e7))
    assert nodes.network_of(1).bytes_per_s == pytest.approx(1e8)
    assert nodes.link.interference == 0.3
    assert nodes.network.interference is None


def test_uneven_hosts_are_nodes_of_their_own() -> None:
    nodes = cluster_of(profile(hosts=(("a", 2), ("b", 4), ("c", 2)))).nodes
    assert [(own.devices_per_node, own.count) for own in nodes] == [(2, 2), (4, 1)]


def test_measured_rates_are_used_and_the_nearest_corrects_others() -> None:
    device = device_of(profile())
    assert work_seconds(product(100), device) == pytest.approx(4e-5)  # measured
    assert work_seconds(product(1000), device) == pytest.approx(2e-2)
    assert work_seconds(product(10), device) == pytest.approx(2 * 2e3 / 1e11)
    assert work_seconds(product(2000), device) == pytest.approx(1.6e-1)
    assert work_seconds(Work(1e4), device) == pytest.approx(2e-6)


def test_a_known_device_has_its_data_sheet() -> None:
    own = replace(MACHINE, device="NVIDIA H200", device_type="cuda")
    speeds = replace(SPEEDS, name="NVIDIA H200", device_type="cuda")
    device = device_of(profile(machine=own, speeds=speeds))
    assert device.efficiency == preset("h200").efficiency
    assert work_seconds(product(1000), device) == pytest.approx(2e-2)


def test_measured_collectives_replace_the_algorithms() -> None:
    cluster = cluster_of(profile())
    pair = group_of(cluster, 2, 1)
    assert collective_seconds("all_reduce", 1e7, pair) == pytest.approx(2e-5 + 1e7 / 2e9)
    # No gather was measured.
    assert collective_seconds("all_gather", 1e7, pair) == pytest.approx(1e-5 + 0.5e7 / 4e9)


def test_larger_groups_scale_what_was_measured() -> None:
    own = profile(hosts=(("a", 4),), links=profile().links[:1])
    cluster = cluster_of(own)
    two, four = (collective_seconds("all_reduce", 1e7, group_of(cluster, n, 1)) for n in (2, 4))
    assert four / two == pytest.approx(1.5, rel=0.02)  # of 2 (n - 1) / n


def test_a_line_is_found_through_its_points() -> None:
    assert fit_link(line(1e-5, 1e9)) == pytest.approx((1e-5, 1e9))
    assert fit_link(Curve(((1e3, 1e-3),))) == pytest.approx((0.0, 1e6))
    latency_s, rate = fit_link(Curve(((1e3, 2e-3), (1e6, 1e-3))))
    assert latency_s >= 0
    assert rate > 0


def test_a_cluster_file_may_be_a_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, profile())
    with caplog.at_level(logging.WARNING, logger="merak"):
        assert parse_cluster(str(path)).num_devices == 4
    assert "measured with torch 2.13.0, but this is torch" in caplog.text
