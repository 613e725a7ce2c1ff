"""Training files of other tools, read as recipes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from merak.cli.main import main
from merak.cli.recipe.draft import draft_of
from merak.cli.recipe.recipe import read_recipe
from merak.core.errors import MerakError
from tests.unit.checkpoint.models import gpt2

pytest.importorskip("peft")

AXOLOTL = """\
base_model: MODEL
load_in_8bit: false
strict: false
datasets:
  - path: chats.jsonl
    type: alpaca
    shards: 2
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: OUT
adapter: lora
lora_model_dir:
sequence_len: 64
sample_packing: true
pad_to_sequence_len: true
lora_r: 4
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules:
  - c_attn
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
fp16:
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
tensor_parallel_size: 2
fsdp_config:
  state_dict_type: FULL_STATE_DICT
"""

LLAMA_FACTORY = """\
### model
model_name_or_path: MODEL
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity
dataset_dir: DATA
template: qwen3
cutoff_len: 64
max_samples: 1000
output_dir: OUT
logging_steps: 10
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: false
ddp_timeout: 180000000
resume_from_checkpoint: null
"""


def write(tmp_path: Path, text: str, columns: object = None) -> Path:
    """A file of another tool beside its model and its data."""
    gpt2().save_pretrained(tmp_path / "model")
    record = {"instruction": "Say a.", "output": "a"}
    (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
    entry = {"file_name": "chats.jsonl"} | ({} if columns is None else {"columns": columns})
    (tmp_path / "dataset_info.json").write_text(json.dumps({"identity": entry}))
    text = text.replace("MODEL", str(tmp_path / "model")).replace("OUT", str(tmp_path / "out"))
    text = text.replace("DATA", str(tmp_path))
    text = text.replace("path: chats.jsonl", f"path: {tmp_path / 'chats.jsonl'}")
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return file


def test_a_file_of_axolotl(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        recipe = read_recipe(write(tmp_path, AXOLOTL), ["parallel.pp=2"])
    assert recipe.model.name == str(tmp_path / "model")
    data = recipe.data
    assert (data.source, data.format) == (str(tmp_path / "chats.jsonl"), "chat")
    assert (data.sequence, data.packing, data.held_out) == (64, "separate", 0.1)
    assert not data.prompt_loss
    assert (recipe.parallel.tp, recipe.parallel.pp) == (2, 2)
    assert recipe.lora == {
        "r": 4,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "target_modules": ["c_attn"],
        "task_type": "CAUSAL_LM",
    }
    assert recipe.arguments == {
        "output_dir": str(tmp_path / "out"),
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4,
        "bf16": "auto",
        "tf32": False,
        "recompute": "full",
        "warmup_steps": 0.1,
        "save_strategy": "epoch",
    }
    draft_of(recipe, torch.device("cpu"), 4)
    (warning,) = [record.message for record in caplog.records if "Axolotl" in record.message]
    assert warning.endswith(
        "not taken: datasets.shards, dataset_prepared_path, pad_to_sequence_len, flash_attention, "
        "evals_per_epoch, fsdp_config."
    )


def test_a_file_of_llama_factory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        recipe = read_recipe(write(tmp_path, LLAMA_FACTORY))
    data = recipe.data
    assert recipe.model.name == str(tmp_path / "model")
    assert (data.source, data.format) == (str(tmp_path / "chats.jsonl"), "chat")
    assert (data.sequence, data.packing, data.held_out) == (64, "none", 0)
    assert recipe.lora == {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
    }
    assert recipe.arguments == {
        "output_dir": str(tmp_path / "out"),
        "logging_steps": 10,
        "report_to": "none",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": 1e-4,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "bf16": False,
    }
    draft_of(recipe, torch.device("cpu"), 1)
    (warning,) = [record.message for record in caplog.records if "LLaMA" in record.message]
    assert warning.endswith("not taken: do_train, template, max_samples, plot_loss, ddp_timeout.")


@pytest.mark.parametrize("text", [AXOLOTL, LLAMA_FACTORY])
def test_train_says_what_would_start(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(write(tmp_path, text)), "--dry-run", "--json", "--device", "cpu"]
    assert main([*words, "data.chat_template=chatml", "data.tokenizer=train"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "GPT2LMHeadModel"
    assert report["degrees"]["tp"] == report["ranks"] == (2 if text is AXOLOTL else 1)


@pytest.mark.parametrize(
    ("text", "change", "line", "said"),
    [
        (AXOLOTL, ("load_in_8bit: false", "load_in_8bit: true"), 2, "quantised weights"),
        (AXOLOTL, ("adapter: lora", "adapter: qlora"), 11, "adapter: qlora is none"),
        (AXOLOTL, ("strict: false", "rl: dpo"), 3, "for pairs of answers (merak recipes dpo)"),
        (AXOLOTL, ("type: alpaca", "type: pygmalion"), 4, "the type 'pygmalion'"),
        (AXOLOTL, ("    shards: 2", "  - path: x\n    type: completion"), 4, "both text and"),
        (AXOLOTL, ("lora_r: 4", "lora_r: four"), 16, "lora.r='four' should be a whole number"),
        (AXOLOTL, ("num_epochs: 1", "num_epochs: x"), 24, "num_train_epochs='x'"),
        (LLAMA_FACTORY, ("stage: sft", "stage: dpo"), 3, "stage: dpo is none that is read here"),
        (LLAMA_FACTORY, ("finetuning_type: lora", "finetuning_type: oft"), 5, "oft is none"),
        (LLAMA_FACTORY, ("dataset: identity", "dataset: other"), 8, "'other' is not in"),
        (
            LLAMA_FACTORY,
            ("dataset: identity", "dataset: identity,identity\nmix_strategy: interleave_under"),
            9,
            "mix_strategy: interleave_under",
        ),
        (LLAMA_FACTORY, ("max_samples: 1000", "quantization_bit: 4"), 12, "quantised weights"),
    ],
)
def test_what_a_recipe_cannot_train_is_refused_with_its_line(
    text: str, change: tuple[str, str], line: int, said: str, tmp_path: Path
) -> None:
    file = write(tmp_path, text.replace(*change))
    with pytest.raises(MerakError) as caught:
        draft_of(recipe := read_recipe(file), torch.device("cpu"), 1)
        assert recipe.model
    message = str(caught.value)
    assert said in message
    assert message.startswith(f"{file}:{line}:") or "num_train_epochs" in message


def test_columns_of_other_names_are_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA_FACTORY)
    file = write(tmp_path, LLAMA_FACTORY, {"prompt": "question", "response": "output"})
    with pytest.raises(MerakError, match="calls them question"):
        read_recipe(file)


def test_text_to_continue(tmp_path: Path) -> None:
    text = LLAMA_FACTORY.replace("stage: sft", "stage: pt").replace("lora\n", "full\n", 1)
    data = read_recipe(write(tmp_path, text, {"prompt": "content"})).data
    assert (data.format, data.column, data.packing) == ("text", "content", "joined")
    kind = AXOLOTL.replace("type: alpaca", "type: completion\n    field: body")
    data = read_recipe(write(tmp_path, kind)).data
    assert (data.format, data.column) == ("text", "body")


def test_what_axolotl_takes_for_a_field_that_is_left_out(tmp_path: Path) -> None:
    text = "base_model: MODEL\ndatasets: [{path: chats.jsonl, type: alpaca}]\nlearning_rate: 1e-4\n"
    recipe = read_recipe(write(tmp_path, text))
    assert recipe.lora is None
    assert (recipe.data.sequence, recipe.data.held_out, recipe.data.packing) == (512, 0, "none")
    assert recipe.arguments == {
        "bf16": "auto",
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "cosine",
        "learning_rate": 1e-4,
        "warmup_steps": 0.03,
        "output_dir": "./model-out",
    }


def test_several_datasets(tmp_path: Path) -> None:
    file = str(tmp_path / "chats.jsonl")
    entry = f"  - path: {file}\n    type: chat_template"
    data = read_recipe(write(tmp_path, AXOLOTL.replace("    shards: 2", entry))).data
    assert data.mix == [{"source": file}, {"source": file}] and data.format == "chat"
    text = LLAMA_FACTORY.replace("dataset: identity", "dataset: identity, identity")
    assert read_recipe(write(tmp_path, text)).data.mix == data.mix
    text += "mix_strategy: interleave_over\ninterleave_probs: 0.7,0.3\n"
    weights = [one["weight"] for one in read_recipe(write(tmp_path, text)).data.mix or []]
    assert weights == [0.7, 0.3]
    once = text.replace("interleave_over", "interleave_once")
    assert read_recipe(write(tmp_path, once)).data.mix == data.mix
