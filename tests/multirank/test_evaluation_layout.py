"""What evaluation alone runs or returns: as in one process, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

from merak.core.errors import MerakError
from tests.multirank.ranks import RankPool
from tests.multirank.training import VOCABULARY, Setup, Texts, make_merak
from tests.tiers import slow

WIDTH, GROUPS, LENGTH = 16, 4, 6

STATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "padded": lambda z, xbc: F.pad(xbc.transpose(1, 2), (2, 0)),
    "shortened": lambda z, xbc: F.pad(xbc.transpose(1, 2), (4 - LENGTH, 0)),
    "flipped": lambda z, xbc: xbc.flip(-1),
    "fused": lambda z, xbc: xbc,
    "largest": lambda z, xbc: z.topk(3, -1)[0],
    "ordered": lambda z, xbc: z.sort(-1)[0] + xbc.cumsum(-1)[..., :WIDTH],
    "written": lambda z, xbc: z.clone().index_fill_(-1, torch.tensor([0, 5, 9]), 0.0),
    "scattered": lambda z, xbc: xbc.clone().scatter_(-1, xbc.argmax(-1, keepdim=True), 7.0),
}


class Mixer(nn.Module):
    """A causal convolution between fused projections, which returns a state beside its result."""

    def __init__(self, state: str) -> None:
        super().__init__()
        width = WIDTH + 2 * GROUPS
        self.state = STATES[state]
        self.inner, self.out = nn.Linear(WIDTH, WIDTH + width), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(width, width, 4, groups=width, padding=3)

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z, xbc = self.inner(u).split([WIDTH, WIDTH + 2 * GROUPS], -1)
        state = self.state(z, xbc)
        xbc = F.silu(self.conv(xbc.transpose(1, 2))[..., : u.shape[1]].transpose(1, 2))
        x, b, c = xbc.split([WIDTH, GROUPS, GROUPS], -1)
        weight = (b.softmax(-1) * c.softmax(-1)).sum(-1, keepdim=True)
        return self.out(x * weight * F.silu(z)), state


class Mixers(nn.Module):
    """Mixers in a row, which return all states."""

    def __init__(self, state: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer(state) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        states = []
        for layer in self.layers:
            y, state = layer(x)
            x, states = x + y, [*states, state]
        return {"loss": (x - 1).square().mean(), "states": states}


def _batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))}


def _made(state: str) -> Mixers:
    torch.manual_seed(0)
    return Mixers(state)


def evaluate_states(tp: int, pp: int, sequence: bool) -> dict[str, Any]:
    import merak
    from merak.data import signature

    merak.init(tp=tp, pp=pp, device="cpu")
    batch, found = _batch(), {}
    for state in STATES:
        options = {"sequence_parallel": True} if sequence else {}
        parallel = merak.parallelize(_made(state), batch, num_microbatches=1, **options)
        loss = parallel.step(batch).item()
        (outputs,) = parallel.engine.evaluate([signature(batch).columns], [batch])
        found[state] = (loss, {n: t for n, t in outputs.items() if n != "loss"})
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "sequence"), [(2, 1, False), slow(2, 1, True), slow(1, 2, False)]
)
def test_outputs_that_training_drops(pool: RankPool, tp: int, pp: int, sequence: bool) -> None:
    ranks = pool.run(evaluate_states, tp * pp, tp, pp, sequence)
    for state in STATES:
        with torch.no_grad():
            alone = _made(state).eval()(**_batch())
        for rank in ranks:
            assert rank[state][0] == pytest.approx(float(alone["loss"]), rel=1e-5)
        seen = [tensor for rank in ranks[::tp] for tensor in rank[state][1].values()]
        for tensor, wanted in zip(seen, alone["states"], strict=True):
            torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)


def gathered_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    import merak
    from merak.ops.collectives import gather_parts

    mesh = merak.init(tp=2, device="cpu")
    whole = torch.arange(16.0).view(2, 8)
    own = torch.cat([whole[:, 2 * mesh.tp_rank :][:, :2], whole[:, 4:]], 1).requires_grad_()
    joined = gather_parts(own, 1, (4, 3, 1), (1, 2), "tp")
    assert torch.equal(joined, whole)
    (joined * whole).sum().backward()
    assert own.grad is not None
    return own.grad[:, :2], own.grad[:, 2:]


def test_the_gradient_of_gathered_parts(pool: RankPool) -> None:
    first, second = pool.run(gathered_gradient, 2)
    whole = torch.arange(16.0).view(2, 8)
    assert torch.equal(torch.cat([first[0], second[0]], 1), whole[:, :4])
    assert torch.equal(first[1] + second[1], whole[:, 4:])


class NormHead(nn.Linear):
    """A head whose weight is normalised in training, and replaced by that in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.normalize(self.weight)
        if not self.training:
            self.weight.data = weight
        return F.linear(x, weight)


class Normed(nn.Module):
    """Blocks in front of such a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)
        )
        self.head = NormHead(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x) - 1).square().mean()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def evaluate_normed(tp: int, pp: int) -> tuple[list[float], torch.Tensor | None]:
    import merak

    merak.init(tp=tp, pp=pp, device="cpu")
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))}
    parallel = merak.parallelize(
        Normed(), batch, num_microbatches=2, optimizer=_sgd, evaluates=True
    )
    losses = []
    for _ in range(2):
        losses += [float(parallel.step(batch)), float(parallel.step(batch))]
        losses += [float(parallel.evaluate(batch))]
    return losses, parallel.gather_state_dict().get("head.weight")


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), slow(2, 1)])
def test_a_head_that_evaluation_replaces(pool: RankPool, tp: int, pp: int) -> None:
    ranks = pool.run(evaluate_normed, 2, tp, pp)
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))}
    model = Normed()
    optimizer, wanted = _sgd(model.parameters()), []
    for _ in range(2):
        for _ in range(2):
            loss = model.train()(**batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(float(loss.detach()))
        wanted.append(float(model.eval()(**batch).detach()))
    for losses, _ in ranks:
        assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(ranks[0][1], model.head.weight.detach(), rtol=1e-5, atol=1e-6)


class Reported(nn.Module):
    """A language model whose evaluation cannot be traced, or gives no loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        if self.how == "data" and not self.training:
            x.data = x.data * 2
        logits = self.head(x)
        if self.how == "no loss" and not self.training:
            return {"logits": logits}
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Streamed(IterableDataset[Any]):
    """Samples one after another."""

    def __init__(self, rows: Texts) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


class Steps(TrainerCallback):
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


EVALUATIONS: dict[str, dict[str, Any]] = {
    "strategy": {"eval_strategy": "epoch"},
    "do_eval": {"do_eval": True},
    "first": {"eval_on_start": True},
    "none": {},
}


def train_reported(how: str, evaluated: str, kind: str) -> tuple[int, str]:
    import merak

    merak.init(pp=2, device="cpu")
    rows = Texts(10, seed=7, padded=False)
    data: Any = {"one": rows, "two": Texts(5, seed=8, padded=False)}
    data = {"dict": data, "stream": Streamed(rows), "rows": rows}[kind]
    setup = Setup(
        "gpt2",
        padded=False,
        arguments={"max_steps": 1, "per_device_eval_batch_size": 4, **EVALUATIONS[evaluated]},
    )
    steps = Steps()
    trainer = make_merak(setup, 1, "", model=Reported(how), eval_dataset=data, callbacks=[steps])
    try:
        trainer.train()
    except MerakError as error:
        return steps.count, str(error)
    return steps.count, ""


@pytest.mark.parametrize(
    ("how", "evaluated", "kind", "said"),
    [
        ("data", "strategy", "rows", "this job evaluates, and the model cannot run in evaluation"),
        slow("data", "first", "stream", "this job evaluates, and the model cannot run in eval"),
        slow("no loss", "strategy", "rows", "the model returns no loss for the labels"),
        slow("data", "none", "rows", ""),
    ],
)
def test_an_evaluation_is_laid_out_before_the_first_step(
    pool: RankPool, how: str, evaluated: str, kind: str, said: str
) -> None:
    for count, message in pool.run(train_reported, 2, how, evaluated, kind):
        assert count == (0 if said else 1)
        assert message.startswith(said)
        assert not said or how != "data" or f"{__file__}:" in message
