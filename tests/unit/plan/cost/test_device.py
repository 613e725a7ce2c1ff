import json
import math
import os
import threading

import pytest
import torch

from merak.core.errors import PlanError
from merak.core.files import private_files
from merak.plan.cost import benchmark as profiles
from merak.plan.cost.benchmark import measure
from merak.plan.cost.data_sheets import ALIASES, LINKS
from merak.plan.cost.device import PRESETS, from_json, preset, to_json


def test_presets_keep_below_their_data_sheets():
    for name, sheet in PRESETS.items():
        device = preset(name)
        assert device.name == name
        for dtype, teraflops in sheet.teraflops.items():
            # GeForce cards run above the clocks of their data sheets.
            most = 1.1 if "geforce" in sheet.generation else 1
            assert 0.4 < device.flops_per_s[dtype] / (teraflops * 1e12) < most
        assert 0.5 < device.memory_bytes_per_s / (sheet.memory_gigabytes_per_s * 1e9) < 1
        assert 0.5 < device.host_bytes_per_s / (sheet.host_gigabytes_per_s * 1e9) < 1


def test_an_unknown_preset_is_refused_with_the_known_ones():
    with pytest.raises(PlanError, match=r"no device 'h300'; choose one of: a10, a100-40gb, .*v100"):
        preset("h300")


def test_element_types_without_a_rate_run_at_that_of_float32():
    device = preset("v100")
    assert device.flop_rate(torch.float16) > device.flop_rate(torch.float32)
    assert device.flop_rate(torch.bfloat16) == device.flop_rate(torch.float32)


def test_a_profile_comes_back_from_its_text():
    assert from_json(to_json(preset("l4")), "file") == preset("l4")


def changed(**fields):
    return json.dumps(json.loads(to_json(preset("l4"))) | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "file is not JSON"),
        ("[]", "file is no device profile; give one object with"),
        (changed(speed=1), "file is no device profile; give one object with"),
        (changed(flops_per_s=3), "flops_per_s=3 must map element types"),
        (changed(flops_per_s={"float16": 1.0}), "must map element types, float32 among them"),
        (changed(flops_per_s={"float32": 0.0}), "float32=0.0 is no rate; give a number above 0"),
        (changed(memory_bytes_per_s=-1), "memory_bytes_per_s=-1 is no rate"),
        (changed(randoms_per_s=None), "randoms_per_s=None is no rate"),
        (changed(functions_per_s=math.inf), "functions_per_s=inf is no rate"),
        (changed(host_bytes_per_s=0), "host_bytes_per_s=0 is no rate"),
        (changed(overhead_s=-1e-6), "overhead_s=-1e-06 is no overhead"),
        (changed(multiprocessors=-1), "multiprocessors=-1 is no number"),
        (changed(efficiency=[]), r"efficiency=\[\] is no object"),
        (changed(efficiency={"product": 1}), "'sustained' is not one of both"),
        (changed(memory_bytes=0), "memory_bytes=0 is no size"),
    ],
)
def test_a_text_that_is_no_profile_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        from_json(text, "file")


def test_the_machine_is_measured_once_and_read_afterwards(tmp_path):
    random_state = torch.get_rng_state()
    first = measure("cpu", tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)  # of the user's next model
    assert first.device_type == "cpu"
    assert {"float32", "bfloat16"} <= set(first.flops_per_s)
    rates = (first.memory_bytes_per_s, first.host_bytes_per_s)
    assert min(*first.flops_per_s.values(), *rates) > 1e8
    assert min(first.functions_per_s, first.randoms_per_s) > 1e6
    assert 0 < first.overhead_s < 1e-2
    (path,) = tmp_path.iterdir()
    path.write_text(to_json(preset("l4")))
    assert measure("cpu", tmp_path) == preset("l4")


@pytest.mark.parametrize("damage", ["cut", "empty", "deep", "pipe", "foreign", "bytes", "nan"])
def test_a_damaged_or_foreign_file_is_measured_anew(tmp_path, monkeypatch, caplog, damage):
    monkeypatch.setattr(profiles, "_measure", lambda device: preset("l4"))
    measure("cpu", tmp_path)
    (path,) = tmp_path.iterdir()
    text = {"cut": path.read_text()[:40], "deep": "[" * 100_000, "bytes": "{}\udcff"}.get(
        damage, ""
    )
    if damage == "nan":
        text = path.read_text().replace(": ", ': NaN, "x": ', 1)
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage == "foreign":
        path.chmod(0o666)
    else:
        path.write_text(text, errors="surrogateescape")
    assert profiles.measured_before(torch.device("cpu"), tmp_path) is None
    assert f"The cached profile {path} cannot be read (" in caplog.text
    assert measure("cpu", tmp_path) == preset("l4")
    caplog.clear()
    assert profiles.measured_before(torch.device("cpu"), tmp_path) == preset("l4")
    assert not caplog.records


def test_other_numbers_of_threads_are_other_machines(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "_measure", lambda device: preset("l4"))
    measure("cpu", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    measure("cpu", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_concurrent_measurements_leave_one_whole_file(tmp_path, monkeypatch):
    names = list(PRESETS)
    together = threading.Barrier(len(names))

    def measured(device):
        together.wait()
        return preset(names[int(threading.current_thread().name)])

    monkeypatch.setattr(profiles, "_measure", measured)
    threads = [
        threading.Thread(target=measure, args=("cpu", tmp_path), name=str(index))
        for index in range(len(names))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.iterdir()
    assert from_json(path.read_text(), "file").name in names


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "_measure", lambda device: preset("l4"))

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(private_files.os, "replace", fail)
    assert measure("cpu", tmp_path) == preset("l4")  # goes on without the file
    assert not list(tmp_path.iterdir())


def test_a_device_that_cannot_be_measured_is_refused():
    with pytest.raises(PlanError, match="device='meta' cannot be measured; use 'cpu' or 'cuda'"):
        measure("meta")


@pytest.mark.gpu
def test_a_gpu_is_measured():
    device = measure("cuda")
    assert device.flops_per_s["bfloat16"] > device.flops_per_s["float32"] > 1e11
    assert device.memory_bytes_per_s > 5e10
    assert device.memory_bytes_per_s > device.host_bytes_per_s > 1e9


def test_every_figure_has_its_source():
    for sheet in PRESETS.values():
        assert sheet.source.startswith(("NVIDIA", "AMD"))
        assert sheet.efficiency.source
        assert {sheet.link, sheet.host_link} <= set(LINKS)
    assert all(link.source for link in LINKS.values())


def test_every_name_of_a_device_gives_its_profile():
    assert all(preset(short) == preset(name) for short, name in ALIASES.items())
    assert not set(ALIASES) & set(PRESETS)
    for name, sheet in PRESETS.items():
        device = preset(name.upper())
        assert device.device_type == "cuda"
        assert device.memory_bytes == int(sheet.memory_gibibytes * 2**30)
        assert from_json(to_json(device), "file") == device


def test_peaks_are_dense_ones():
    """Sparse ones are twice as much; tensor cores double with half the bits."""
    for name, sheet in PRESETS.items():
        rates = sheet.teraflops
        if "float8_e4m3fn" in rates:
            assert rates["float8_e4m3fn"] / rates["float16"] == pytest.approx(2, rel=0.03), name
        if "tfloat32" in rates:
            assert rates["float16"] / rates["tfloat32"] == pytest.approx(2, rel=0.02), name
    assert PRESETS["h100-sxm"].teraflops["bfloat16"] == 989
    assert PRESETS["a100-80gb"].teraflops["bfloat16"] == 312


def test_bandwidths_of_links_are_those_of_one_direction():
    assert [LINKS[f"nvlink{n}"].gigabytes_per_s for n in (2, 3, 4, 5)] == [150, 300, 450, 900]
    assert LINKS["infiniband-ndr"].gigabytes_per_s == 400 / 8
    assert all(0 < link.latency_s < 1e-3 for link in LINKS.values())
