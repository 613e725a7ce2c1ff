"""Weights that a forward clips, norms or limits, on real ranks: as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import merak
from merak.check import Case, CheckOptions, Job, Layout
from merak.core.errors import ScheduleError
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow

WIDTH, WORDS, LENGTH = 16, 12, 6
Batch = dict[str, torch.Tensor]


class Clipped(nn.Linear):
    """Weights in a box, wherever the optimizer takes them; the bias as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            self.bias.copy_(self.bias.tanh().clamp(-0.05, 0.05).sign() * 0.05)
        return functional.linear(x, self.weight, self.bias)


class Normed(nn.Linear):
    """Rows of length one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return functional.linear(x, self.weight, self.bias)


class Limited(nn.Module):
    """A table of limited rows, and blocks whose weights are written; the first runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=0.7)
        ups = (Clipped(WIDTH, 32), Normed(WIDTH, 32), Normed(WIDTH, 32))
        self.ups = nn.ModuleList(ups)
        self.downs = nn.ModuleList(Clipped(32, WIDTH) for _ in ups)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.words(x)
        for i in (0, 1, 2, 0):
            h = h + self.downs[i](torch.tanh(self.ups[i](h)))
        logits = self.head(h)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), y.flatten())}


def batch_of(step: int, samples: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    return {"x": x, "y": (x + 1) % WORDS}


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(pp=2), "gpipe"),
        slow(Layout(dp=2, pp=2), "zero_bubble_h1"),
        slow(Layout(tp=2, pp=2), "early_recompute"),
    ],
)
def test_as_in_one_process(pool: RankPool, layout: Layout, schedule: str) -> None:
    options = CheckOptions(schedule, num_microbatches=2, steps=3, evaluate=layout.dp == 1)
    job = Job(Case("Limited", Limited, batch_of), layout, options)
    report = check_on(pool, job)
    assert report.tolerance == 1e-5


def train(degrees: tuple[int, int, int], settings: list[dict[str, Any]]) -> list[Any]:
    """Per setting, the losses of some steps and then the parameters; or why it was refused."""
    merak.init(*degrees, device="cpu")
    dp = degrees[0]
    rank = int(torch.distributed.get_rank()) if dp > 1 else 0
    found: list[Any] = []
    for options in settings:
        torch.manual_seed(3)
        block = options.pop("block", Clipped)
        model = nn.Sequential(block(WIDTH, 32), nn.Tanh(), block(32, WIDTH))
        model = model.to(options.pop("dtype", torch.float32))
        dtype = model[0].weight.dtype
        batches = [
            torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
        ]
        own = [{"input": batch.to(dtype).chunk(dp)[rank]} for batch in batches]
        try:
            parallel = merak.parallelize(
                model, own[0], num_microbatches=4 // dp, loss_fn=far,
                optimizer=partial(torch.optim.SGD, lr=0.5), **options,
            )  # fmt: skip
        except ScheduleError as error:
            found.append(str(error))
            continue
        losses = [float(parallel.step(batch)) for batch in (*own, *own)]
        with parallel.engine.whole_model():
            parameters = dict(parallel.model.named_parameters())
            found.append((losses, {n: p.detach().float() for n, p in parameters.items()}))
    return found


def far(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Pulls weights out of their box."""
    return (output.float() - 3).square().mean()


def test_replicas_that_share_the_optimizer_or_the_weights(pool: RankPool) -> None:
    half: dict[str, Any] = {"dtype": torch.bfloat16, "master_weights": True}
    plain = [{}, half, {"block": Normed}]
    shared: list[dict[str, Any]] = [
        *({**plain[0], "zero": zero} for zero in (1, 2, 3)),
        *({**plain[1], "zero": zero} for zero in (1, 2, 3)),
        {**plain[2], "zero": 2},
        {**plain[2], "zero": 3},
    ]
    ((single, single_half, normed),) = pool.run(train, 1, (1, 1, 1), [dict(p) for p in plain])
    for name, value in single_half[1].items():  # masters that go their own way end elsewhere
        assert torch.allclose(value, single[1][name], atol=5e-3), name
    expected = [*[single] * 3, *[single_half] * 3, normed]
    for *own, refused in pool.run(train, 2, (2, 1, 1), shared):
        assert "zero=3 holds shards of '0.weight', into which the model writes" in refused
        for (losses, parameters), (wanted, others) in zip(own, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5)
            for name, value in parameters.items():
                assert torch.allclose(value, others[name], rtol=1e-5, atol=1e-6), name


def test_schedules_that_update_inside_a_step_are_refused(pool: RankPool) -> None:
    for (sentence,) in pool.run(train, 2, (1, 1, 2), [{"schedule": "pipedream"}]):
        assert "schedule='pipedream' updates weights inside a step" in sentence
