"""Clusters from short texts and files, and the messages about wrong ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from merak.core.errors import PlanError
from merak.plan.cluster.parse import link_of, parse_cluster
from merak.plan.cost.data_sheets import LINKS, SHEETS
from merak.plan.cost.device import preset, to_json

WHOLE = """\
nodes:
  - device: h100
    devices_per_node: 8
    count: 2
    dollars_per_hour: 2.5
  - device: {name: mine, teraflops: {float32: 20, bfloat16: 100}, memory_gigabytes: 24,
             memory_gigabytes_per_s: 1000, generation: ada, multiprocessors: 50}
    devices_per_node: 4
    link: pcie4-host
    network: {latency_s: 2.0e-5, gigabytes_per_s: 12}
    adapters: 1
    dollars_per_hour: 0.5
    host_memory_gigabytes: 512
"""


def test_short_texts():
    one = parse_cluster("h100")
    assert one.num_devices == 1 and one.nodes[0].device == preset("h100-sxm")
    assert parse_cluster("h100:8").num_devices == 8
    cluster = parse_cluster("H100:8x4")
    (nodes,) = cluster.nodes
    assert (cluster.num_devices, nodes.count, nodes.devices_per_node) == (32, 4, 8)
    assert (nodes.link.name, nodes.network.name, nodes.adapters) == (
        "nvlink4",
        "infiniband-ndr",
        8,
    )
    assert cluster.dollars_per_hour is None


@pytest.mark.parametrize(
    ("written", "sheet"),
    [
        ("H100 80GB:8", "h100-sxm"),
        ("h100_80gb:8", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3:8", "h100-sxm"),
        ("A100-SXM4-40GB:8", "a100-40gb"),
        ("a100-pcie-80GB:8", "a100-80gb-pcie"),
        ("Tesla V100 32 GB:8", "v100-32gb"),
        ("RTX 4090:8", "rtx-4090"),
    ],
)
def test_devices_are_named_as_people_and_drivers_do(written, sheet):
    (nodes,) = parse_cluster(written).nodes
    assert (nodes.device.name, nodes.devices_per_node) == (sheet, 8)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100x8", "h100:8"),
        ("8xh100", "h100:8"),
        ("h100*8", "h100:8"),
        ("4x8xh100", "h100:8x4"),
        ("h100:8:4", "h100:8x4"),
        ("a100-80gb x8", "a100-80gb:8"),
        ("8 h100", "h100:8"),
    ],
)
def test_nodes_in_another_form_are_suggested(written, meant):
    with pytest.raises(PlanError, match=f"did you mean {meant}\\?"):
        parse_cluster(written)


def test_a_memory_that_no_such_device_has_is_refused():
    with pytest.raises(PlanError, match="There is no device 'h100-40gb'"):
        parse_cluster("h100-40gb:8")


@pytest.mark.parametrize("name", SHEETS)
def test_every_device_gives_a_cluster(name):
    (nodes,) = parse_cluster(f"{name}:8x2").nodes
    assert nodes.device.name == name
    assert nodes.network.bytes_per_s <= link_of(SHEETS[name].network).bytes_per_s


def test_a_file_of_uneven_nodes(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(WHOLE)
    cluster = parse_cluster(str(path))
    assert cluster.num_devices == 20
    assert cluster.dollars_per_hour == 16 * 2.5 + 4 * 0.5
    assert [own.host_memory_bytes for own in cluster.nodes] == [None, 512 * 10**9]
    own = cluster.nodes[1]
    assert own.device.name == "mine"
    assert own.device.flops_per_s["bfloat16"] == pytest.approx(85e12)
    assert own.device.memory_bytes == 24 * 10**9
    assert own.link == link_of("pcie4-host")
    assert (own.network.latency_s, own.network.bytes_per_s) == (2e-5, 3e9)
    assert cluster.nodes[0].link == link_of("nvlink4")


def test_a_json_file_with_a_profile(tmp_path):
    (tmp_path / "measured.json").write_text(to_json(replace(preset("l40s"), name="here")))
    path = tmp_path / "cluster.json"
    nodes = {
        "device": {"profile": "measured.json"},
        "devices_per_node": 2,
        "link": "pcie4",
        "network": "ethernet-10",
    }
    path.write_text(json.dumps({"nodes": [nodes]}, indent=1))
    (found,) = parse_cluster(str(path)).nodes
    assert found.device.name == "here"
    assert found.network.bytes_per_s == LINKS["ethernet-10"].fraction * 1.25e9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device: h100", "device: h1000", r":2:\d+: nodes\[0\].device is 'h1000', which is no dev"),
        ("count: 2", "count: 0", r":4:\d+: nodes\[0\].count is '0'; give a whole number of 1 or"),
        (
            "count: 2",
            "counts: 2",
            r":4:\d+: nodes\[0\] has no field 'counts'; did you mean count",
        ),
        ("count: 2", "count: two", r":4:\d+: nodes\[0\].count is 'two'"),
        ("2.5", "-1", r":5:\d+: nodes\[0\].dollars_per_hour is '-1'; give a number of 0 or more"),
        ("float32: 20, ", "", r":6:\d+: nodes\[1\].device.teraflops has no 'float32'"),
        (
            "bfloat16: 100",
            "bfloat16: fast",
            r"device.teraflops.bfloat16 is 'fast'; give a number a",
        ),
        ("memory_gigabytes: 24,", "", r":6:\d+: nodes\[1\].device has no field 'memory_gigabytes'"),
        ("ada", "adda", r":7:\d+: nodes\[1\].device.generation is 'adda', .*; did you mean ada\?"),
        (
            "pcie4-host",
            "pci4",
            r":9:\d+: nodes\[1\].link is 'pci4', which is no link; did you mean",
        ),
        ("latency_s: 2.0e-5, ", "", r":10:\d+: nodes\[1\].network has no field 'latency_s'"),
        ("gigabytes_per_s: 12}", "gigabytes_per_s: 0}", r"is '0'; give a number above 0"),
        ("    link: pcie4-host\n", "", r"nodes\[1\] has no 'link', which the device's figures do"),
        ("nodes:", "node:", r":1:\d+: the file has no field 'node'; did you mean nodes\?"),
        (
            "    count: 2\n",
            "    count: 2\n    count: 3\n",
            r":5:\d+: nodes\[0\] has the field 'cou",
        ),
        ("    count: 2\n", "   count: 2\n", r":4:\d+: "),
        (WHOLE, "nodes: 3\n", r":1:\d+: nodes is no list with elements"),
        (WHOLE, "nodes:\n  - 3\n", r":2:\d+: nodes\[0\] is no mapping"),
        (WHOLE, "- 3\n", r":1:\d+: the file is no mapping"),
        (WHOLE, "", "is empty; begin with 'nodes:'"),
        (
            "device: h100",
            "device: {profile: none.json}",
            r":2:\d+: .*profile is .*none.json",
        ),
    ],
)
def test_an_error_of_a_file_names_its_line_and_field(tmp_path, old, new, message):
    assert old in WHOLE
    path = tmp_path / "cluster.yaml"
    path.write_text(WHOLE.replace(old, new, 1))
    with pytest.raises(PlanError, match=message) as caught:
        parse_cluster(str(path))
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).count("\n") == 0


def test_texts_that_are_no_cluster_are_refused(tmp_path):
    for text, message in (
        ("h200x:8", r"no device 'h200x'; did you mean h200"),
        ("tpu:8", "no device 'tpu'; choose one of: a10, "),
        ("h100:8x0", "has no devices; write for example h100:8x4"),
        ("h100:8x1000000", "has 8,000,000 devices; use at most 1,048,576"),
        ("", "neither a file nor of the form"),
        ("h100:8+", "neither a file nor of the form"),
        ("h100:8x4x2", "neither a file nor of the form DEVICE:PER_NODExNODES"),
        ("none.yaml", "none.yaml cannot be read: No such file or directory; name another"),
    ):
        with pytest.raises(PlanError, match=message):
            parse_cluster(text)
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="is not YAML"):
        parse_cluster(str(tmp_path / "bad.yaml"))


def test_nodes_of_several_kinds_are_joined_in_the_order_of_ranks():
    cluster = parse_cluster("h100:8x2+rtx-4090:4")
    assert [(own.device.name, own.devices_per_node, own.count) for own in cluster.nodes] == [
        ("h100-sxm", 8, 2),
        ("rtx-4090", 4, 1),
    ]
    assert cluster.place(15)[0].device.name == "h100-sxm"
    assert cluster.place(16)[0].device.name == "rtx-4090"
