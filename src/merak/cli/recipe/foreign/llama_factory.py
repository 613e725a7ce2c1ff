"""Training files of LLaMA-Factory.

Source: the arguments of LLaMA-Factory 0.9.5, and its data/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merak.cli.recipe.foreign.tool import (
    COMMON,
    OTHER_TRAININGS,
    Tool,
    Whole,
    as_it_is,
    fraction,
    mapped,
)
from merak.cli.recipe.schema import CHAT, JOINED, SEPARATE, TEXT, UNPACKED
from merak.core.files.json_file import read_json

_STAGES = ("sft", "pt")
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
_TAGS = {
    "role_tag": ("from", "role"),
    "content_tag": ("value", "content"),
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call", "function"),
    "system_tag": ("system",),
}
_LORA = {
    "lora_rank": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
INFO = "dataset_info.json"
"""The file that says what a dataset is, by its name."""


def _whole(given: Mapping[str, Any]) -> Whole:
    made = Whole(
        read={
            "stage", "finetuning_type", "dataset", "dataset_dir", "lora_target",
            "additional_target", "packing", "neat_packing", "mix_strategy", "interleave_probs",
            *_LORA,
        }
    )  # fmt: skip
    _data(given, made)
    if given.get("finetuning_type", "lora") == "lora":
        _lora(given, made)
    packs = SEPARATE if given.get("neat_packing") else JOINED
    is_packed = given.get("packing", given.get("stage") == "pt")
    name = "neat_packing" if given.get("neat_packing") else "packing"
    made.found["data", "packing"] = packs if is_packed or name != "packing" else UNPACKED, name
    for name, value in (("val_size", 0), ("cutoff_len", 2048)):
        if given.get(name) is None:  # as LLaMA-Factory has it
            made.found[_FIELDS[name][0]] = value, name
    return made


def _lora(given: Mapping[str, Any], made: Whole) -> None:
    rank = given.get("lora_rank") or 8
    made.found["lora", "r"] = rank, "lora_rank"
    made.found["lora", "lora_alpha"] = 2 * rank, "lora_alpha"
    for name, own in _LORA.items():
        if given.get(name) is not None:
            made.found["lora", own] = given[name], name
    target = given.get("lora_target") or "all"
    modules = "all-linear" if target == "all" else _listed(target)
    made.found["lora", "target_modules"] = modules, "lora_target"
    if given.get("additional_target"):
        modules = _listed(given["additional_target"])
        made.found["lora", "modules_to_save"] = modules, "additional_target"
    made.found["lora", "task_type"] = "CAUSAL_LM", "finetuning_type"


def _listed(value: Any) -> list[str]:
    return [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)


def _data(given: Mapping[str, Any], made: Whole) -> None:
    """Read the datasets, as the file beside them says what they are."""
    names = _listed(given.get("dataset") or [])
    folder = Path(str(given.get("dataset_dir") or "data")).expanduser()
    try:
        known = read_json(folder / INFO)
        every = [known[name] for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        sentence = f"dataset {', '.join(names)!r} is not in {folder / INFO}, which says what it is"
        made.problems.append(("dataset", f"{sentence}; set dataset_dir to its folder."))
        return
    is_text = given.get("stage") == "pt"
    made.found["data", "format"] = TEXT if is_text else CHAT, "dataset"
    entries = [_entry(one, folder, is_text) for one in every]
    if len(entries) > 1:
        _mix(given, entries, made)
    else:
        for key, own in (pair for one in entries for pair in one.items()):
            made.found["data", key] = own, "dataset"
    for name, one in zip(names, every, strict=True):
        columns = one.get("columns") or {}
        made.left += [f"{name}.{own}" for own in (*one, *columns) if own in _UNREAD]
        if not is_text:
            _check_columns(name, one, made)


def _mix(given: Mapping[str, Any], entries: list[dict[str, Any]], made: Whole) -> None:
    """Several datasets: each record once, or drawn with the probabilities that are given."""
    weights = given.get("interleave_probs")
    weights = None if weights is None else [float(one) for one in _listed(weights)]
    strategy = given.get("mix_strategy") or "concat"
    once = ("concat", "interleave_once")
    if strategy == "interleave_under" or (strategy not in once and weights is None):
        made.problems.append(
            (
                "mix_strategy",
                f"mix_strategy: {strategy} leaves out records, or has no interleave_probs; use "
                "concat, or interleave_over with these.",
            )
        )
    elif strategy not in once and weights is not None and len(weights) == len(entries):
        entries = [one | {"weight": own} for one, own in zip(entries, weights, strict=True)]
    made.found["data", "mix"] = entries, "dataset"


def _entry(one: Mapping[str, Any], folder: Path, is_text: bool) -> dict[str, Any]:
    """A dataset as a recipe has it."""
    file, columns = one.get("file_name"), one.get("columns") or {}
    found = {
        "source": str(folder / file) if file else one.get("hf_hub_url"),
        "subset": one.get("subset"),
        "split": one.get("split"),
        "column": columns.get("prompt", "text") if is_text else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _check_columns(name: str, one: Mapping[str, Any], made: Whole) -> None:
    """Refuse records whose columns or roles a recipe does not know."""
    columns, kind = one.get("columns") or {}, one.get("formatting", "alpaca")
    others = [own for key, own in columns.items() if _COLUMNS.get(kind, {}).get(key, own) != own]
    others = [own for own in others if own not in ("prompt", "completion", "messages")]
    tags = one.get("tags") or {}
    others += [tag for key, tag in tags.items() if tag not in _TAGS.get(key, (tag,))]
    if kind not in _COLUMNS or others:
        what = f"calls them {', '.join(others)}" if others else f"has the formatting {kind!r}"
        known = "instruction, input and output, or conversations, or messages"
        sentence = f"dataset {name!r} {what}; name the columns of its records {known}."
        made.problems.append(("dataset", sentence))


_UNREAD = ("ranking", "history", "system", "tools", "images", "videos", "audios", "num_samples")
"""What a dataset may have and a recipe does not read."""


def _stage(value: Any) -> str | None:
    if value in _STAGES:
        return None
    return (
        f"stage: {value} is none that is read here, for training on the next token: "
        f"{' or '.join(_STAGES)}; {OTHER_TRAININGS}"
    )


def _method(value: Any) -> str | None:
    if value in ("lora", "full"):
        return None
    return f"finetuning_type: {value} is none that a recipe trains; use lora or full."


_FIELDS = {
    **COMMON,
    "model_name_or_path": (("model", "name"), as_it_is),
    "pure_bf16": (("model", "dtype"), mapped({True: "bfloat16"})),
    "cutoff_len": (("data", "sequence"), as_it_is),
    "val_size": (("data", "held_out"), fraction),
    "streaming": (("data", "streaming"), as_it_is),
    "train_on_prompt": (("data", "prompt_loss"), as_it_is),
}

LLAMA_FACTORY = Tool(
    name="LLaMA-Factory",
    sign=("model_name_or_path", "stage"),
    fields=_FIELDS,
    refused={
        "adapter_name_or_path": lambda _: (
            "adapters begin anew here; leave it out, or merge them first."
        ),
        "finetuning_type": _method,
        "quantization_bit": lambda _: "quantised weights are not trained here; leave it out.",
        "stage": _stage,
    },
    dropped=frozenset(
        ("ddp_timeout", "deepspeed", "do_train", "fsdp", "fsdp_config", "local_rank", "do_predict")
    ),
    whole=_whole,
)
"""LLaMA-Factory."""
