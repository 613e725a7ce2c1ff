"""Small models of many kinds, with samples of differing lengths, to evaluate and predict with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

from tests.multirank.training import VOCABULARY

Row = dict[str, torch.Tensor]

WIDTHS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {**WIDTHS, "image_size": 16, "patch_size": 8}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model, and how it is evaluated.

    Args:
        model: makes it.
        row: makes a sample of a number and a generator.
        arguments: further training arguments.
        given: further arguments of the trainer.
        plain: arguments that are no tensors, which the collator adds to every batch.
        ignored: outputs that predictions leave out; None for the model's own.
        streamed: whether the evaluated dataset has no length.
        unlabelled: columns that samples to predict lack.
        predicted: so many samples to predict; as many as are evaluated meet no new shape.
    """

    model: Callable[[], nn.Module]
    row: Callable[[int, torch.Generator], Row]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] | None = None
    streamed: bool = False
    unlabelled: tuple[str, ...] = ()
    predicted: int = 10


class Samples(Dataset[Row]):
    """Samples of one kind."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


class Stream(IterableDataset[Row]):
    """Samples whose number nobody knows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def samples(kind: Kind, size: int, seed: int, without: tuple[str, ...] = ()) -> Samples:
    """So many samples of a kind, the same for the same seed, without some columns."""
    generator = torch.Generator().manual_seed(seed)
    rows = [kind.row(number, generator) for number in range(size)]
    return Samples([{n: v for n, v in row.items() if n not in without} for row in rows])


@dataclass(frozen=True, slots=True)
class Collate:
    """Pads every column to its longest sample, and adds arguments that are no tensors."""

    plain: Mapping[str, Any]

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for name in rows[0]:
            parts = [row[name] for row in rows]
            fill = -100 if name == "labels" else 0
            is_text = parts[0].ndim == 1
            batch[name] = (
                nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)
                if is_text
                else torch.stack(parts)
            )
        return {**batch, **self.plain}


# ---- samples ----


def ids_of(number: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (12 - number % 3,), generator=generator)


def words(number: int, generator: torch.Generator) -> Row:
    ids = ids_of(number, generator)
    labels = ids.clone()
    labels[: number % 4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def translated(number: int, generator: torch.Generator) -> Row:
    row = words(number, generator)
    return {**row, "labels": row["input_ids"].flip(0)[: 8 - number % 2]}


def tagged(number: int, generator: torch.Generator) -> Row:
    row = words(number, generator)
    return {**row, "labels": row["input_ids"] % 2}


def answered(number: int, generator: torch.Generator) -> Row:
    row = words(number, generator)
    del row["labels"]
    return row | {
        "start_positions": torch.tensor(number % 5),
        "end_positions": torch.tensor(5 + number % 3),
    }


def classified(number: int, generator: torch.Generator) -> Row:
    return {**words(number, generator), "labels": torch.tensor(number % 2)}


def measured(number: int, generator: torch.Generator) -> Row:
    return {**words(number, generator), "labels": torch.tensor(number / 7)}


def chosen(number: int, generator: torch.Generator) -> Row:
    ids = torch.randint(1, VOCABULARY, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": torch.tensor(number % 2)}


def spoken(number: int, generator: torch.Generator) -> Row:
    wave = torch.randn(480, generator=generator)
    return {"input_values": wave, "labels": torch.tensor(number % 3)}


def transcribed(number: int, generator: torch.Generator) -> Row:
    sound = torch.randn(8, 24, generator=generator)
    return {"input_features": sound, "labels": ids_of(number, generator)}


def pictured(number: int, generator: torch.Generator) -> Row:
    pixels = torch.randn(3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.tensor(number % 3)}


def outlined(number: int, generator: torch.Generator) -> Row:
    pixels = torch.randn(3, 32, 32, generator=generator)
    labels = torch.randint(3, (32, 32), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def captioned(number: int, generator: torch.Generator) -> Row:
    ids = torch.randint(1, VOCABULARY - 1, (9,), generator=generator)
    ids[-1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": torch.randn(3, 16, 16, generator=generator)}


def numbered(number: int, generator: torch.Generator) -> Row:
    return {"x": torch.randn(6, generator=generator), "labels": torch.tensor(number % 3)}


# ---- models ----


def causal() -> nn.Module:
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def experts() -> nn.Module:
    config = transformers.MixtralConfig(
        **TEXT, num_key_value_heads=2, num_local_experts=4, output_router_logits=True
    )
    return transformers.MixtralForCausalLM(config)


def states() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1, time_step_rank=2
    )
    return transformers.MambaForCausalLM(config)


def masked() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **UNDROPPED))


def summarised() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def answers() -> nn.Module:
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**TEXT, **UNDROPPED))


def choices() -> nn.Module:
    return transformers.BertForMultipleChoice(transformers.BertConfig(**TEXT, **UNDROPPED))


def number() -> nn.Module:
    config = transformers.BertConfig(**TEXT, **UNDROPPED, num_labels=1)
    return transformers.BertForSequenceClassification(config)


def sentences() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=16, pad_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)


def shown() -> nn.Module:
    config = transformers.BertConfig(
        **TEXT, **UNDROPPED, output_hidden_states=True, output_attentions=True,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForTokenClassification(config)


def bare() -> nn.Module:
    """Tuples in place of a dict, with hidden states in them."""
    config = transformers.BertConfig(
        **TEXT, **UNDROPPED, output_hidden_states=True, return_dict=False
    )
    return transformers.BertForTokenClassification(config)


def speech() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        **WIDTHS, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, num_labels=3,
        classifier_proj_size=16,
    )  # fmt: skip
    return transformers.Wav2Vec2ForSequenceClassification(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=12, max_target_positions=16, dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def pictures() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE, num_labels=3))


def outlines() -> nn.Module:
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32],
        patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
        decoder_hidden_size=16, num_labels=3, drop_path_rate=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config)


def pairs() -> nn.Module:
    config = transformers.CLIPConfig(
        text_config={**TEXT, "eos_token_id": VOCABULARY - 1}, vision_config=IMAGE,
        projection_dim=16,
    )  # fmt: skip
    return transformers.CLIPModel(config)


class Nested(nn.Module):
    """Returns a tuple with tuples and a dict inside, its loss first where there are labels."""

    def __init__(self, has_loss: bool = True) -> None:
        super().__init__()
        self.has_loss = has_loss
        self.blocks = nn.ModuleList(nn.Linear(6 if i == 0 else 16, 16) for i in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[Any, ...]:
        seen = []
        for block in self.blocks:
            x = block(x).tanh()
            seen.append(x)
        scores = self.head(x)
        found = (scores, (seen[0], (seen[1], seen[2])), {"last": seen[3], "both": (x, scores)})
        if labels is None or not self.has_loss:
            return found
        return (F.cross_entropy(scores, labels), *found)


class Named(Nested):
    """Returns a dict of its own, and no loss."""

    def __init__(self) -> None:
        super().__init__(has_loss=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        scores, seen, last = super().forward(x)
        return {"scores": scores, "past_key_values": seen, **last}


def loss_of_scores(
    outputs: Mapping[str, Any], labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    return F.cross_entropy(outputs["scores"], labels)


def loss_of_first(
    outputs: Sequence[Any], labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    return F.cross_entropy(outputs[0], labels)


def tempered(logits: Any, labels: Any) -> torch.Tensor:
    """What is kept of logits: each sample's most likely words."""
    found = logits[0] if isinstance(logits, tuple) else logits
    return found.argmax(-1)


class Batchwise:
    """A metric that is given one batch after the other, and settled with the last one."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def __call__(self, result: transformers.EvalPrediction, compute_result: bool) -> Any:
        inputs = [result.inputs[name] for name in sorted(result.inputs)]
        given = (result.predictions, result.label_ids, result.losses, *inputs)
        self.sums.append(float(sum(part.double().abs().sum() for part in given)))
        if not compute_result:
            return {}
        sums, self.sums = self.sums, []
        return {"sum": sum(sums), "batches": len(sums), "largest": max(sums)}


PLAIN = {"label_names": ["labels"]}

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "causal": Kind(
            causal, words, {"eval_accumulation_steps": 1, "per_device_eval_batch_size": 2},
            predicted=7,
        ),
        "experts": Kind(experts, words),
        "states": Kind(states, words, ignored=("cache_params",)),
        "masked": Kind(
            masked, words, {"include_for_metrics": ["inputs", "loss"]},
            {"preprocess_logits_for_metrics": tempered},
        ),
        "batchwise": Kind(
            masked, words, {"batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]},
            {"compute_metrics": Batchwise()},
        ),
        "unmeant": Kind(answers, answered, {"label_names": ["start_positions", "missing"]}),
        "summarised": Kind(summarised, translated),
        "answers": Kind(answers, answered, unlabelled=("start_positions", "end_positions")),
        "choices": Kind(choices, chosen),
        "number": Kind(number, measured, streamed=True),
        "sentences": Kind(sentences, classified, unlabelled=("labels",)),
        "shown": Kind(shown, tagged),
        "bare": Kind(bare, tagged, {"eval_do_concat_batches": False}),
        "speech": Kind(speech, spoken),
        "whisper": Kind(whisper, transcribed),
        "pictures": Kind(pictures, pictured, {"prediction_loss_only": True}),
        "outlines": Kind(outlines, outlined),
        "pairs": Kind(pairs, captioned, plain={"return_loss": True}),
        "nested": Kind(Nested, numbered, PLAIN, unlabelled=("labels",)),
        "named": Kind(Named, numbered, PLAIN, {"compute_loss_func": loss_of_scores}),
        "first": Kind(
            lambda: Nested(has_loss=False), numbered, PLAIN, {"compute_loss_func": loss_of_first}
        ),
    }
)  # fmt: skip
"""Kinds by name."""
