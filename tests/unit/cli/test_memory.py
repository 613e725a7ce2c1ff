"""`merak memory`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from merak.cli.main import main
from merak.plan.cost.device import preset

TINY = '{"n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}'
MODEL = ["memory", "--model", "GPT2LMHeadModel", "--config", TINY, "--device", "cpu"]


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    monkeypatch.setattr("merak.plan.layout.measure", lambda *_: preset("a100-80gb"))


def report_of(capsys, *words):
    assert main([*MODEL, "--json", *words]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_every_stage_has_its_bytes(capsys):
    report = report_of(capsys, "--pp", "2", "--microbatches", "4", "--batch", "2")
    assert [row["stage"] for row in report["stages"]] == [0, 1]
    for row in report["stages"]:
        kinds = ("parameters", "gradients", "optimizer", "activations")
        assert row["total"] == sum(row[kind] for kind in kinds)
        assert row["gradients"] == row["parameters"]
        # Two moments of each number, and a count of steps for each parameter.
        assert 0 <= row["optimizer"] - 2 * row["parameters"] < 4 * 50
        assert row["activations"] > 0 and row["recomputed"] == 0
    # The tied table is on both stages.
    numbers = (11 + 16) * 8 + 3 * (12 * 8 * 8 + 13 * 8) + 16
    assert sum(row["parameters"] for row in report["stages"]) == 4 * (numbers + 11 * 8)
    for rank in report["ranks"]:
        assert rank["peak"] == sum(rank["parts"].values())
        assert 0 <= rank["at_seconds"] <= report["seconds"]


def test_recomputation_takes_less_and_longer(capsys):
    words = ("--pp", "2", "--microbatches", "4", "--batch", "2", "--schedule", "gpipe")
    off, half, full = (
        report_of(capsys, *words, "--recompute", choice) for choice in ("off", "0.5", "full")
    )
    assert len(full["recomputed"]) == 8 > len(half["recomputed"]) > len(off["recomputed"]) == 0
    for stage in range(2):
        found = [r["stages"][stage]["activations"] for r in (off, half, full)]
        assert found[0] > found[1] > found[2]
    assert off["seconds"] < half["seconds"] < full["seconds"]


def test_degrees_and_optimizers_count(capsys):
    whole = report_of(capsys)["stages"][0]
    split = report_of(capsys, "--tp", "2")["stages"][0]
    assert split["parameters"] < whole["parameters"]
    plain = report_of(capsys, "--optimizer", "SGD")["stages"][0]
    assert plain["optimizer"] == 0 and plain["parameters"] == whole["parameters"]
    # Replicas sum copies of their gradients.
    (alone,) = report_of(capsys)["ranks"]
    (replica,) = report_of(capsys, "--dp", "2")["ranks"]
    assert replica["peak"] >= alone["peak"]


def test_replicas_share_the_optimizer(capsys):
    half = ("--dtype", "bfloat16", "--master-weights", "--dp", "4")
    rows = [report_of(capsys, *half, "--zero", zero)["stages"][0] for zero in "012"]
    phi = rows[0]["parameters"] // 2
    # Masters and two moments of each number, and a count of steps for each parameter; gradients
    # are summed in float32.
    found = [row["optimizer"] - 4 * 50 for row in rows]
    assert all(less <= share * phi <= less + 4 * 50 for less, share in zip(found, (12, 3, 3)))
    assert [round(row["gradients"] / phi, 1) for row in rows] == [4.0, 4.0, 1.0]
    # What fits with shares is refused without them.
    peaks = [report_of(capsys, *half, "--zero", zero)["ranks"][0]["peak"] for zero in ("0", "1")]
    budget = ("--budget", str(sum(peaks) // 2))
    assert main([*MODEL, *half, *budget, "--zero", "1"]) == 0
    assert main([*MODEL, *half, *budget]) == 2


def test_a_group_of_replicas_holds_what_so_many_replicas_would(capsys):
    for zero in "123":
        words = ("--zero", zero, "--dp")
        group, whole = (
            report_of(capsys, *words, *more)["stages"][0]
            for more in (("8", "--zero-group-size", "2"), ("2",))
        )
        names = ("parameters", "gradients", "optimizer")
        assert [group[name] for name in names] == [whole[name] for name in names]


def test_autocast_keeps_parameters_and_saves_activations(capsys):
    words = ("--batch", "4", "--microbatches", "2")
    whole, half = (
        report_of(capsys, *words, *more)["stages"][0] for more in ((), ("--autocast", "bfloat16"))
    )
    assert half["parameters"] == whole["parameters"]
    assert half["activations"] != whole["activations"]


def test_a_budget_is_filled(capsys):
    words = ("--microbatches", "4", "--batch", "2", "--schedule", "gpipe")
    most, least = (
        report_of(capsys, *words, "--recompute", choice)["ranks"][0]["peak"]
        for choice in ("off", "full")
    )
    budget = (most + least) // 2
    filled = report_of(capsys, *words, "--recompute", "auto", "--budget", str(budget))
    assert least < filled["ranks"][0]["peak"] <= budget


def test_host_memory_takes_what_the_device_does_not(capsys):
    words = ("--microbatches", "4", "--batch", "2", "--schedule", "gpipe", "--pp", "2")
    rate = ("--host-bytes-per-s", "1e4")
    kept, away = (
        report_of(capsys, *words, *rate, "--offload", choice) for choice in ("off", "full")
    )
    assert kept["offloaded"] == [] and [r["host"] for r in kept["ranks"]] == [0, 0]
    assert away["offloaded"] == list(range(8))
    assert sum(row["offloaded"] for row in away["stages"]) == 8
    for before, after in zip(kept["ranks"], away["ranks"], strict=True):
        assert after["peak"] < before["peak"] and after["host"] > 0
    assert away["seconds"] > kept["seconds"]  # a slow way
    budget = (kept["ranks"][0]["peak"] + away["ranks"][0]["peak"]) // 2
    fitted = ("--budget", str(budget), "--recompute", "auto", "--offload", "auto")
    report = report_of(capsys, *words, "--host-bytes-per-s", "1e12", *fitted)
    assert report["offloaded"] and report["recomputed"] == []
    assert max(rank["peak"] for rank in report["ranks"]) <= budget
    assert main([*MODEL, *words, "--offload", "full"]) == 0
    page = capsys.readouterr().out
    assert "recomputed: 0 segments, offloaded: 8 segments" in page
    assert " in host memory\n" in page and "  a host of 2 ranks: " in page


def test_a_host_holds_what_its_ranks_do(capsys, tmp_path):
    """States, masters, gradients and pinned buffers of all of its ranks, if it has the memory."""
    words = (*MODEL[:-2], "--pp", "2", "--dp", "2", "--offload-optimizer", "cpu")
    for gigabytes in (100.0, 2.0):  # less than four processes of torch take
        cluster = tmp_path / f"{gigabytes}.yaml"
        nodes = {"device": "h100", "devices_per_node": 4, "host_memory_gigabytes": gigabytes}
        cluster.write_text(json.dumps({"nodes": [nodes]}))
        assert main([*words, "--cluster", str(cluster), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        (first, last) = report["ranks"]
        assert set(first["host_parts"]) == {"optimizer", "gradients", "pinned"}
        assert sum(first["host_parts"].values()) == first["host"]
        needed = 2 * (first["host"] + last["host"])
        assert (report["host_ranks"], report["host_bytes"]) == (4, needed)
        assert report["fits"] is (gigabytes > 2.0)
    assert main([*words, "--cluster", str(cluster)]) == 0
    page = capsys.readouterr().out
    assert "the job does not fit (the memory of a host)" in page
    assert "a host of 4 ranks: " in page and " of 0 B in host memory; of a rank" in page


def test_the_page_shows_stages_and_moments(capsys):
    assert main([*MODEL, "--pp", "2", "--microbatches", "2"]) == 0
    page = capsys.readouterr().out
    assert "stage  segments" in page and "pp rank 1: at most" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--budget", "1000"), "needs"),
        (("--budget", "0"), "--budget 0 is not a size"),
        (("--microbatches", "0"), "--microbatches 0 is too few"),
        (("--pp", "0"), "--pp 0 is too few"),
        (("--pp", "20"), "8 segments cannot fill 20 stages"),
        (("--recompute", "auto"), "memory_budget in bytes"),
        (("--recompute", "much"), "recompute='much' is no choice"),
        (("--offload", "auto"), "offload_activations='auto' fills a memory whose size is not"),
        (("--offload", "much"), "offload_activations='much' is no choice"),
        (("--host-bytes-per-s", "0"), "--host-bytes-per-s 0 is no rate; use a number of bytes"),
        (("--optimizer", "Optimise"), "--optimizer Optimise is no class of torch.optim"),
        (("--device", "abacus"), "--device abacus is not known"),
        (("--schedule", "2f2b"), "no schedule '2f2b'"),
        (("--zero", "4"), "--zero 4 is not a choice"),
        (("--zero", "2", "--schedule", "gems", "--pp", "2"), "schedule='gems' has several copies"),
        (("--dtype", "int4"), "--dtype int4 is no type of parameters; use one of float32, bf"),
        (("--autocast", "float32"), "--autocast float32 is none; use bf16, fp16 or off"),
    ],
)
def test_bad_input_exits_with_two_and_a_sentence(capsys, words, sentence):
    assert main([*MODEL, *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("device", ["cuda", "l4"])
def test_a_gpu_that_is_not_here_is_planned_for(device, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*MODEL[:-1], device, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == {"cuda": "h100-sxm", "l4": "l4"}[device]
    assert report["assumed"].startswith(f"times come from the data sheet of {report['device']}, no")
    assert "the model is traced for the CPU" in report["assumed"]
    assert main([*MODEL[:-1], device]) == 0
    assert "  assumed: times come from the data sheet" in capsys.readouterr().out
    for budget in ((), ("--budget", "1000000")):
        assert main([*MODEL[:-1], device, "--recompute", "auto", *budget]) == 0


def test_what_is_measured_here_is_not_assumed(capsys):
    report = report_of(capsys)
    assert (report["device"], report["assumed"]) == ("cpu", None)


def test_a_device_that_nobody_knows(capsys):
    assert main([*MODEL[:-1], "h200x"]) == 2
    assert "--device h200x is not known; did you mean h200" in capsys.readouterr().err
    assert main([*MODEL[:-1], "tpu"]) == 2
    assert "--device tpu is not known; use cpu, cuda, or one of a10" in capsys.readouterr().err


def test_a_job_fits_the_memory_of_its_data_sheet_or_not(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([*MODEL[:-1], "h100", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["device_bytes"]) == ("h100-sxm", preset("h100").memory_bytes)
    (usable,) = report["usable_bytes"]
    assert report["fits"] and 0.9 * report["device_bytes"] < usable < report["device_bytes"]
    assert main([*MODEL[:-1], "H100"]) == 0
    assert "h100-sxm has 84.9 GB, 80.8 GB of it for tensors: the job fits\n" in (
        capsys.readouterr().out
    )
    small = replace(preset("h100"), memory_bytes=20_000)
    monkeypatch.setattr("merak.launch.devices.preset", lambda _: small)
    assert main([*MODEL[:-1], "h100", "--pp", "2"]) == 0  # it is shown all the same
    assert "10.0 kB of it for tensors: the job does not fit (pp ranks 0, 1)\n" in (
        capsys.readouterr().out
    )
    assert main([*MODEL[:-1], "h100", "--recompute", "auto"]) == 2
    assert "but may hold 20.00 kB" in capsys.readouterr().err


def test_a_job_on_a_cluster(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    job = [*MODEL[:-2], "--pp", "2", "--dp", "2"]
    assert main([*job, "--cluster", "a100:4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "a100-80gb" and report["fits"]
    path = tmp_path / "uneven.yaml"
    path.write_text(
        "nodes:\n- {device: h200, devices_per_node: 2}\n- {device: l4, devices_per_node: 2}\n"
    )
    assert main([*job, "--cluster", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable_bytes"][0] > 5 * report["usable_bytes"][1]
    assert main([*job, "--cluster", "a100:2"]) == 2
    assert "dp=2 × tp=1 × pp=2 are 4 ranks, but the cluster has 2 devices" in (
        capsys.readouterr().err
    )
    assert main([*MODEL[:-1], "h100", "--cluster", "h100:8"]) == 2
    assert "both name devices; give one of them" in capsys.readouterr().err
    path.write_text("nodes:\n- {device: h2, devices_per_node: 2}\n")
    assert main([*job, "--cluster", str(path)]) == 2
    assert ":2:12: nodes[0].device is 'h2'" in capsys.readouterr().err
