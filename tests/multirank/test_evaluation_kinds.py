"""evaluate and predict for several kinds of models and lengths: those of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments

from tests.multirank.ranks import RankPool
from tests.multirank.training import VOCABULARY, Layout, alone

BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TOLERANCE = 2e-5
KINDS = ("answers", "speech", "hidden")

Seen = dict[str, Any]


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[kind]()


def answers() -> nn.Module:
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**BERT))


def hidden() -> nn.Module:
    shown = {"output_hidden_states": True, "output_attentions": True}
    config = transformers.BertConfig(**BERT, **shown, attn_implementation="eager")
    return transformers.BertForTokenClassification(config)


def speech() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, num_labels=3,
        classifier_proj_size=16,
    )  # fmt: skip
    return transformers.Wav2Vec2ForSequenceClassification(config)


MODELS = {f.__name__: f for f in (answers, hidden, speech)}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples of differing lengths for one kind of model."""

    def __init__(self, kind: str, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [_sample(kind, number, generator) for number in range(size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def _sample(kind: str, number: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if kind == "speech":
        wave = torch.randn(480, generator=generator)
        return {"input_values": wave, "labels": torch.tensor(number % 3)}
    ids = torch.randint(1, VOCABULARY, (12 - number % 3,), generator=generator)
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if kind == "answers":
        return row | {
            "start_positions": torch.tensor(number % 5),
            "end_positions": torch.tensor(5 + number % 3),
        }
    return row | {"labels": ids % 2}


def collate(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad every column to its own longest sample."""
    batch = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        value = -100 if name == "labels" else 0
        if parts[0].ndim:
            batch[name] = nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)
        else:
            batch[name] = torch.stack(parts)
    return batch


def metrics_of(result: EvalPrediction) -> dict[str, float]:
    found = _flat(result.predictions)
    labels = sum(float(np.abs(part).sum()) for part in _flat(result.label_ids))
    return {"parts": len(found), "size": _size(found), "labels": labels}


def _size(parts: Sequence[np.ndarray]) -> float:
    return sum(float(np.abs(part[part != -100]).sum(dtype=np.float64)) for part in parts)


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, (tuple, list)):
        return [part for each in value for part in _flat(each)]
    return [np.asarray(value)]


def watch(trainer: Any, kind: str) -> Seen:
    """Evaluate before, in and after training, and predict."""
    seen: Seen = {"metrics": [_numbers(trainer.evaluate())]}
    trainer.train()
    seen["metrics"] += [_numbers(log) for log in trainer.state.log_history if "eval_loss" in log]
    seen["metrics"].append(_numbers(trainer.evaluate()))
    predicted = trainer.predict(Samples(kind, 7, seed=8))
    seen["predictions"], seen["labels"] = _flat(predicted.predictions), _flat(predicted.label_ids)
    return seen


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    timed = ("runtime", "per_second", "preparation_time", "epoch", "step")
    return {k: v for k, v in metrics.items() if not k.endswith(timed)}


def _arguments() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2,
        "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 0.0,
        "optim": "sgd", "report_to": [], "use_cpu": True, "save_strategy": "no",
        "disable_tqdm": True, "log_level": "error", "seed": 11,
    }  # fmt: skip


def _given(kind: str) -> dict[str, Any]:
    return {
        "model": model_of(kind), "train_dataset": Samples(kind, 16, seed=0),
        "eval_dataset": Samples(kind, 10, seed=7), "data_collator": collate,
        "compute_metrics": metrics_of,
    }  # fmt: skip


def evaluate_merak(layout: Layout, cache: str) -> list[Seen]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    arguments = [merak.MerakArguments(trace_cache=cache, **_arguments()) for _ in KINDS]
    return [
        watch(_quiet(merak.MerakTrainer(args=args, **_given(kind))), kind)
        for kind, args in zip(KINDS, arguments, strict=True)
    ]


def evaluate_alone() -> list[Seen]:
    found = []
    for kind in KINDS:
        with alone():
            args = TrainingArguments(**_arguments())
            found.append(watch(_quiet(Trainer(args=args, **_given(kind))), kind))
    return found


def _quiet(trainer: Trainer) -> Trainer:
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize("layout", [(1, 2, 2)])
def test_evaluation_of_all_kinds_equals_one_process(
    pool: RankPool, layout: Layout, tmp_path: Path
) -> None:
    (expected,) = pool.run(evaluate_alone, 1)
    ranks = pool.run(evaluate_merak, layout[0] * layout[1] * layout[2], layout, str(tmp_path))
    for rank in ranks:
        for kind, seen, wanted in zip(KINDS, rank, expected, strict=True):
            _assert_same(kind, seen, wanted)


def _assert_same(kind: str, seen: Seen, wanted: Seen) -> None:
    for part in ("predictions", "labels"):
        assert len(seen[part]) == len(wanted[part]), kind
    for found, known in zip(seen["labels"], wanted["labels"], strict=True):
        assert np.array_equal(found, known), kind
    for found, known in zip(seen["predictions"], wanted["predictions"], strict=True):
        assert found.shape == known.shape, kind
        assert np.abs(found - known).max() <= TOLERANCE * np.abs(known).max(), kind
    assert len(seen["metrics"]) == len(wanted["metrics"]) == 4
    for found, known in zip(seen["metrics"], wanted["metrics"], strict=True):
        assert found == pytest.approx(known, rel=TOLERANCE), kind
