"""Trainings with sentence-transformers' trainer and with Merak's, of the same models and data."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import merak
from tests.multirank.logged import Outcome, logs_of

OTHERS = ("so say we", "or not at all", "never ever")
TEXTS = ("the quick brown fox", "jumps over", "a lazy dog sleeps now", "hello world again", "so on")


@dataclass(frozen=True)
class Case:
    """A training: its loss, or losses of several datasets, by name.

    Args:
        loss: names, apart by spaces.
        of_loss: arguments of each.
        arguments: of the trainer.
        saved_in: the folder for checkpoints and the model; "" to save nothing.
        evaluates: whether it has data to evaluate the loss of, and an evaluator.
    """

    loss: str
    of_loss: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    saved_in: str = ""
    evaluates: bool = False


def tokenizer() -> PreTrainedTokenizerFast:
    """One that has a token for each letter."""
    letters = ["[PAD]", *"abcdefghijklmnopqrstuvwxyz "]
    plain = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", model_max_length=16,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def save_words(folder: str) -> None:
    """Save a small BERT and its tokenizer, as the folder of a model that reads words."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=32, pad_token_id=0, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def encoder(words: str) -> Any:
    """A model of sentences: the mean of the tokens that a saved BERT gives."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    # Few shapes are few traces.
    first = Transformer(words, processing_kwargs={"text": {"pad_to_multiple_of": 16}})
    return SentenceTransformer(modules=[first, Pooling(32, "mean")], device="cpu")


def pairs(num_samples: int) -> Dataset:
    """Texts that belong together."""
    return _rows(num_samples, anchor=TEXTS, positive=OTHERS)


def triplets(num_samples: int) -> Dataset:
    """Pairs, each with a text that belongs to neither."""
    return _rows(num_samples, anchor=TEXTS, positive=OTHERS, negative=("no", "nor this one"))


def scored(num_samples: int) -> Dataset:
    """Pairs of texts, each with how similar they are."""
    return _rows(num_samples, sentence1=TEXTS, sentence2=OTHERS, score=(0.9, 0.1, 0.5, 0.7))


def judged(num_samples: int) -> Dataset:
    """Pairs of texts, and whether they are similar."""
    return _rows(num_samples, sentence1=TEXTS, sentence2=OTHERS, label=(1, 0))


def _rows(num_samples: int, **columns: Sequence[Any]) -> Dataset:
    return Dataset.from_dict(
        {name: [one[i % len(one)] for i in range(num_samples)] for name, one in columns.items()}
    )


DATA = {
    "CoSENTLoss": scored,
    "CosineSimilarityLoss": scored,
    "ContrastiveLoss": judged,
    "OnlineContrastiveLoss": judged,
    "SoftmaxLoss": judged,
    "AnglELoss": scored,
    "TripletLoss": triplets,
}


def loss_of(name: str, model: Any, **arguments: Any) -> Any:
    """A loss by its name; "Matryoshka" before it for it at several sizes of embeddings."""
    from sentence_transformers.sentence_transformer import losses

    inner = name.removeprefix("Matryoshka")
    torch.manual_seed(0)
    loss = getattr(losses, inner)(model, **arguments)
    return loss if inner == name else losses.MatryoshkaLoss(model, loss, [32, 16])


def given_to(case: Case, words: str) -> dict[str, Any]:
    """What trainers of a case are given beside their arguments."""
    model = encoder(words)
    names = case.loss.split()
    data = {name: DATA.get(name.removeprefix("Matryoshka"), pairs)(24) for name in names}
    loss = {name: loss_of(name, model, **case.of_loss) for name in names}
    found: dict[str, Any] = {"model": model, "train_dataset": data, "loss": loss}
    if len(names) == 1:
        found |= {"train_dataset": data[case.loss], "loss": loss[case.loss]}
    if case.evaluates:
        found |= {"eval_dataset": found["train_dataset"], "evaluator": evaluator()}
    return found


def evaluator() -> Any:
    """How well similarities of embeddings are those of a dataset."""
    from sentence_transformers.sentence_transformer.evaluation import (
        EmbeddingSimilarityEvaluator,
    )

    data = scored(7)
    columns = [list(data[name]) for name in ("sentence1", "sentence2", "score")]
    return EmbeddingSimilarityEvaluator(*columns, batch_size=2, write_csv=False)


def arguments_of(case: Case) -> dict[str, Any]:
    return {
        "output_dir": case.saved_in or tempfile.mkdtemp(),
        "max_steps": 20,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "steps" if case.saved_in else "no",
        "save_steps": 10,
        "eval_strategy": "steps" if case.evaluates else "no",
        "eval_steps": 10,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        **case.arguments,
    }


def train(layout: Sequence[int], cases: Sequence[Case], words: str, cache: str) -> list[Outcome]:
    """Train with Merak's trainer on this rank of a layout."""
    from merak import sentence_transformers as own

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    class Noting(own.SentenceTransformerTrainer):  # type: ignore[misc, name-defined]
        """Writes a file of its own beside the model's."""

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            Path(str(output_dir), "note.txt").write_text(f"step {self.state.global_step}")

    outcomes = []
    for case in cases:
        args = own.SentenceTransformerTrainingArguments(
            gradient_accumulation_steps=4 // dp, trace_cache=cache, **arguments_of(case)
        )
        trainer = Noting(args=args, **given_to(case, words))
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        outcomes.append(Outcome(logs_of(trainer), trainer.gather_state_dict() or {}))
        if case.saved_in:
            trainer.save_model(f"{case.saved_in}/last")
    return outcomes


def train_alone(case: Case, words: str, dp: int = 1) -> Outcome:
    """Train with sentence-transformers' own trainer in this process.

    Args:
        case: the training.
        words: folder of the model that reads words.
        dp: replicas whose batches are one here, where the loss takes negatives from all of them.
    """
    import sentence_transformers as st

    size = dp if case.of_loss.get("gather_across_devices") else 1
    given = arguments_of(case)
    given["per_device_train_batch_size"] *= size
    args = st.SentenceTransformerTrainingArguments(gradient_accumulation_steps=4 // size, **given)
    trainer = st.SentenceTransformerTrainer(args=args, **given_to(case, words))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return Outcome(logs_of(trainer), trainer.model.state_dict())
