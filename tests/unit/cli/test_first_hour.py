"""What a newcomer types in the first hour."""

from __future__ import annotations

from pathlib import Path

import pytest

import merak
from merak.cli.main import app, main
from merak.cli.recipe.planned_job import planned_job
from merak.cli.recipe.recipe import model_of
from merak.cli.recipe.source import Origins
from merak.core.errors import PlanError
from merak.plan.cluster.parse import parse_cluster
from merak.schedule import registry


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"merak {merak.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [[], *([str(own.name)] for own in app.registered_commands), ["launch"], ["launch", "slurm"]],
    ids=" ".join,
)
def test_h_is_help_everywhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([*words, "--help"]) == 0
    assert short == capsys.readouterr().out and short.startswith("Usage: merak")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("merak sch", "schedule"),
        ("merak plan --glob", "--global-batch"),
        ("merak schedule chim", "chimera"),
        ("merak plan --schedule zero_bubble_h", "zero_bubble_h1"),
        ("merak plan --cluster mi3", "mi300x"),
        ("merak train mix", "mixtral"),
        ("merak init x --recipe ll", "llama"),
    ],
)
def test_a_shell_completes_commands_options_and_values(
    typed: str,
    completed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_MERAK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert completed in capsys.readouterr().out.split()


def test_every_schedule_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.names())
    assert all(len(line.split()) > 4 for line in lines) and len(set(lines)) == len(lines)


@pytest.mark.parametrize("words", [["schedule", "--list"], ["recipes"]], ids=" ".join)
def test_lists_have_a_line_each_at_any_width_of_the_terminal(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "999")
    assert main(words) == 0
    whole = capsys.readouterr().out.splitlines()
    monkeypatch.setenv("COLUMNS", "60")
    assert main(words) == 0
    cut = capsys.readouterr().out.splitlines()
    assert len(cut) == len(whole) and max(map(len, cut)) == 60 < max(map(len, whole))
    for own, line in zip(cut, whole, strict=True):
        assert own == line or (own.endswith("…") and line.startswith(own[:-1]))


def test_a_schedule_that_there_is_not_has_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, meant in (("1f1c", "1f1b"), ("zero_buble_v", "zero_bubble_v"), ("GPipe", "gpipe")):
        assert main(["schedule", typed, "--stages", "2", "--microbatches", "4"]) == 2
        assert f"did you mean {meant}" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_schedules_are_drawn_at_the_width_of_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["schedule", "1f1b", "--stages", "4", "--microbatches", "32"]) == 0
    drawn = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert columns - 12 <= max(map(len, drawn)) <= columns


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "--schedule", "chimera", "--pp", "3"], "an even number of stages; got 3"),
        (["memory", "--schedule", "1f1c"], "did you mean 1f1b"),
        (["check", "--schedule", "chimera", "--pp", "3"], "an even number of stages; got 3"),
        (
            ["rehearse", "--cluster", "h100:4", "--rank", "0", "--schedule", "chimera"],
            "an even number of stages; got 1",
        ),
        (
            ["schedule", "chimera", "--stages", "3", "--microbatches", "6", "--device", "h100"],
            "an even number of stages; got 3",
        ),
        (["memory", "--budget", "lots"], "--budget lots is no number of bytes; use such as 80GB"),
        (["memory", "--dtype", "bf17"], "--dtype bf17 is no type of parameters"),
    ],
)
def test_what_needs_no_trace_is_refused_before_it(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def traced(*given: object, **named: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr("merak.engine.build.build_graph", traced)
    monkeypatch.setattr("merak.check.check.build_graph", traced)
    monkeypatch.setattr("merak.plan.price.workload.Workload.graph", traced)
    command, *rest = words
    model = ["--model", "GPT2LMHeadModel", "--config", '{"n_layer": 4, "n_embd": 8, "n_head": 2}']
    assert main([command, *rest, *model, "--seq", "8"]) == 2
    assert said in capsys.readouterr().err


BAD = """\
model: {nam: GPT2LMHeadModel}
data:
  seqence: 64
  packing: joint
  held_out: 2.0
paralel: {dp: 1}
arguments:
  output_dir: OUTPUT
  evaluation_strategy: steps
  optim: adamw_torc
  max_steps: three
  learning_rate: -1
"""


def test_all_that_is_wrong_with_a_recipe_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(BAD.replace("OUTPUT", str(tmp_path / "run")), encoding="utf-8")
    assert main(["train", str(recipe)]) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, said in (
        (1, "model has no field 'nam'; did you mean name?"),
        (1, "model.name is missing"),
        (3, "data has no field 'seqence'; did you mean sequence?"),
        (4, "data.packing='joint' is not known; did you mean joined?"),
        (5, "data.held_out=2.0 is too large"),
        (6, "the recipe has no section 'paralel'; did you mean parallel?"),
        (9, "arguments has no field 'evaluation_strategy'; today it is eval_strategy."),
        (10, "optim='adamw_torc' is not a choice; did you mean adamw_torch"),
        (11, "max_steps='three' should be a whole number."),
        (12, "learning_rate=-1 is out of range"),
    ):
        own = [one for one in lines if said in one]
        assert len(own) == 1 and own[0].startswith(f"merak: {recipe}:{line}:"), (said, lines)
    assert len(lines) == 10


def test_wrong_model_and_wrong_arguments_are_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"arguments.output_dir={tmp_path}/run", "arguments.zero=7", "model.name=GPT2LMHead"]
    assert main(["train", "gpt2", "plan=null", "parallel.pp=1", *words]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("merak: arguments.zero=7: zero=7 is not a choice")
    assert second.startswith("merak: model.name=GPT2LMHead: ") and "GPT2LMHeadModel" in second


def test_a_recipe_that_comes_with_merak_is_no_file_of_the_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's word counts first; a line of Merak's own file is no place that one could mend."""
    words = [f"arguments.output_dir={tmp_path}/run", "plan=null"]
    assert main(["train", "gpt2", *words, "arguments.max_steps=0"]) == 2
    assert capsys.readouterr().err.startswith("merak: arguments.max_steps=0: max_steps=0 trains")
    assert main(["train", "sft", *words, "model=null"]) == 2
    err = capsys.readouterr().err
    assert "model.name is missing" in err and "sft:1" not in err and "sft:2" not in err
    origins = Origins({("data",): "sft:3:1", ("data", "sequence"): "data.sequence=9"}, "sft", True)
    said = str(origins.error(("data", "source"), "data.source is missing."))
    assert said == "sft: data.source is missing. Change it by data=…."
    assert str(origins.error(("data", "sequence"), "wrong.")) == "data.sequence=9: wrong."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "--model", "GPT2LMHeadModel", "--optimizer", "Adamw"], "did you mean AdamW"),
        (
            "schedule interleaved_1f1b --stages 4 --microbatches 8 --option chunk=2".split(),
            "did you mean chunks?",
        ),
        (["schedule", "1f1b", "--stages", "two"], "as an integer; see merak schedule --help."),
        (["train", "--model", "X"], "its recipe has model.name; write `merak train RECIPE model."),
        (["train", "gpt2", "--dp", "2"], "write `merak train RECIPE parallel.dp=…`."),
        (["train", "gpt2", "--learning-rate", "1"], "train RECIPE arguments.learning_rate=…`."),
        (["train", "--recipe", "gpt2"], "train takes RECIPE without --recipe; see merak train"),
        (["train", "gpt2", "--resum"], "no option --resum; did you mean --resume? See merak"),
        (["export", "--model", "X"], "no option --model. See merak export --help."),
    ],
)
def test_stumbles_of_the_first_hour(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_what_a_config_refuses_is_located_and_said_with_all_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = "model:\n  name: GPT2LMHeadModel\n  config:\n    n_heads: 3\n    n_embd: 8\n"
    text += "data:\n  source: standard-library\n"
    recipe.write_text(f"{text}arguments:\n  max_step: 3\n", encoding="utf-8")
    words = [f"arguments.output_dir={tmp_path}/run"]
    assert main(["train", str(recipe), *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"merak: {recipe}:9:3: arguments has no field 'max_step'")
    assert lines[1].startswith(f"merak: {recipe}:4:5: GPT2Config has no field 'n_heads'")
    recipe.write_text(text.replace("n_heads", "n_head"), encoding="utf-8")
    assert main(["train", str(recipe), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"merak: {recipe}:3:3: GPT2LMHeadModel cannot be built") and (
        "under model.config of a recipe" in line
    )


@pytest.mark.parametrize("words", [[], ["launch"]])
def test_a_page_of_help_ends_as_it_does(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert not capsys.readouterr().err.rstrip().endswith("--help.")


def test_a_recipe_in_the_folder_is_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {}\n", encoding="utf-8")
    assert main(["train", str(tmp_path / "recipe.yml")]) == 2
    assert f"did you mean {tmp_path}/recipe.yaml?" in capsys.readouterr().err


def test_all_that_is_wrong_with_a_cluster_file_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n  - devize: h100\n    devices_per_node: 8\n"
        "  - device: h100x\n    devices_per_node: 2\n  - {device: h100, lnk: x}\n",
        encoding="utf-8",
    )
    with pytest.raises(PlanError) as caught:
        parse_cluster(str(file))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4, lines
    assert ":2:5: nodes[0] has no field 'devize'; did you mean device" in lines[0]
    assert any("nodes[1].device is 'h100x'" in line for line in lines)
    assert any("nodes[2] has no field 'devices_per_node'" in line for line in lines)


@pytest.mark.parametrize("command", ["check", "plan", "memory", "trace", "rehearse"])
def test_a_model_needs_no_flag(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "missing.yaml"
    cluster = ["--cluster", "h100:8"] if command in ("plan", "rehearse") else []
    rank = ["--rank", "0"] if command == "rehearse" else []
    words = [command, *cluster, *rank, str(folder)]
    assert main(words) == 2
    without = capsys.readouterr().err
    assert main([*words[:-1], "--model", str(folder)]) == 2
    assert without == capsys.readouterr().err and str(folder) in without
    assert main([*words, "more"]) == 2
    assert "Got an unexpected extra argument 'more'" in capsys.readouterr().err


def test_an_option_is_suggested_by_a_word_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "recipe:gpt2", "--cluster", "h100:8", "--parallel"]) == 2
    assert "no option --parallel; did you mean --sequence-parallel?" in capsys.readouterr().err


def test_planning_the_recipe_of_init_warns_of_nothing(
    tmp_path: Path,
) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    job = planned_job(str(tmp_path / "mine" / "recipe.yaml"))
    assert job is not None
    config = model_of(job.model).config
    assert config.vocab_size > max(config.bos_token_id, config.eos_token_id)
