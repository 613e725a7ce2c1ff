"""A GAN: both losses in one module, an optimizer's settings for each of its networks.

torchrun --nproc-per-node 2 examples/training/gan.py --pp 2
"""

import argparse
from collections.abc import Iterator

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits

import merak

NOISE, WIDTH, SAMPLES = 8, 32, 64


def layers(num_in: int, num_out: int) -> nn.Sequential:
    """A small network."""
    return nn.Sequential(
        nn.Linear(num_in, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
        nn.Linear(WIDTH, num_out),
    )  # fmt: skip


def judged(logits: torch.Tensor, is_real: bool) -> torch.Tensor:
    """Loss of a critic's answers."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


class Gan(nn.Module):
    """A generator and its critic, with the sum of both losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = layers(NOISE, 2), layers(2, 1)

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        fake = self.generator(noise)
        # The generator's loss passes through the critic, and must not train it.
        frozen = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        fooled = judged(functional_call(self.critic, frozen, (fake,)), True)
        # The critic's loss ends at the samples.
        caught = judged(self.critic(real), True) + judged(self.critic(fake.detach()), False)
        return {"loss": fooled + caught, "fooled": fooled, "caught": caught}


def optimizer_of(model: Gan) -> torch.optim.Optimizer:
    """One optimizer with a group of settings for each network; it steps as two of them would."""
    return torch.optim.Adam(
        [
            {"params": model.generator.parameters(), "lr": 1e-3, "betas": (0.5, 0.999)},
            {"params": model.critic.parameters(), "lr": 4e-3, "betas": (0.0, 0.9)},
        ]
    )


def batches(num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Noise, and points of a ring."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        angle = torch.rand(SAMPLES, generator=generator) * 6.283
        ring = torch.stack([angle.cos(), angle.sin()], dim=1)
        yield {"noise": torch.randn(SAMPLES, NOISE, generator=generator), "real": ring}


def train(num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and on rank 0 the weights behind them."""
    model = Gan()
    parallel = merak.parallelize(
        model,
        next(batches(1)),
        optimizer=lambda _: optimizer_of(model),
        num_microbatches=4,
    )
    losses = [parallel.step(batch).item() for batch in batches(num_steps)]
    return losses, parallel.gather_state_dict()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for axis in ("dp", "tp", "pp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=200)
    options = parser.parse_args()
    mesh = merak.init(options.dp, options.tp, options.pp)
    losses, _ = train(options.max_steps)
    if mesh.rank == 0:
        print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
