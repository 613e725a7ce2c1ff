"""The command line as a user meets it: what it prints where, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from merak.cli.main import app, main

TINY = '{"n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}'


def test_a_trace_shows_how_weights_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--no-cache", "--tp", "2"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    attention = report["parts"][1]
    assert attention["split"]["transformer.h.0.attn.c_proj.weight"] == "row"
    assert attention["split"]["transformer.h.0.attn.c_attn.weight"].startswith("column (")
    assert attention["whole"]["transformer.h.0.ln_1.weight"] == "it works on whole values"
    assert (attention["forward_collectives"], attention["backward_collectives"]) == (1, 1)
    assert report["parts"][-1]["whole"]["transformer.wte.weight"]
    assert 0 < report["tp_sharded_fraction"] < 1
    assert main(words) == 0
    page = capsys.readouterr().out
    assert page.count("split: row: c_proj.weight") == 3  # the last block has a norm more
    # The table of positions, a third of a mean block, is split as well: one more to look it up.
    assert "split: vocabulary: wpe.weight" in page
    assert "7 collectives of activations in the forward, 6 in the backward" in page


def test_a_trace_shows_what_gathers_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--no-cache", "--tp", "1"]
    assert main([*words, "--cp", "2"]) == 0
    assert "cp=2: every rank computes its own tokens alone" in capsys.readouterr().out
    assert main([*words, "--cp", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["cp"], report["gathered_tokens"]) == (2, None)


def test_a_trace_shows_what_lies_in_shares(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--no-cache", "--tp", "2"]
    assert main([*words, "--sequence-parallel", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sequence_parallel"]
    embedding, *blocks, _ = report["parts"]
    for block in blocks:
        assert 0 < block["shared_values"] <= block["values"]
        assert (block["forward_collectives"], block["backward_collectives"]) == (2, 2)
        assert not block["gathered_for"]
    assert embedding["shared_values"] > 0
    assert main([*words, "--sequence-parallel"]) == 0
    assert "on shares: " in capsys.readouterr().out


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--no-cache", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    report = json.loads(captured.out)
    assert report["model"] == "GPT2LMHeadModel"
    assert report["segments"] == 2 * 3 + 2
    assert report["boundary_tensors"] == [1] * 7
    # Embeddings, three layers of attention and feed-forward, and the last norm; the head is tied.
    assert report["parameters"] == (11 + 16) * 8 + 3 * (12 * 8 * 8 + 13 * 8) + 16
    assert set(report["seconds"]) == {"build", "trace", "shard", "total"}
    assert report["cached"] is False
    assert report["peak_rss_bytes"] > 50_000_000


def test_second_time_comes_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MERAK_CACHE", str(tmp_path))
    reports = []
    for words in ([], [], ["--no-cache"], ["--seq", "8"]):
        assert (
            main(["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--json", *words]) == 0
        )
        reports.append(json.loads(capsys.readouterr().out))
    assert [report["cached"] for report in reports] == [False, True, False, False]
    assert [report["segments"] for report in reports] == [8] * 4
    assert reports[0]["parts"] == reports[1]["parts"]


KEPT = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_key_value_heads": 2, "kv_channels": 4,
    "intermediate_size": 8, "num_local_experts": 4, "vocab_size": 32,
}  # fmt: skip


@pytest.mark.slow
def test_what_is_kept_whole_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if its experts computed something else than a product of rows in groups.
    monkeypatch.setattr("merak.graph.trace.opaque.record.expert_loop_of", lambda *given: None)
    words = ["trace", "--model", "JetMoeForCausalLM", "--config", json.dumps(KEPT), "--seq", "8"]
    words.append("--no-cache")
    assert main([*words, "--json"]) == 0
    (*found,) = json.loads(capsys.readouterr().out)["kept_whole"]
    assert found[0]["module"].startswith("model.layers.0.")
    assert "modeling_jetmoe.py:" in found[0]["why"]
    assert found[0]["parameters"] > 0
    assert main(words) == 0
    page = capsys.readouterr().out
    assert f"opaque: {found[0]['module']}" in page
    assert found[0]["why"] in page


def test_page_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--no-cache"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("GPT2LMHeadModel: 2,848 parameters, 8 segments, at most 1 tensor across")
    assert "transformer.h.1.attn" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace"], "merak: Missing option '--model'; see merak trace --help."),
        (["trace", "--model", "GPT2LMHeadMode"], "did you mean GPT2LMHeadModel"),
        (["trace", "--model", "GPT2LMHeadModel", "--seq", "x"], "Invalid value for '--seq'"),
        (["trace", "--model", "GPT2LMHeadModel", "--seq", "1025"], "the model's 1024 positions"),
        (["trace", "--model", "GPT2Model"], "the model returns no loss"),
        (["trcae"], "No such command 'trcae'"),
        (["launch", "nomad", "x.py"], "No such command 'nomad'; see merak launch --help."),
        (["train"], "Missing argument"),
        (["train", "x", "--max-restarts", "-1"], "--max-restarts -1 is no number of restarts"),
        (["train", "nowhere.yaml"], "the recipe nowhere.yaml cannot be read"),
    ],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    own = [line for line in captured.err.splitlines() if line.startswith("merak: ")]
    assert len(own) == 1 and said in own[0]


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "merak", "nothing"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("merak: ")


def test_every_command_helps_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [command.name for command in app.registered_commands]
    assert {"schedule", "trace", "train"} <= set(commands)
    for words in ([], *([str(name)] for name in commands)):
        assert main([*words, "--help"]) == 0
        assert f"Example: merak {' '.join(words)}" in capsys.readouterr().out


def test_recipe_is_checked_before_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name: M}\nparallel: {pp: 4}\narguments: {fp61: true}\n", "utf-8")
    assert main(["train", str(recipe)]) == 2
    assert "arguments has no field 'fp61'; did you mean fp16" in capsys.readouterr().err
