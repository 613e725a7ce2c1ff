"""Keep your own training loop: `merak.parallelize` gives a step that trains on one batch.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader, DistributedSampler

import demo
import merak

BLOCK, VOCABULARY = 64, 1024


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        q, k, v = heads(self.queries(x)), heads(self.keys(x)), heads(self.values(x))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward, each added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads=4)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """A language model like any that one writes for one device."""

    def __init__(self, width: int = 96, num_layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(BLOCK, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(num_layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.head(self.layers(self.tokens(input_ids) + self.places(places)))


def next_token_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every token but a block's first is a label."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data-dir", default="runs/data", help="where the tokenized text is kept")
parser.add_argument("--max-steps", type=int, default=200, help="optimizer steps")
parser.add_argument(
    "--degrees",
    type=int,
    nargs=3,
    default=demo.default_degrees(max_tp=1),
    metavar=("DP", "TP", "PP"),
)
options = parser.parse_args()
mesh = merak.init(*options.degrees)

corpus = demo.build_corpus(options.data_dir, vocab_size=VOCABULARY, block_size=BLOCK)
samples = corpus.train.with_format("torch")
# Every replica has samples of its own; all ranks of one replica take the same batch.
sampler = DistributedSampler(samples, num_replicas=mesh.dp, rank=mesh.dp_rank, seed=0)
batches = DataLoader(samples, batch_size=32, sampler=sampler, drop_last=True)
held_out = corpus.held_out.with_format("torch")[:128]

torch.manual_seed(0)
parallel = merak.parallelize(
    Decoder(),
    example_batch=next(iter(batches)),
    loss_fn=next_token_loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    num_microbatches=4,
    max_grad_norm=1.0,
)
for number, batch in zip(range(1, options.max_steps + 1), batches, strict=False):
    loss = parallel.step(batch)
    if mesh.rank == 0 and (number % 20 == 0 or number == options.max_steps):
        print(f"step {number:4d}  loss {loss.item():.3f}", flush=True)

loss = parallel.evaluate(held_out).item()
if mesh.rank == 0:
    print(f"held out   loss {loss:.3f}; token frequencies alone give {corpus.unigram_loss:.3f}")
