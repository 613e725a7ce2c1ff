"""Train a plain PyTorch module, with its loss inside or beside it, by the trainer.

torchrun --nproc-per-node 2 examples/plain_pytorch.py --loss inside
torchrun --nproc-per-node 2 examples/plain_pytorch.py --loss beside
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import demo
import merak

NUM_BEFORE = 16


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    """Guesses a byte from the bytes before it; knows nothing of a loss."""

    def __init__(self, width: int = 128, num_blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // 4)
        self.merge = nn.Linear(NUM_BEFORE * width // 4, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.head = nn.Linear(width, 256)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.merge(self.embedding(context).flatten(1))))


class NextByteWithLoss(NextByte):
    """The same, and returns its loss, as transformers' models do."""

    def forward(self, context: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(context)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def loss_beside(outputs, labels, num_items_in_batch=None):
    """A loss function as `transformers.Trainer` takes it, of what the model returns.

    One step's microbatches add up, so each counts for its share of the step's labels.
    """
    if num_items_in_batch is None:
        return cross_entropy(outputs, labels)
    return cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--loss", choices=("inside", "beside"), default="inside")
parser.add_argument("--output-dir", default="runs/plain_pytorch", help="where the model goes")
parser.add_argument("--max-steps", type=int, default=300, help="optimizer steps")
parser.add_argument(
    "--degrees",
    type=int,
    nargs=3,
    default=demo.default_degrees(max_tp=1),
    metavar=("DP", "TP", "PP"),
)
options = parser.parse_args()
merak.init(*options.degrees)

inside = options.loss == "inside"
trainer = merak.MerakTrainer(
    model=NextByteWithLoss() if inside else NextByte(),
    compute_loss_func=None if inside else loss_beside,
    args=merak.MerakArguments(
        output_dir=options.output_dir,
        max_steps=options.max_steps,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=256,
        learning_rate=2e-3,
        label_names=["labels"],  # as for transformers, where forward does not take the labels
        dataloader_pin_memory=torch.cuda.is_available(),
        include_num_input_tokens_seen="all",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=demo.next_byte_samples(100_000, NUM_BEFORE, seed=1),
    eval_dataset=demo.next_byte_samples(2_000, NUM_BEFORE, seed=2),
)
demo.show_progress(trainer)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
trainer.save_model()
if trainer.is_world_process_zero():
    print(f"{loss:.3f} nats per byte; guessing at random gives 5.545")
    print(f"The weights are in {options.output_dir}, under the module's own parameter names.")
