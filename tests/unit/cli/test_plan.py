"""`merak plan`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from merak.arguments.planned import planned_arguments
from merak.cli.main import main
from merak.cli.plan.page import frontier_svg, memory_svg
from merak.cli.plan.plan import Started, commands, started_by
from merak.cli.plan.report import row_of
from merak.cli.plan.request import PlanRequest
from merak.cli.recipe.planned_job import planned_job
from merak.plan.cluster.parse import parse_cluster
from merak.plan.price.candidate import Candidate
from merak.plan.price.price import Price
from merak.plan.search.pinned import Pinned
from merak.plan.search.plan_file import PlanFile, read_plan
from tests.tiers import one_in

TINY = (
    '{"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16, '
    '"bos_token_id": 0, "eos_token_id": 0}'
)
MODEL = ["plan", "--model", "GPT2LMHeadModel", "--config", TINY, "--seq", "8"]
JOB = [*MODEL, "--cluster", "h100:2", "--global-batch", "4", "--microbatch", "1"]
SMALL = [*JOB, "--recompute", "off", "--zero", "0"]


def test_the_report_has_the_fields_of_the_contract(capsys, tmp_path):
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    words = ["--pp", "2", "--schedule", "1f1b", "--output", str(plan), "--page", str(page)]
    assert main([*SMALL, *words, "--price-per-device-hour", "2", "--what-if", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    report = json.loads(captured.out)
    (row,) = report["plans"]
    assert (row["dp"], row["tp"], row["pp"], row["ep"], row["cp"]) == (1, 1, 2, 1, 1)
    assert (row["microbatch"], row["schedule"], row["recompute"]) == (1, "1f1b", "off")
    assert row["zero"] == 0 and row["fits"] and len(row["peak_memory_bytes"]) == 2
    assert set(row["seconds"]) == {"compute", "bubble", "exposed_communication", "optimizer"}
    assert sum(row["seconds"].values()) == pytest.approx(row["step_seconds"])
    assert row["dollars_per_step"] == pytest.approx(2 * 2 * row["step_seconds"] / 3600)
    assert 0 < row["mfu"] < 1 and 0 <= row["bubble_fraction"] < 1 and row["uncertainty"] > 0
    assert all(set(own) >= {"what", "why"} for own in report["rejected"])
    assert [own["what"] for own in report["what_if"]] == [
        "twice the devices",
        "half the devices",
        "half the network",
        "twice the batch",
    ]
    assert report["commands"] == [f"torchrun --nproc-per-node 2 train.py --plan {plan}"]
    assert json.loads(plan.read_text())["world_size"] == 2
    drawn = page.read_text()
    assert 'name="viewport"' in drawn and "prefers-color-scheme:dark" in drawn
    assert drawn.count("<svg") == 3 and "http" not in drawn.replace("http://www.w3.org/", "")


def price_of(step_s: float, peak: int, most: float = 100.0) -> Price:
    return Price(
        candidate=Candidate(), step_s=step_s, compute_s=step_s, bubble_s=0.0,
        exposed_communication_s=0.0, optimizer_s=0.0, peak_memory_bytes=(peak,),
        device_bytes=(most,), model_flops=1.0, tokens=1, uncertainty=0.1,
        memory_uncertainty=0.1, bubble_fraction=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "teraflops"), [("h100", 989), ("a100", 312), ("rtx-4090", 165.2)]
)
def test_mfu_is_of_the_peak_that_the_data_sheet_prints(device, teraflops):
    cluster = parse_cluster(f"{device}:2")
    price = replace(price_of(2.0, 90), candidate=Candidate(dp=2), model_flops=2e12 * teraflops)
    assert row_of(price, cluster, torch.bfloat16, None).mfu == pytest.approx(0.5)


def test_the_frontier_joins_the_plans_that_no_other_beats_in_both():
    """The fastest, and slower ones that take less; one that takes more, or too much, is not."""
    fast, small, worse, large = (
        price_of(1.0, 90), price_of(2.0, 40), price_of(3.0, 60), price_of(0.5, 120),
    )  # fmt: skip
    drawn = frontier_svg([small, large, worse, fast])
    places = dict(re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn))
    assert len(places) == 4 and drawn.count("--bad") == 1
    (joined,) = re.findall(r'points="([^"]*)"', drawn)
    across = sorted(map(float, places))  # large, fast, small, worse
    assert [float(p.split(",")[0]) for p in joined.split()] == across[1:3]
    assert across[0] > 90 and across[-1] < 900  # within the axes
    assert frontier_svg([fast]).count("<circle") == 1


def test_a_bar_of_memory_says_how_much_of_the_device_it_takes():
    assert "90 B of 100 B" in memory_svg(price_of(1.0, 90))
    assert memory_svg(price_of(1.0, 120)).count("--bad") == 1
    assert ">90 B<" in memory_svg(price_of(1.0, 90, float("inf")))
    # Behind a bar that is too short for it, and in the page's own colour.
    assert 'class="on">90 B' in memory_svg(price_of(1.0, 90))
    assert 'class="on"' not in memory_svg(price_of(1.0, 3))


def test_sums_in_the_own_type_take_half_the_memory_and_are_in_the_plan(capsys, tmp_path):
    peaks = {}
    for sums in ("float32", "own"):
        plan = tmp_path / f"{sums}.json"
        words = ["--pp", "1", "--dp", "2", "--sub-pipelining", "off", "--dtype", "bfloat16"]
        words += ["--schedule", "1f1b", "--gradient-sums", sums, "--output", str(plan), "--json"]
        assert main([*SMALL, *words]) == 0
        (row,) = json.loads(capsys.readouterr().out)["plans"]
        (peaks[sums],) = row["peak_memory_bytes"]
        assert read_plan(plan).common["gradient_sums"] == sums
        assert planned_arguments(read_plan(plan))["gradient_sums"] == sums
    assert peaks["own"] < peaks["float32"]


def test_compressed_gradients_are_in_the_plan_without_zero(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    words = ["--pp", "1", "--dp", "2", "--sub-pipelining", "off", "--schedule", "1f1b"]
    words += ["--gradient-compression", "powersgd", "--output", str(plan), "--json"]
    assert main([*SMALL, *words]) == 0
    assert all(row["zero"] == 0 for row in json.loads(capsys.readouterr().out)["plans"])
    assert planned_arguments(read_plan(plan))["gradient_compression"] == "powersgd"
    assert main([*SMALL, "--gradient-compression", "zip"]) != 0
    assert "use off, fp16, bf16, powersgd, 1bit, topk, dgc or auto" in capsys.readouterr().err


def test_people_get_a_ranking_with_reasons_in_80_columns(capsys):
    job = [*SMALL, "--no-sequence-parallel", "--sub-pipelining", "off"]
    assert main(job) == 0
    short = capsys.readouterr().out
    assert "left out:" not in short and "--explain says why" in short
    assert main([*job, "--explain"]) == 0
    page = capsys.readouterr().out
    assert "GPT2LMHeadModel on h100:2 (2 devices), 4 samples of 8 tokens a step" in page
    assert "left out:" in page and "torchrun --nproc-per-node 2" in page
    assert max(map(len, page.splitlines())) <= 80
    for heading in ("microbatches", "schedule", "recompute", "bubble", "comm.", "MFU", "memory"):
        assert page.count(f" {heading}") >= 1


def test_one_pp_rank_has_no_bubble(capsys):
    words = ["--dp", "2", "--tp", "1", "--pp", "1", "--json"]
    assert main([*SMALL, *words]) == 0
    (row,) = json.loads(capsys.readouterr().out)["plans"]
    assert row["bubble_fraction"] == 0.0 and row["seconds"]["bubble"] == pytest.approx(0.0)
    assert row["seconds"]["exposed_communication"] > 0  # which was counted as a bubble


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dp", "3"], "dp=3 takes 3 devices, but the cluster has 2"),
        (["--microbatch", "3"], "microbatch=3 does not divide the global batch of 4 samples; use"),
        (["--tp", "1", "--pp", "1", "--global-batch", "3"], "dp=2, which tp=1 × pp=1 leaves of 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_before_the_model_is_built(capsys, words, sentence):
    assert main([*JOB, "--model", "NoSuchModel", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--output", "--page"])
def test_a_folder_that_is_not_there_is_refused_before_planning(capsys, tmp_path, flag):
    file = tmp_path / "missing" / "plan"
    assert main([*SMALL, "--model", "NoSuchModel", flag, str(file)]) == 2
    assert f"{flag} {file}: there is no folder" in capsys.readouterr().err


def test_pinned_choices_are_named_also_where_they_switch_something_off():
    assert str(Pinned()) == ""
    assert str(Pinned(dp=2, zero=0, sequence_parallel=False)) == (
        "dp=2, zero=0, sequence_parallel=False"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dp", "4"], "dp=4 takes 4 devices, but the cluster has 2; use smaller degrees"),
        (["--ep", "2"], "ep=2 finds no experts to split: no stack of weights is read by grouped"),
        (["--option", "chunks=4"], "--option chunks=4 is of a schedule; name --schedule too."),
        (["--zero", "4"], "--zero 4 is not a choice; use 0, 1, 2 or 3."),
        (["--partition", "a"], "--partition a is no list of whole numbers"),
        (["--top", "0"], "--top 0 is too few; use 1 or more."),
        (["--dp", "0"], "--dp 0 is too few; use 1 or more."),
        (["--schedule", "nope"], "There is no schedule 'nope'; choose one of: gpipe"),
        (["--schedule", "1f1b", "--option", "chunk=4"], "--option chunk is unknown to 1f1b"),
        (["--recompute", "foo"], "recompute='foo' is no choice of what to recompute"),
        (["--dtype", "int8"], "--dtype int8 is no type of parameters"),
        (["--sub-pipelining", "yes"], "--sub-pipelining yes is not a choice; use auto, on or off."),
        (
            ["--gradient-sums", "half"],
            "--gradient-sums half is not a choice; use float32 or own.",
        ),
        (["--price-per-device-hour", "nan"], "nan is no price; use 0 or more."),
    ],
)
def test_bad_input_is_one_sentence(capsys, words, sentence):
    assert main([*JOB, *words]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and not captured.out


def test_a_model_that_fits_nowhere_names_a_cluster_that_would_do(capsys, monkeypatch):
    def usable(cluster, *_):
        return 1.0 if cluster.num_devices < 4 else 1e12

    monkeypatch.setattr("merak.plan.search.bounds.JobPricing.state_bytes", lambda *_: 2.0)
    monkeypatch.setattr(
        "merak.plan.search.bounds.JobPricing.device_bytes",
        property(lambda own: usable(own.cluster)),
    )
    assert main([*SMALL, "--schedule", "1f1b"]) == 2
    error = capsys.readouterr().err
    assert "fits nowhere on h100:2 with microbatch=1" in error
    assert "the smallest of 2, 4, 8, … times as many that would do has 4 devices" in error


IMAGES = [
    *("plan", "--model", "ViTForImageClassification", "--config"),
    '{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, '
    '"image_size": 32}',
    *("--cluster", "h100:1", "--global-batch", "1", "--recompute", "off", "--zero", "0"),
]


def test_images_have_no_sequence(capsys, caplog):
    assert main([*IMAGES, "--seq", "9"]) == 0
    page = capsys.readouterr().out
    assert "h100:1 (1 device), 1 sample a step" in " ".join(page.split())
    assert "samples/s/dev." in page and "token" not in page
    assert "--seq 9 changes nothing: the batches of ViTForImageClassification" in caplog.text


def test_a_model_of_sequences_needs_their_length(capsys):
    words = ["plan", *JOB[1:], "--cluster", "h100:1"]
    words = [word for word in words if word not in ("--seq", "8")]
    assert main(words) == 2
    assert "depends on the tokens of a sequence; add --seq, such as --seq 16" in (
        capsys.readouterr().err  # the positions that it has
    )


@one_in(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sequence-parallel"], "times as many that would do has"),
        (["--sub-pipelining", "on"], "times as many that would do has"),
        (["--sequence-parallel", "--dp", "1", "--pp", "1"], "no number of such devices would do"),
    ],
)
def test_the_smallest_cluster_is_named_also_where_tp_is_pinned_to_a_way(
    capsys, tmp_path, words, said
):
    cluster = tmp_path / "small.yaml"
    cluster.write_text(
        "nodes:\n  - device: {name: small, teraflops: {float32: 20}, memory_gigabytes: 2.75, "
        "memory_gigabytes_per_s: 1000, host_gigabytes_per_s: 32}\n    devices_per_node: 2\n"
        "    link: pcie4-host\n    network: ethernet-10\n    adapters: 1\n"
    )
    wide = '{"n_layer": 4, "n_embd": 2048, "n_head": 16, "vocab_size": 100, "n_positions": 16}'
    job = ["plan", "--model", "GPT2LMHeadModel", "--config", wide, "--seq", "8"]
    pinned = ["--tp", "2", "--microbatch", "2", "--recompute", "full"]
    pinned += ["--offload-optimizer", "off"]
    assert main([*job, "--cluster", str(cluster), "--global-batch", "4", *pinned, *words]) == 2
    assert said in capsys.readouterr().err


def test_notes_name_what_is_whole_and_what_is_slow(capsys):
    config = (
        '{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, '
        '"num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 64}'
    )
    words = ["--model", "LlamaForCausalLM", "--config", config, "--cluster", "v100:4"]
    pins = ["--tp", "4", "--no-sequence-parallel", "--autocast", "bfloat16", "--json"]
    assert main([*SMALL, *words, *pins]) == 0
    whole, slow = json.loads(capsys.readouterr().out)["notes"]
    assert whole.startswith("tp=4 does not divide the outputs of k_proj.weight and v_proj.weight")
    assert "(3 pieces): every rank holds and computes them whole" in whole
    assert whole.endswith("no tp above 1 would divide all")
    assert slow == "v100 multiplies bfloat16 as slowly as float32; float16 is faster there"


MEET = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
STATIC = "--master-addr HOST --master-port 29500 train.py --plan plan.json"


@pytest.mark.parametrize(
    ("cluster", "ranks", "expected"),
    [
        ("h100:8", 8, ["--nproc-per-node 8 train.py --plan plan.json"]),
        ("h100:8x4", 32, [f"--nnodes 4 --nproc-per-node 8 {MEET} train.py --plan plan.json"]),
        ("h100:8x4", 16, [f"--nnodes 2 --nproc-per-node 8 {MEET} train.py --plan plan.json"]),
        (
            "h100:8x4",
            12,
            [
                f"--nnodes 2 --node-rank 0 --nproc-per-node 8 {STATIC}  # h100-sxm",
                f"--nnodes 2 --node-rank 1 --nproc-per-node 4 {STATIC}  # h100-sxm",
            ],
        ),
        (
            "h100:8x2+l40s:4x3",
            28,
            [
                f"--nnodes 5 --node-rank {{0..1}} --nproc-per-node 8 {STATIC}  # h100-sxm",
                f"--nnodes 5 --node-rank {{2..4}} --nproc-per-node 4 {STATIC}  # l40s",
            ],
        ),
    ],
)
def test_commands_start_every_rank_where_it_was_planned(cluster, ranks, expected):
    found = commands(parse_cluster(cluster), ranks, Started("train.py --plan plan.json"))
    assert found == [f"torchrun {own}" for own in expected]


def test_a_recipe_is_started_with_its_changes_and_the_plan():
    changes = ["model.name=my model", "parallel.pp=2"]
    request = PlanRequest(model="recipe:sft", settings=changes, cluster="h100:8")
    job = planned_job("recipe:sft", changes)
    own = job.recipe.arguments
    same = PlanFile({}, Candidate(
        microbatch=own["per_device_train_batch_size"],
        num_microbatches=own["gradient_accumulation_steps"],
    ), {}, autocast="bfloat16", common={"master_weights": True})  # fmt: skip
    started = started_by(request, job, same)
    (one,) = commands(parse_cluster("h100:8"), 8, started)
    begin = (
        "merak train recipe:sft 'model.name=my model' parallel.pp=2 plan=plan.json parallel=null"
    )
    assert one == f"{begin} arguments.bf16=true"  # which is auto there
    other = replace(same, candidate=replace(same.candidate, microbatch=64, num_microbatches=3))
    changed = "arguments.per_device_train_batch_size=64 arguments.gradient_accumulation_steps=3"
    assert changed in str(started_by(request, job, other).on_one_host)
    (several,) = commands(parse_cluster("h100:8x4"), 32, started)
    assert several.endswith(f":29500 -m merak.cli.main {one.removeprefix('merak ')}")
    request = PlanRequest(model="recipe:llama", cluster="h100:8", output=Path("eight.json"))
    started = started_by(request, planned_job("recipe:llama"), same)
    assert str(started.on_one_host).startswith(
        "merak train recipe:llama plan=eight.json arguments."
    )


def test_plans_are_priced_in_the_precision_of_the_config(capsys, tmp_path):
    """And say so; words of the command line count more."""
    config = {**json.loads(TINY), "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    job = ["plan", "--model", str(tmp_path), "--seq", "8", "--cluster", "h100", "--global-batch"]
    job += ["1", "--recompute", "off"]
    peaks = {}
    for words, said in (
        ([], "parameters in bfloat16 (the model's config), no autocast"),
        (["--dtype", "fp32"], "parameters in float32 (--dtype), no autocast"),
        (["--autocast", "BF16"], "parameters in bfloat16 (the model's config), autocast to"),
    ):
        assert main([*job, *words, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["precision"].startswith(said)
        peaks[said] = report["plans"][0]["peak_memory_bytes"][0]
    low, full, _ = peaks.values()
    assert low < 0.7 * full


def test_plans_are_priced_in_the_precision_of_the_recipe(capsys, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"""
model: {{name: GPT2LMHeadModel, config: {TINY}, dtype: bf16}}
data: {{sequence: 8}}
arguments: {{output_dir: {tmp_path}, bf16: auto, per_device_train_batch_size: 1}}
""")
    words = ["plan", "--model", str(recipe), "--recompute", "off", "--microbatch", "1"]
    words += ["--set", "data.tokenizer=nowhere", "--global-batch", "1", "--json"]
    for cluster, autocast in (("h100", "autocast to bfloat16 (the recipe)"), ("t4", "no autocast")):
        assert main([*words, "--cluster", cluster]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["precision"] == f"parameters in bfloat16 (the recipe), {autocast}"


@pytest.mark.parametrize("name", ["shifted_critical_path", "chimera"])
def test_layouts_that_a_schedule_has_not_are_rejected_candidates(capsys, name):
    """`--schedule` alone is no error: pp=1 is left out, and pp=2 is planned."""
    assert main([*SMALL, "--schedule", name, "--tp", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["pp"] for row in report["plans"]} == {2}
    assert f"{name}, pp=1" in {own["what"] for own in report["rejected"]}
    assert main([*SMALL, "--schedule", name, "--pp", "1"]) == 2
    assert "got 1" in capsys.readouterr().err
