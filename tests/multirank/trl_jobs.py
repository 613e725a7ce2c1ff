"""Trainings with TRL's trainers and with Merak's, of the same models, data and arguments."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

import merak
from tests.multirank.logged import Outcome, logs_of

TEXTS = ("the quick brown fox", "jumps over", "a lazy dog sleeps now", "hello world again", "so on")


@dataclass(frozen=True)
class Case:
    """A training: the kind of trainer, its arguments, adapters, and a reference model."""

    kind: str
    arguments: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    reference: bool = False


def tokenizer() -> PreTrainedTokenizerFast:
    """One that has a token for each letter."""
    letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz "]
    plain = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(_config())


def reward_model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(_config(num_labels=1))


def _config(**further: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        **further,
    )  # fmt: skip


def texts(num_samples: int) -> Dataset:
    return Dataset.from_dict({"text": [TEXTS[i % len(TEXTS)] for i in range(num_samples)]})


def documents(num_samples: int) -> Dataset:
    """Texts of which two fill 24 tokens, so that packed rows are full."""
    longs = ("quick brown fox", "lazy dogs sleep")
    return Dataset.from_dict(
        {"text": [longs[i % 4 // 2] if i % 2 else "jump so" for i in range(num_samples)]}
    )


def pairs(num_samples: int) -> Dataset:
    names = {"prompt": ("so ", "say "), "chosen": TEXTS, "rejected": ("no", "or not at", "never")}
    return Dataset.from_dict(
        {name: [one[i % len(one)] for i in range(num_samples)] for name, one in names.items()}
    )


def whole_pairs(num_samples: int) -> Dataset:
    return pairs(num_samples).map(
        lambda row: {n: row["prompt"] + row[n] for n in ("chosen", "rejected")},
        remove_columns="prompt",
    )


def judged(num_samples: int) -> Dataset:
    rows = {"prompt": ("so ", "say "), "completion": TEXTS, "label": (True, False, False)}
    return Dataset.from_dict(
        {name: [one[i % len(one)] for i in range(num_samples)] for name, one in rows.items()}
    )


DATA = {"SFT": texts, "DPO": pairs, "Reward": whole_pairs, "KTO": judged}


def given_to(case: Case) -> dict[str, Any]:
    """What trainers of a case are given beside their arguments."""
    samples = documents if "packing" in case.arguments else DATA[case.kind]
    model = reward_model if case.kind == "Reward" else language_model
    found: dict[str, Any] = {
        "model": model(),
        "train_dataset": samples(24),
        "eval_dataset": samples(6),
        "processing_class": tokenizer(),
    }
    if case.reference:
        found["ref_model"] = model()
    if case.lora:
        from peft import LoraConfig

        found["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
    return found


def arguments_of(case: Case) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_steps": 20,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "log_level": "error",
        "activation_checkpointing": False,
        "max_length": 24,
        "pad_to_multiple_of": 24,
        **case.arguments,
    }


def train(layout: Sequence[int], cases: Sequence[Case], cache: str) -> list[Outcome]:
    """Train with Merak's trainers on this rank of a layout."""
    from merak import trl

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    outcomes = []
    for case in cases:
        args = getattr(trl, f"{case.kind}Config")(
            gradient_accumulation_steps=4 // dp,
            trace_cache=cache,
            loss_chunk_bytes=16 * 4 * 32,  # of 16 tokens, fewer than any batch has
            **arguments_of(case),
        )
        trainer = getattr(trl, f"{case.kind}Trainer")(args=args, **given_to(case))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        outcomes.append(Outcome(logs_of(trainer), trainer.gather_state_dict() or {}))
    return outcomes


def train_alone(case: Case) -> Outcome:
    """Train with TRL's own trainer in this process."""
    import trl

    args = getattr(trl, f"{case.kind}Config")(gradient_accumulation_steps=4, **arguments_of(case))
    trainer = getattr(trl, f"{case.kind}Trainer")(args=args, **given_to(case))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return Outcome(logs_of(trainer), trainer.model.state_dict())
