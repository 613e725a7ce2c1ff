"""Evaluation by generation on many ranks gives the words and losses of transformers' trainer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, alone
from tests.tiers import slow


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of different lengths, whose answer is the sequence itself from its end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(3, 7) * (index + 1) % 30 + 3
        return {"input_ids": ids, "labels": ids.flip(0)}


class OwnInputs:
    """Evaluates other inputs than the loop has."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**inputs, "input_ids": inputs["input_ids"].flip(0)}
        return super().prediction_step(model, inputs, *args, max_length=4, **kwargs)  # type: ignore[misc]


def model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=40, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def words(found: Any) -> dict[str, Any]:
    plain = {"words": found.predictions.tolist(), "labels": found.label_ids.tolist()}
    return plain | {"loss": found.metrics["test_loss"]}


def evaluated(
    trainer: type[Any], kind: type[Any], folder: Path, num_accumulated: int, **own: Any
) -> Any:
    """Train with an evaluation after each step, and predict with beams, and with other inputs."""
    args = kind(
        str(folder), max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2,
        gradient_accumulation_steps=num_accumulated, optim="sgd", learning_rate=1.0,
        eval_strategy="steps", eval_steps=1, logging_steps=1, predict_with_generate=True,
        generation_max_length=7, save_strategy="no", disable_tqdm=True, report_to="none",
        use_cpu=True, include_for_metrics=["inputs"], **own,
    )  # fmt: skip
    seen: list[Any] = []

    def compute_metrics(found: Any) -> dict[str, float]:
        seen.extend([found.predictions.tolist(), found.inputs.tolist()])
        return {"sum": float(found.predictions.sum())}

    given: Any = {"args": args, "train_dataset": Pairs(16), "eval_dataset": Pairs(7)}
    made = trainer(model=model(), compute_metrics=compute_metrics, **given)
    made.train()
    tokens = getattr(made, "generate", made.model.generate)(Pairs(3)[2]["input_ids"][None])
    beams = words(made.predict(Pairs(5), num_beams=2, max_length=6))
    names = ("loss", "eval_loss", "eval_sum")
    logs = [{n: log[n] for n in names if n in log} for log in made.state.log_history]
    args.predict_with_generate, made.compute_metrics = False, None
    whole = made.evaluate(Pairs(5))["eval_loss"]  # a mean over batches, the last one a short one
    args.predict_with_generate = True
    other = type("Other", (OwnInputs, trainer), {})
    made = other(model=model(), **given)
    found = {"tokens": tokens.tolist(), "loss": whole}
    return logs, seen, found, beams, words(made.predict(Pairs(3)))


def on_ranks(layout: Layout, zero: int, folder: Path) -> Any:
    import merak
    from merak.trainer import generation

    dp, tp, pp = layout
    rooms = itertools.cycle((False, True))  # evaluations are on the stages and on copies in turn
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    own = {"zero": zero, "trace_cache": "", "run_record": False}
    kind = merak.MerakSeq2SeqArguments
    with mock.patch.object(generation, "has_room_for_copies", lambda *_: next(rooms)):
        return evaluated(merak.MerakSeq2SeqTrainer, kind, folder, 2 // dp, **own)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [((1, 1, 2), 0), slow((1, 2, 1), 0), slow((2, 1, 1), 3)],
)
def test_words_are_those_of_one_process(
    pool: RankPool, layout: Layout, zero: int, tmp_path: Path
) -> None:
    with alone():
        logs, seen, *results = evaluated(Seq2SeqTrainer, Seq2SeqTrainingArguments, tmp_path, 2)
    assert len({str(part) for part in seen[::2]}) > 1  # what is trained changes the words
    for found in pool.run(on_ranks, 2, layout, zero, tmp_path):
        assert found[1] == seen
        for own, theirs in zip([*found[0], *found[2:]], [*logs, *results], strict=True):
            assert {k: v for k, v in own.items() if "loss" not in k} == {
                k: v for k, v in theirs.items() if "loss" not in k
            }
            losses = {k: v for k, v in theirs.items() if "loss" in k}
            assert {k: own[k] for k in losses} == pytest.approx(losses, rel=1e-4)
