"""`merak rehearse`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from merak.cli.main import main

TINY = (
    '{"n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16,'
    ' "bos_token_id": 0, "eos_token_id": 0}'
)
COMMAND = ["rehearse", "--model", "GPT2LMHeadModel", "--config", TINY, "--device", "cpu"]
PLAN = ["--cluster", "h100:8x4", "--dp", "4", "--tp", "2", "--pp", "4", "--steps", "1"]


def test_a_report_has_measured_and_charged_seconds(capsys):
    words = ["--rank", "27", "--global-batch", "16", "--microbatch", "2", "--json"]
    assert main([*COMMAND, *PLAN, *words]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    report = json.loads(captured.out)
    assert (report["rank"], report["pp_rank"], report["world_size"]) == (27, 3, 32)
    assert [(own["action"], own["stage"], own["count"]) for own in report["actions"]] == [
        ("F", 3, 2),
        ("B", 3, 2),
    ]
    seconds = report["seconds"]
    assert all(seconds[name] > 0 for name in ("compute", "tp_collectives", "transfers", "step"))
    assert report["peak_memory_bytes"] > 0
    ratio = report["peak_memory_bytes"] / report["forecast"]["peak_memory_bytes"]
    assert report["memory_ratio"] == pytest.approx(ratio)
    assert report["forecast"]["step_seconds"] > 0


@pytest.mark.slow
def test_the_page_says_what_was_measured_and_what_was_charged(capsys):
    assert main([*COMMAND, *PLAN, "--rank", "0"]) == 0
    page = capsys.readouterr().out
    assert "rank 0 of 32 (pp rank 0) on the CPU, planned for h100:8x4" in page
    assert "tp all_reduce" in page and "pp send" in page and "of the job:" in page
    assert "warning: computation was measured on the CPU, not on the cluster's h100-sxm" in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rank", "32"], "rank 32 is none of the 32 ranks"),
        (["--rank", "0", "--dp", "0"], "--dp 0 is too few; use 1 or more."),
        (["--rank", "0", "--steps", "0"], "steps=0 times nothing; use 1 or more."),
        (["--rank", "0", "--global-batch", "6"], "--global-batch 6 is not a multiple of dp"),
        (["--rank", "0", "--option", "chunks"], "--option chunks is not of the form KEY=VALUE."),
        (["--rank", "0", "--partition", "a,b"], "--partition a,b is no list of whole numbers"),
        (
            ["--rank", "0", "--sub-pipelining", "auto"],
            "--sub-pipelining auto waits for all ranks",
        ),
        (["--rank", "0", "--cluster", "h101:8x4"], "There is no device 'h101'"),
        (["--rank", "0", "--cluster", "h100:8x1"], "are 32 ranks, but the cluster has 8"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(capsys, words, sentence):
    assert main([*COMMAND, *PLAN, *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rank", "32"], "rank 32 is none of the 32 ranks"),
        (["--rank", "0", "--cluster", "h100:8x1"], "are 32 ranks, but the cluster has 8"),
    ],
)
def test_a_rank_that_is_not_there_is_refused_before_the_model_is_built(capsys, words, sentence):
    assert main([*COMMAND, *PLAN, *words, "--model", "NoSuchModel"]) == 2
    assert sentence in capsys.readouterr().err
