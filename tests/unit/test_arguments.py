"""Training arguments: every field decided, refusals in words, and one process per rank."""

import dataclasses
import inspect
import io
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from transformers import (
    HfArgumentParser,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
)
from transformers.debug_utils import DebugOption
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames, ParallelMode

import merak
from merak.arguments import (
    MerakArguments,
    MerakSeq2SeqArguments,
    check_arguments,
    fields,
    rules,
    single_process_accelerate,
)
from merak.arguments.former import ARGUMENTS, TRAINER
from merak.arguments.optimizers import OPTIMIZERS
from merak.arguments.page import render
from merak.arguments.rules import Layout, Policy
from merak.arguments.table import ACCELERATOR, RULES, SECTIONS, SEQ2SEQ
from merak.core import mesh as meshes
from merak.core.errors import ArgumentsError, MeshError, ShardError
from merak.core.start import unused_mesh
from merak.graph.ir.torch_compiler import Compilation
from merak.graph.tensor_parallel.features import Column, Row, parse_features

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"

SOME_VALUES: dict[str, object] = {
    "activation_checkpointing_kwargs": {"every_n_layers": 2},
    "liger_kernel_config": {"rope": True},
    "optim_target_modules": ["attn"],
    "train_sampling_strategy": "batch_rebalance",
    "ddp_backend": "gloo",
    "ddp_timeout": 60,
    "fsdp_config": {"version": 2},
    "deepspeed": "ds_config.json",
    "parallelism_config": {"tp_size": 2},
    "dataloader_in_order": False,
}
"""A value that is not the default, for refused fields that are not plain switches."""


@pytest.fixture
def job() -> Iterator[Callable[..., None]]:
    """Say what the mesh is, as this process sees it."""

    def stand(dp: int = 1, tp: int = 1, pp: int = 1, rank: int = 0) -> None:
        meshes.reset()
        meshes.set_mesh(meshes.Mesh(dp, tp, pp, rank, torch.device("cpu"), None))

    stand()
    yield stand
    meshes.reset()


def arguments(**settings: object) -> MerakArguments:
    return MerakArguments(output_dir="unused", **settings)  # type: ignore[arg-type]


def test_every_field_of_transformers_is_decided() -> None:
    undecided = {field.name for field in dataclasses.fields(TrainingArguments)} - set(RULES)
    assert not undecided
    assert len(RULES) == sum(len(section) for section in SECTIONS.values())


def test_every_optimizer_and_accelerator_option_is_decided() -> None:
    assert {name.value for name in OptimizerNames} <= set(OPTIMIZERS)
    assert {field.name for field in dataclasses.fields(AcceleratorConfig)} <= set(ACCELERATOR)


def test_arguments_of_sequence_to_sequence_are_decided_too(job: Callable[..., None]) -> None:
    added = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert added - {field.name for field in dataclasses.fields(TrainingArguments)} == set(SEQ2SEQ)
    job(pp=2)
    made = MerakSeq2SeqArguments(
        output_dir="unused", predict_with_generate=True, generation_num_beams=2
    )
    assert made.predict_with_generate
    with pytest.raises(ArgumentsError, match="fp16_full_eval=True cannot be honoured"):
        MerakSeq2SeqArguments(output_dir="unused", fp16_full_eval=True)


def test_compilation_is_as_asked_for(job: Callable[..., None]) -> None:
    assert arguments().compilation is None
    assert arguments(torch_compile=True).compilation == Compilation("inductor")
    made = arguments(torch_compile_mode="max-autotune")
    assert made.compilation == Compilation("inductor", "max-autotune")
    assert arguments(torch_compile_backend="aot_eager").compilation == Compilation("aot_eager")
    for settings, message in [
        ({"torch_compile_backend": "none"}, "torch_compile_backend='none' is not a choice; use"),
        ({"torch_compile_mode": "fast"}, "torch_compile_mode='fast' is not a choice; use"),
        (
            {"torch_compile_backend": "aot_eager", "torch_compile_mode": "default"},
            "torch_compile_mode='default' is of the backend 'inductor'",
        ),
    ]:
        with pytest.raises(ArgumentsError, match=message):
            arguments(**settings)


def test_documentation_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m merak.arguments.page"


# Of the rules, those of fields that this transformers has: an older one lacks the newest.
FIELDS = {field.name for field in dataclasses.fields(MerakArguments)}
REFUSED = [n for n, rule in RULES.items() if rule.policy is Policy.REFUSED and n in FIELDS]


@pytest.mark.parametrize("name", [n for n in REFUSED if RULES[n].layout is Layout.ANY])
def test_refuses_by_name_value_and_advice(name: str, job: Callable[..., None]) -> None:
    value = SOME_VALUES.get(name, True)
    with pytest.raises(ArgumentsError) as caught:
        arguments(**{name: value})
    assert str(caught.value) == f"{name}={value!r} cannot be honoured: {RULES[name].sentence}."


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        ("ddp_broadcast_buffers", "dp"),
        ("dataloader_in_order", "pp"),
    ],
)
def test_refuses_only_where_it_matters(name: str, degree: str, job: Callable[..., None]) -> None:
    value = SOME_VALUES.get(name, True)
    assert getattr(arguments(**{name: value}), name) == value
    job(**{degree: 2})
    with pytest.raises(ArgumentsError, match=f"^{name}={value} cannot be honoured with "):
        arguments(**{name: value})


CHECKPOINTING = [
    name
    for name in ("gradient_checkpointing", "activation_checkpointing")
    if name in {field.name for field in dataclasses.fields(TrainingArguments)}
]
"""Of these, transformers has the first alone in older versions."""


def test_checkpointing_of_modules_means_recomputation(job: Callable[..., None]) -> None:
    taken = arguments(gradient_checkpointing=True)
    assert (taken.recompute, taken.gradient_checkpointing) == ("full", False)
    assert arguments(gradient_checkpointing=True, recompute="selective").recompute == "selective"
    assert arguments().recompute != "full"


@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("given", [{"use_reentrant": False}, '{"use_reentrant": true}'])
def test_keywords_of_torchs_checkpoint_have_no_effect(
    kind: str, given: object, job: Callable[..., None]
) -> None:
    assert arguments(**{kind: True, f"{kind}_kwargs": given}).recompute == "full"
    assert arguments(**{f"{kind}_kwargs": given}).recompute == arguments().recompute


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_kwargs`:FutureWarning")
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("rest", [{"every_n_layers": 2}, {"offload": True}, {"own": 1}])
def test_other_requests_of_checkpointing_are_refused(
    kind: str, rest: dict[str, object], job: Callable[..., None]
) -> None:
    with pytest.raises(ArgumentsError, match=re.escape(f"{rest} cannot be honoured")):
        arguments(**{kind: True, f"{kind}_kwargs": {"use_reentrant": False, **rest}})


@dataclasses.dataclass
class OwnArguments(TrainingArguments):
    """Arguments of a script's own, with another default and a field without a shared one."""

    learning_rate: float = 1e-3
    tags: list[str] = dataclasses.field(default_factory=lambda: ["own"])

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.num_tags = len(self.tags)


@pytest.mark.parametrize("is_decorated", [True, False])
@pytest.mark.parametrize("is_annotated", [True, False])
@pytest.mark.parametrize("bases", [(MerakArguments, OwnArguments), (OwnArguments, MerakArguments)])
def test_a_class_of_two_kinds_of_arguments_has_the_fields_of_both(
    bases: tuple[type, ...], is_annotated: bool, is_decorated: bool, job: Callable[..., None]
) -> None:
    body = {"__annotations__": {"more": int}, "more": 1} if is_annotated else {}
    both: Any = type("Both", bases, body)
    both = dataclasses.dataclass(both) if is_decorated else both
    given = {"output_dir": "unused", "report_to": "none", "zero": 1}
    made = both(**given, tags=["a", "b"])
    assert (made.learning_rate, made.tags, made.num_tags, made.zero) == (1e-3, ["a", "b"], 2, 1)
    assert both(**given).tags == ["own"]
    assert both(**given).per_device_train_batch_size is fields.LEFT_OUT
    if is_decorated or not is_annotated:  # else the parser sees those of one base, as of any class
        (parsed,) = HfArgumentParser(both).parse_args_into_dataclasses(["--tags", "a"])
        assert (parsed.tags, parsed.learning_rate) == (["a"], 1e-3)


def test_a_look_for_overflows_locates_them(job: Callable[..., None]) -> None:
    taken = arguments(debug="underflow_overflow")
    assert taken.locate_nan and taken.debug == [DebugOption.UNDERFLOW_OVERFLOW]
    assert not arguments(debug="underflow_overflow", locate_nan=False).locate_nan
    assert not arguments().locate_nan


def test_use_cpu_needs_a_mesh_on_the_cpu(job: Callable[..., None]) -> None:
    assert arguments(use_cpu=True).device == torch.device("cpu")
    args = arguments(use_cpu=True)
    meshes.reset()
    meshes.set_mesh(meshes.Mesh(1, 1, 1, 0, torch.device("meta"), None))
    with pytest.raises(ArgumentsError, match=r"use_cpu=True .* merak.init\(device='cpu'\)"):
        check_arguments(args)


def test_defaults_of_the_installed_transformers_are_accepted(job: Callable[..., None]) -> None:
    job(dp=2, tp=2, pp=2)
    args = arguments()
    rebuilt = dataclasses.replace(args)
    assert rebuilt.to_dict() == args.to_dict()
    assert MerakArguments(**args.to_dict()).to_dict() == args.to_dict()


def test_fields_that_the_table_does_not_know(
    job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass(repr=False)
    class Newer(MerakArguments):
        shiny: int = 3

    assert Newer(output_dir="unused", shiny=4).shiny == 4  # of a class of the user's own
    monkeypatch.setattr(rules, "Seq2SeqTrainingArguments", Newer)  # a newer transformers has it
    assert Newer(output_dir="unused").shiny == 3
    with pytest.raises(ArgumentsError, match="shiny=4 cannot be honoured: this version of Merak"):
        Newer(output_dir="unused", shiny=4)


@pytest.mark.parametrize("name", ["adafactor", "stable_adamw"])
def test_optimizers_that_get_whole_parameters(name: str, job: Callable[..., None]) -> None:
    job(dp=2, tp=2)
    arguments(optim=name, zero=1)


@pytest.mark.parametrize("name", ["adamw_torch_4bit", "adamw_torch_8bit"])
def test_optimizers_over_whole_parameters_need_tp_1(name: str, job: Callable[..., None]) -> None:
    job(dp=2, pp=2)
    arguments(optim=name)
    job(tp=2)
    with pytest.raises(ArgumentsError, match=f"optim='{name}' cannot be honoured with tp > 1: "):
        arguments(optim=name)


@pytest.mark.parametrize("name", ["lomo", "galore_adamw", "grokadamw", "adamw_bnb_8bit"])
def test_optimizers_that_look_for_modules_are_refused(name: str, job: Callable[..., None]) -> None:
    with pytest.raises(ArgumentsError, match=f"optim='{name}' cannot be honoured: "):
        arguments(optim=name)


def test_arguments_changed_later_are_checked_again(job: Callable[..., None]) -> None:
    args = arguments()
    args.set_optimizer("adamw_torch_8bit")
    job(tp=2)
    with pytest.raises(ArgumentsError, match="optim='adamw_torch_8bit'"):
        check_arguments(args)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"split_batches": True}, "accelerator_config.split_batches=True cannot be honoured"),
        ({"dispatch_batches": True}, "accelerator_config.dispatch_batches=True"),
        ('{"use_configured_state": true}', "accelerator_config.use_configured_state=True"),
    ],
)
def test_accelerator_options(config: object, said: str, job: Callable[..., None]) -> None:
    arguments(accelerator_config=config)  # which change nothing in one process
    job(dp=2)
    with pytest.raises(ArgumentsError, match=said):
        arguments(accelerator_config=config)
    arguments(accelerator_config={"non_blocking": True, "even_batches": False})


def test_a_state_that_is_to_be_kept_has_to_be_there(job: Callable[..., None]) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ArgumentsError, match="there is none; make an Accelerator or a PartialStat"):
        arguments(accelerator_config={"use_configured_state": True})


def test_errors_of_transformers_are_caught_by_their_types(job: Callable[..., None]) -> None:
    with pytest.raises(NotImplementedError, match="do not go together: Tried passing") as found:
        arguments(accelerator_config=AcceleratorConfig)
    assert isinstance(found.value, ArgumentsError)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"profile_steps": "5-3"}, "profile_steps='5-3' is no range of steps; use '3-5' for"),
        ({"nan_policy": "pray"}, "nan_policy='pray' is not a choice; use 'stop' or 'skip'"),
        ({"tied_gradients": "never"}, "use 'microbatch' or 'step'"),
        ({"bucket_bytes": 0}, "bucket_bytes=0 is not a size"),
        ({"max_skipped_steps": -1}, "max_skipped_steps=-1 is no number of steps; use 0 or more"),
        ({"hang_limit_s": 0.0}, "hang_limit_s=0.0 is not a time to wait; use a number of seconds"),
        ({"hang_limit_s": float("nan")}, "hang_limit_s=nan is not a time to wait"),
        ({"max_shapes": 0}, "max_shapes=0 is no number of shapes to keep; use 1 or more"),
        ({"bucket_bytes": 7, "ddp_bucket_cap_mb": 1}, "contradict each other"),
        ({"partition": [3, 0]}, r"partition=\[3, 0\] has an empty stage"),
        ({"partition": [3, 4, 5]}, "names 3 stages, which cannot be laid out over pp=2"),
        ({"segment_times": "nowhere.json"}, "segment_times='nowhere.json' is not a file"),
        (
            {"feature_dict": "nowhere.json"},
            "feature_dict='nowhere.json' cannot be read \\(No such file",
        ),
    ],
)
def test_own_fields_are_checked(
    settings: dict[str, object], said: str, job: Callable[..., None]
) -> None:
    job(pp=2)
    with pytest.raises(ArgumentsError, match=said):
        arguments(**settings)


def test_own_fields_are_settled(
    job: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = tmp_path / "features.json"
    features.write_text(json.dumps({"mlp.up": "column"}), encoding="utf-8")
    monkeypatch.setenv("MERAK_CACHE", str(tmp_path))
    args = arguments(feature_dict=str(features), ddp_bucket_cap_mb=3)
    assert args.feature_dict == {"mlp.up": "column"}
    assert args.bucket_bytes == 3 * 2**20
    assert args.trace_cache == str(tmp_path)
    for word in ("off", ""):
        monkeypatch.setenv("MERAK_CACHE", word)
        assert arguments().trace_cache == ""
    monkeypatch.delenv("MERAK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert arguments().trace_cache == "/caches/merak"
    assert arguments(trace_cache="").trace_cache == ""
    assert arguments().bucket_bytes == 25 * 2**20
    assert not arguments().dataloader_pin_memory


def test_command_line(job: Callable[..., None]) -> None:
    job(pp=2)
    words = "--output_dir unused --partition 3 4 --schedule gpipe --nan_policy skip"
    words += " --bucket_bytes 1024 --gradient_accumulation_steps 4"
    split = [*words.split(), "--feature_dict", '{"mlp.up": "column"}']
    (args,) = HfArgumentParser(MerakArguments).parse_args_into_dataclasses(split)  # type: ignore[arg-type]
    assert (args.partition, args.schedule, args.nan_policy) == ([3, 4], "gpipe", "skip")
    assert (args.bucket_bytes, args.feature_dict) == (1024, {"mlp.up": "column"})


def test_travels_and_keeps_secrets(job: Callable[..., None]) -> None:
    args = arguments(hub_token="hf_secret", partition=[3])
    stored = io.BytesIO()
    torch.save(args, stored)
    stored.seek(0)
    assert torch.load(stored, weights_only=False).to_dict() == args.to_dict()
    assert json.loads(args.to_json_string())["partition"] == [3]
    assert "hf_secret" not in repr(args) + str(args) + args.to_json_string()


def test_feature_dict_of_objects(job: Callable[..., None]) -> None:
    features = {"attn.qkv": Column(parts=(1, 1, 1)), "up": Column(), "down": Row(), "norm": "row"}
    args = arguments(feature_dict=features)
    assert args.feature_dict == features
    written = json.loads(args.to_json_string())["feature_dict"]
    assert written["attn.qkv"] == {"column": [1, 1, 1]}
    assert parse_features(written) == parse_features(features)
    with pytest.raises(ShardError, match="gives 'up' the attribute 'colum'; write 'column'"):
        arguments(feature_dict={"up": "colum"})


def test_needs_init() -> None:
    meshes.reset()
    with pytest.raises(MeshError, match=r"merak\.init has not been called"):
        arguments()


class AloneTrainer(Trainer):
    """A trainer whose Accelerate is built as Merak's trainer builds it."""

    def create_accelerator_and_postprocess(self) -> None:
        with single_process_accelerate():
            super().create_accelerator_and_postprocess()


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that torchrun sets on the third of four ranks."""
    variables = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "ACCELERATE_TORCH_DEVICE": "meta"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return variables


def test_each_rank_believes_it_is_alone(
    job: Callable[..., None],
    torchrun: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job(dp=2, pp=2, rank=2)
    monkeypatch.setattr(unused_mesh, "_refuse", lambda trainer: None)  # it stands for Merak's own
    args = MerakArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=5,
    )
    model = torch.nn.Linear(2, 2)
    trainer = AloneTrainer(model=model, args=args)
    accelerator = trainer.accelerator
    assert (accelerator.num_processes, accelerator.use_distributed) == (1, False)
    assert accelerator.device == args.device == torch.device("cpu")
    assert accelerator.prepare(model) is model
    local = torch.arange(3)
    assert torch.equal(accelerator.gather(local), local)
    loader = torch.utils.data.DataLoader(torch.arange(10), batch_size=2)  # type: ignore[arg-type]
    assert len(accelerator.prepare(loader)) == 5
    assert {name: os.environ[name] for name in torchrun} == torchrun
    # What is global all the same.
    assert trainer.get_total_train_batch_size(args) == 3 * 5 * 2
    assert (args.world_size, args.process_index, args.local_process_index) == (2, 2, 2)
    assert (args.n_gpu, args.parallel_mode) == (0, ParallelMode.NOT_PARALLEL)
    assert not trainer.place_model_on_device
    assert not (tmp_path / "out").exists()
    assert not (args.should_log or args.should_save or trainer.is_world_process_zero())


def test_rank_0_logs_and_saves(job: Callable[..., None]) -> None:
    job(dp=2, pp=2, rank=0)
    args = arguments()
    assert args.should_log and args.should_save and args.process_index == 0


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"])
def test_wishes_of_accelerate_launch(
    name: str, job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "bf16" if name.endswith("PRECISION") else "true"
    monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentsError, match=f"variable {name}={value} cannot be honoured"):
        arguments()
    monkeypatch.setenv(name, "no")
    arguments()


@pytest.mark.parametrize(("rank", "order"), [(0, ["work", "barrier"]), (1, ["barrier", "work"])])
def test_main_process_first(
    rank: int, order: list[str], job: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr("torch.distributed.barrier", lambda: happened.append("barrier"))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    job(tp=2, rank=rank)
    with arguments().main_process_first():
        happened.append("work")
    assert happened == order


@pytest.mark.parametrize("recompute", ["off", "full", "auto", "0.5", "3,4", None])
def test_recomputation_is_said_in_one_word(job, recompute) -> None:
    assert arguments(recompute=recompute, memory_budget=10**9).recompute == recompute


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"recompute": "sometimes"}, "recompute='sometimes' is no choice of what to recompute"),
        (
            {"recompute": "1.5"},
            "is no choice of what to recompute; use 'off', 'full', 'selective', 'auto'",
        ),
        ({"recompute": "auto"}, "set memory_budget in bytes"),
        ({"memory_budget": 0}, "memory_budget=0 is not a size"),
    ],
)
def test_recomputation_that_makes_no_sense_is_refused(job, settings, sentence) -> None:
    with pytest.raises(ArgumentsError, match=sentence):
        arguments(**settings)


def test_names_that_are_no_arguments_are_refused(job: Callable[..., None]) -> None:
    job()
    with pytest.raises(ArgumentsError, match="'evaluation_strategy'; today it is eval_strategy"):
        arguments(evaluation_strategy="no")

    class Own(MerakArguments):
        def __init__(self, mine: int, **rest: object) -> None:
            self.mine = mine
            super().__init__(**rest)  # type: ignore[arg-type]

    assert Own(3, output_dir="out", seed=4).seed == 4


@pytest.mark.parametrize(
    ("former", "today"),
    [
        ("evaluation_strategy", "eval_strategy"),
        ("per_gpu_train_batch_size", "per_device_train_batch_size"),
        ("no_cuda", "merak.init(device='cpu')"),
        ("warmup_ratio", "warmup_steps"),
        ("group_by_length", "train_sampling_strategy='group_by_length'"),
        ("include_inputs_for_metrics", "include_for_metrics=['inputs']"),
    ],
)
def test_former_names_are_named_by_todays(former: str, today: str) -> None:
    said = f"has no argument '{former}'; today it is {re.escape(today)}"
    with pytest.raises(ArgumentsError, match=said):
        MerakArguments(output_dir="unused", **{former: 1})


def test_what_former_names_are_today_is_an_argument() -> None:
    names = {one.name for one in dataclasses.fields(MerakArguments)}
    todays = [re.match(r"[a-z_]+$", today.partition("=")[0]) for today in ARGUMENTS.values()]
    assert {own[0] for own in todays if own} <= names
    trainer = inspect.signature(transformers.Trainer.__init__).parameters
    assert not set(TRAINER) & set(trainer)


@pytest.mark.parametrize("typed", ["adamw_torc", "adamw_8bits", "galore_adam", "lomo2", "apollo"])
def test_suggested_optimizers_are_accepted(job: Callable[..., None], typed: str) -> None:
    job()
    with pytest.raises(ArgumentsError, match=f"optim='{typed}' is not a choice") as caught:
        arguments(optim=typed)
    _, _, suggested = str(caught.value).partition("did you mean ")
    for name in suggested.rstrip("?").split(" or ") if suggested else ():
        assert arguments(optim=name).optim == name


def test_suggested_arguments_are_accepted() -> None:
    with pytest.raises(ArgumentsError, match="has no argument 'fsdp_conf'") as caught:
        MerakArguments(output_dir="unused", fsdp_conf=1)
    assert "fsdp_config" not in str(caught.value).partition("; ")[2]
    with pytest.raises(ArgumentsError, match="has no argument 'learning_rat'; did you mean lear"):
        MerakArguments(output_dir="unused", learning_rat=1)


@dataclasses.dataclass
class _Further(TrainingArguments):
    learning_rate: float = 0.25
    margin: float = 2.0


def test_one_class_has_the_fields_of_two(tmp_path: Path) -> None:
    merak.init(device="cpu")
    both = merak.arguments_for(_Further)
    assert merak.arguments_for(_Further) is both and merak.arguments_for(both) is both
    args = both(output_dir=str(tmp_path), zero=1, report_to=[])
    assert isinstance(args, _Further) and isinstance(args, merak.MerakArguments)
    assert (args.learning_rate, args.margin, args.zero, both.__name__) == (0.25, 2.0, 1, "_Further")
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()
    with pytest.raises(ArgumentsError, match=r"a subclass of transformers\.TrainingArgu"):
        merak.arguments_for(int)


def test_the_newer_name_of_checkpointing_holds(tmp_path: Path) -> None:
    merak.init(device="cpu")
    names = {"gradient_checkpointing": True, "activation_checkpointing": False}
    assert merak.MerakArguments(output_dir=str(tmp_path), **names).recompute is None
