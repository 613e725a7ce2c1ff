"""Training files of Axolotl.

Source: the options and defaults of Axolotl 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from merak.cli.recipe.foreign.tool import (
    COMMON,
    OTHER_TRAININGS,
    Tool,
    Whole,
    as_it_is,
    chat_template,
    fraction,
    mapped,
    only,
    to_argument,
)
from merak.cli.recipe.schema import CHAT, SEPARATE, TEXT, UNPACKED
from merak.cli.recipe.source import Keys

_CHATS = ("alpaca", "chat_template", "sharegpt")
_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "lora_fan_in_fan_out": "fan_in_fan_out",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform",
}
_COLUMNS = ("messages", "conversations")
_TAKEN = ("path", "type", "name", "split", "data_files", "ds_type", "field", "field_messages")


def _whole(given: Mapping[str, Any]) -> Whole:
    made = Whole(read={"datasets", "pretraining_dataset", "adapter", "lora_target_linear", *_LORA})
    _data(given, made)
    if given.get("adapter") == "lora":
        for name, own in _LORA.items():
            if given.get(name) is not None:
                made.found["lora", own] = given[name], name
        if given.get("lora_target_linear"):
            made.found["lora", "target_modules"] = "all-linear", "lora_target_linear"
        made.found["lora", "task_type"] = "CAUSAL_LM", "adapter"
    packed = SEPARATE if given.get("sample_packing") else UNPACKED
    made.read.add("sample_packing")
    made.found["data", "packing"] = packed, "sample_packing"
    for name, value in _DEFAULTS.items():
        if given.get(name) is None:
            made.found[_place(name)] = value, name
    if given.get("warmup_steps") is None and given.get("warmup_ratio") is None:
        made.found["arguments", "warmup_steps"] = 0.03, "warmup_steps"
    return made


def _place(name: str) -> Keys:
    return _FIELDS[name][0] if name in _FIELDS else ("arguments", name)


def _data(given: Mapping[str, Any], made: Whole) -> None:
    """Read the one dataset."""
    name = "datasets" if given.get("datasets") else "pretraining_dataset"
    every = given.get(name) or []
    every = every if isinstance(every, list) else [every]
    if name == "pretraining_dataset" and every:
        one = every[0] if isinstance(every[0], Mapping) else {"path": every[0]}
        every = [{"type": "completion", **one}, *every[1:]]
        made.found["data", "streaming"] = True, name
    if not every or not all(isinstance(one, Mapping) for one in every):
        made.problems.append((name, f"{name} names no dataset; give it an entry with a path."))
        return
    kinds = {_format(one, name, made) for one in every}
    if len(kinds) > 1:
        sentence = f"{name} has both text and conversations, and a recipe has one format."
        made.problems.append((name, sentence))
    made.found["data", "format"] = kinds.pop(), name
    entries = [_entry(one) for one in every]
    if len(entries) > 1:
        made.found["data", "mix"] = entries, name
    else:
        made.found |= {("data", key): (value, name) for key, value in entries[0].items()}
    made.left += dict.fromkeys(f"{name}.{key}" for one in every for key in one if key not in _TAKEN)


def _entry(one: Mapping[str, Any]) -> dict[str, Any]:
    """A dataset as a recipe has it; each of several, without weights, comes once."""
    files = one.get("data_files")
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    found = {
        "source": files if isinstance(files, str) else one.get("path"),
        "subset": one.get("name"),
        "split": one.get("split"),
        "column": one.get("field") if one.get("type") == "completion" else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _format(one: Mapping[str, Any], name: str, made: Whole) -> str:
    """The format of a dataset."""
    kind = one.get("type")
    if kind == "completion":
        return TEXT
    if not isinstance(kind, str) or kind.partition(".")[0] not in _CHATS:
        sentence = f"{name} has the type {kind!r}; use {', '.join(_CHATS)} or completion."
        made.problems.append((name, sentence))
    elif one.get("field_messages") not in (None, *_COLUMNS):
        sentence = f"{name} has messages in {one['field_messages']!r}; rename the column to "
        made.problems.append((name, f"{sentence}{_COLUMNS[0]}."))
    return CHAT


def _is_quantised(value: Any) -> str | None:
    return "quantised weights are not trained here; set it to false." if value else None


def _adapter(value: Any) -> str | None:
    if value == "lora":
        return None
    return f"adapter: {value} is none that a recipe trains; use lora, or leave it out."


def _other_training(value: Any) -> str | None:
    return f"files of Axolotl are read for training on the next token; {OTHER_TRAININGS}"


_FIELDS = {
    **COMMON,
    "base_model": (("model", "name"), as_it_is),
    "tokenizer_config": (("data", "tokenizer"), as_it_is),
    "sequence_len": (("data", "sequence"), as_it_is),
    "val_set_size": (("data", "held_out"), fraction),
    "chat_template": (("data", "chat_template"), chat_template),
    "train_on_inputs": (("data", "prompt_loss"), as_it_is),
    "tensor_parallel_size": (("parallel", "tp"), as_it_is),
    "context_parallel_size": (("parallel", "cp"), as_it_is),
    "micro_batch_size": to_argument("per_device_train_batch_size"),
    "eval_batch_size": to_argument("per_device_eval_batch_size"),
    "num_epochs": to_argument("num_train_epochs"),
    "optimizer": to_argument("optim"),
    "lr_scheduler": to_argument("lr_scheduler_type"),
    "bf16": to_argument("bf16", only(True, False, "auto")),
    "auto_resume_from_checkpoints": to_argument("resume_from_checkpoint", mapped({True: "auto"})),
    "saves_per_epoch": to_argument("save_strategy", mapped({1: "epoch"})),
    "evals_per_epoch": to_argument("eval_strategy", mapped({1: "epoch"})),
}

_DEFAULTS = {
    "bf16": "auto",
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "micro_batch_size": 1,
    "num_epochs": 1,
    "optimizer": "adamw_torch_fused",
    "output_dir": "./model-out",
    "sequence_len": 512,
    "val_set_size": 0,
}
"""What its fields are where a file leaves them out, and a recipe's are something else."""

AXOLOTL = Tool(
    name="Axolotl",
    sign=("base_model",),
    fields=_FIELDS,
    refused={
        "adapter": _adapter,
        "load_in_4bit": _is_quantised,
        "load_in_8bit": _is_quantised,
        "lora_model_dir": lambda _: "adapters begin anew here; leave it out, or merge them first.",
        "process_reward_model": lambda value: _other_training(value) if value else None,
        "reward_model": lambda value: _other_training(value) if value else None,
        "rl": _other_training,
    },
    dropped=frozenset(
        ("deepspeed", "fsdp", "fsdp_config", "local_rank", "debug", "gradient_checkpointing_kwargs")
    ),
    whole=_whole,
)
"""Axolotl."""
