"""Adversarial training (FGM): a second loss at embeddings moved along the gradient of the first.

torchrun --nproc-per-node 2 examples/training/adversarial.py --tp 2
"""

import argparse
from typing import Any

import torch
import transformers

import merak

VOCABULARY, LENGTH, SAMPLES, RADIUS = 64, 12, 64, 0.5


class Adversarial:
    """A trainer's loss, and that at adversarial embeddings; for any trainer of transformers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # a mean over a microbatch, not over the step

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        words = model.get_input_embeddings()(inputs["input_ids"])
        plain = model(inputs_embeds=words, labels=inputs["labels"])
        (slope,) = torch.autograd.grad(plain.loss, [words], retain_graph=True)
        moved = words + (RADIUS * slope / (slope.norm() + 1e-12)).detach()
        loss = plain.loss + model(inputs_embeds=moved, labels=inputs["labels"]).loss
        return (loss, plain) if return_outputs else loss


class AdversarialTrainer(Adversarial, merak.MerakTrainer):
    """Merak's trainer with this loss."""


def classifier() -> transformers.PreTrainedModel:
    """A small BERT that sorts sequences into two classes, without dropout."""
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def dataset() -> list[dict[str, torch.Tensor]]:
    """Sequences, and whether the first token's number is larger than the second's."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": (row[0] > row[1]).long()} for row in rows]


def settings(output_dir: str, num_steps: int) -> dict[str, Any]:
    """Training arguments, of transformers alone."""
    return {
        "output_dir": output_dir, "max_steps": num_steps, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--output-dir", default="runs/adversarial")
    options = parser.parse_args()
    merak.init(options.dp, options.tp, options.pp)
    args = merak.MerakArguments(**settings(options.output_dir, options.max_steps))
    AdversarialTrainer(model=classifier(), args=args, train_dataset=dataset()).train()
