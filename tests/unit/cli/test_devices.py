"""`merak trace` and `merak schedule` for devices that are not here."""

from __future__ import annotations

import json

import pytest

from merak.cli.main import main

TINY = (
    '{"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 11, "n_positions": 16, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)
MODEL = ["--model", "GPT2LMHeadModel", "--config", TINY, "--seq", "16"]
SCHEDULE = ["schedule", "1f1b", "--stages", "2", "--microbatches", "4"]


def report_of(capsys, words):
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


@pytest.mark.slow
def test_a_trace_shows_the_times_of_segments_on_any_device(capsys):
    words = ["trace", *MODEL, "--tp", "2"]
    fast, slow = (report_of(capsys, [*words, "--device", name]) for name in ("h100", "t4"))
    assert (fast["device"], slow["device"]) == ("h100-sxm", "t4")
    for quick, lame in zip(fast["parts"], slow["parts"], strict=True):
        assert 0 < quick["forward_seconds"] <= lame["forward_seconds"]
        assert 0 < quick["backward_seconds"] <= lame["backward_seconds"]
    assert main([*words, "--cluster", "h100:2x2"]) == 0
    page = capsys.readouterr().out
    assert "on one of 2 tensor parallel h100-sxm: forward" in page and "  F " in page


def test_a_schedule_is_simulated_with_the_stages_of_a_model(capsys):
    found = report_of(capsys, [*SCHEDULE, *MODEL, "--device", "h100"])
    assert sum(found["partition"]) > 2 and len(found["partition"]) == 2
    assert found["actions"][0][0] == "F0" and 0 < found["makespan"] < 1
    assert main([*SCHEDULE, *MODEL, "--cluster", "t4:1x2"]) == 0
    assert "segments of the stages: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*MODEL], "--model GPT2LMHeadModel takes time on devices; name them with --device or"),
        (["--device", "h100"], "--device needs work to price; name --model too."),
        (["--cluster", "h100:4"], "--cluster needs work to price; name --model too."),
        ([*MODEL, "--device", "h100", "--forward", "2"], "--forward and --model both say what"),
        ([*MODEL, "--device", "h100", "--cluster", "h100:2"], "both name devices; give one of"),
        ([*MODEL, "--cluster", "h100:1"], "2 ranks are more than the 1 device of h100:1; use"),
        ([*MODEL, "--device", "h101"], "There is no device 'h101'"),
        ([*MODEL, "--device", "h100", "--tp", "0"], "--tp 0 is too few; use 1 or more."),
    ],
)
def test_a_schedule_refuses_what_makes_no_sense(capsys, words, sentence):
    assert main([*SCHEDULE, *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_trace_refuses_two_names_of_devices(capsys):
    assert main(["trace", *MODEL, "--device", "h100", "--cluster", "h100:2"]) == 2
    assert "both name devices; give one of them." in capsys.readouterr().err
