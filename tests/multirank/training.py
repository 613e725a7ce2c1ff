"""Small training jobs that run under Merak on many ranks and under transformers in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

Layout = tuple[int, ...]
"""Degrees of dp, tp and pp."""

VOCABULARY, SEQUENCE = 61, 12  # which tp does not divide
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences of differing numbers of label tokens, some padded at the end."""

    def __init__(self, size: int, *, seed: int = 0, padded: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, VOCABULARY, (size, SEQUENCE), generator=generator)
        self.padded = padded

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index].clone()
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[: index % 4] = -100
        if not self.padded:
            return {"input_ids": ids, "labels": labels}
        end = SEQUENCE - index % 5
        ids[end:], labels[end:], mask[end:] = 0, -100, 0
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Uneven(nn.Module):
    """A plain model: blocks of very different sizes, a skip over all of them, logits only."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width) for width in (8, 128, 16, 64, 32))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        first = x = self.drop(self.embed(input_ids))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x + first)}


class Block(nn.Module):
    """A feed-forward block with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, width)
        self.down = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def loss_of_logits(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """The sum over label tokens, divided by those of the whole step."""
    logits = outputs["logits"].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else SEQUENCE)


def gpt2(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=16,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=VOCABULARY, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert(dropout: float = 0.0, layers: int = 2) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MODELS: Mapping[str, Callable[[float], nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "plain": Uneven,
    "deep gpt2": partial(gpt2, layers=4),
    "deep llama": partial(llama, layers=4),
    "deep bert": partial(bert, layers=4),
}
FAMILIES = ("deep gpt2", "deep llama", "deep bert", "plain")
"""Those that are compared in every layout; stages have blocks between their first and last."""
PLAIN_FEATURES = {"up": "column", "down": "row"}


@dataclass(frozen=True)
class Setup:
    """A training job, whatever runs it.

    Args:
        family: the model's name in `MODELS`.
        num_microbatches: microbatches of a step over all replicas.
        num_samples: of the training dataset; batches are of 4.
        dropout: probability.
        empty: build the model without weights.
        padded: give an attention mask, and samples of differing lengths.
        arguments: further training arguments.
    """

    family: str
    num_microbatches: int = 4
    num_samples: int = 64
    dropout: float = 0.0
    empty: bool = False
    padded: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What one process saw of a job.

    Args:
        losses: of every step.
        norms: global gradient norms of every step.
        first: its gradients before the first optimizer step.
        initial: its parameters before it.
        final: its parameters at the end.
        shards: how they lie over tp.
        place: the rank's dp, tp and pp coordinates.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: Mapping[str, Any] = field(default_factory=dict)
    place: Layout = (0, 0, 0)


class Watch(TrainerCallback):
    """Writes down losses, and gradients of the first step."""

    def __init__(self, outcome: Outcome, parameters: Callable[[], Mapping[str, Any]]) -> None:
        self.outcome = outcome
        self.parameters = parameters

    def on_log(self, *args: Any, logs: Mapping[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.outcome.losses.append(logs["loss"])
            self.outcome.norms.append(logs["grad_norm"])

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if not self.outcome.first:
            for name, parameter in self.parameters().items():
                gradient = parameter.grad
                assert gradient is not None, name
                self.outcome.first[name] = gradient.clone()
                self.outcome.initial[name] = parameter.detach().clone()


def arguments_of(setup: Setup, output_dir: str) -> dict[str, Any]:
    """What both trainers are given."""
    # transformers drops columns that the model does not take, unless they are called labels.
    plain = {"label_names": ["labels"]} if setup.family == "plain" else {}
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": 4,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "log_level": "error",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
        "seed": 11,
        **plain,
        **setup.arguments,
    }


def model_of(setup: Setup) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[setup.family](setup.dropout)


def make_merak(setup: Setup, dp: int, cache: str, **kwargs: Any) -> Any:
    """The Merak trainer of a job; `merak.init` has been called."""
    import merak

    if setup.family == "plain":
        kwargs.setdefault("compute_loss_func", loss_of_logits)
    if not {"model", "model_init"} & kwargs.keys():
        with merak.empty_weights() if setup.empty else _as_it_is():
            kwargs["model"] = model_of(setup)
    args = merak.MerakArguments(
        gradient_accumulation_steps=setup.num_microbatches // dp,
        trace_cache=cache,
        feature_dict=PLAIN_FEATURES if setup.family == "plain" else None,
        **arguments_of(setup, tempfile.mkdtemp()),
    )
    kwargs.setdefault("train_dataset", Texts(setup.num_samples, padded=_padded(setup)))
    trainer = kwargs.pop("trainer_class", merak.MerakTrainer)(args=args, **kwargs)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def make_reference(setup: Setup, **kwargs: Any) -> Trainer:
    """The trainer of one process; under `alone`."""
    if setup.family == "plain":
        kwargs.setdefault("compute_loss_func", loss_of_logits)
    args = TrainingArguments(
        gradient_accumulation_steps=setup.num_microbatches,
        **arguments_of(setup, tempfile.mkdtemp()),
    )
    kwargs.setdefault("train_dataset", Texts(setup.num_samples, padded=_padded(setup)))
    trainer_class = kwargs.pop("trainer_class", Trainer)
    if not {"model", "model_init"} & kwargs.keys():
        kwargs["model"] = model_of(setup)
    trainer: Trainer = trainer_class(args=args, **kwargs)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _padded(setup: Setup) -> bool:
    return setup.padded and setup.family != "plain"


def train_merak(layout: Layout, setups: Sequence[Setup], cache: str) -> list[Outcome]:
    """Run some jobs on this rank of a layout, one after another."""
    import merak

    dp, tp, pp, cp = (*layout, 1)[:4]
    mesh = merak.init(dp=dp, tp=tp, pp=pp, cp=cp, device="cpu")
    outcomes = []
    for setup in setups:
        outcome = Outcome(place=(mesh.replicas_rank, mesh.tp_rank, mesh.pp_rank))
        trainer = make_merak(setup, dp, cache)
        trainer.add_callback(Watch(outcome, lambda made=trainer: dict(made.engine.parameters)))
        trainer.train()
        outcome.final = {n: p.detach().clone() for n, p in trainer.engine.parameters.items()}
        outcome.shards = dict(trainer.engine.shards)
        outcomes.append(outcome)
    return outcomes


def train_reference(setups: Sequence[Setup]) -> list[Outcome]:
    """Run some jobs in this process alone."""
    outcomes = []
    for setup in setups:
        outcome = Outcome()
        with alone():
            trainer = make_reference(setup)
            assert isinstance(trainer.model, nn.Module)
            parameters = dict(trainer.model.named_parameters())
            trainer.add_callback(Watch(outcome, lambda found=parameters: found))
            trainer.train()
        outcome.final = {name: p.detach().clone() for name, p in parameters.items()}
        outcomes.append(outcome)
    return outcomes


@contextmanager
def alone() -> Iterator[None]:
    """Let transformers believe that this process is the only one."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    saved = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.update(saved)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
