"""Frozen parameters and adapters: the gradients of one process, and nothing for what is frozen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import merak
from merak.engine.segments import joint_call
from merak.schedule.steps import Payload
from tests.multirank.compare import whole
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    SEQUENCE,
    VOCABULARY,
    Layout,
    Outcome,
    gpt2,
    llama,
    loss_of_logits,
)
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

MICROBATCHES, SAMPLES, STEPS = 4, 2, 2


class LowRank(nn.Module):
    """A frozen linear and a trained product of two small ones beside it."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(size_in, size_out).requires_grad_(False)
        self.down = nn.Linear(size_in, 4, bias=False)
        self.up = nn.Linear(4, size_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = LowRank(16, 24) if trained else nn.Linear(16, 24)
        self.second = LowRank(24, 16) if trained else nn.Linear(24, 16)
        (self.norm if trained else self).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Adapted(nn.Module):
    """Adapters in the last two of four blocks; all else is frozen, the embedding and head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(trained=i > 1) for i in range(4))
        self.head = nn.Linear(16, VOCABULARY).requires_grad_(False)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def head_alone() -> nn.Module:
    """A GPT-2 whose tied embedding is trained, and its last norm; the blocks are frozen."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wte" in name or "ln_f" in name)
    return model


def frozen_tie() -> nn.Module:
    """A GPT-2 whose tied embedding is frozen."""
    model = gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.1" in name)
    return model


def low_rank_llama() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    adapted: nn.Module = peft.get_peft_model(llama(), config)
    return adapted


MODELS = {
    "adapted": Adapted,
    "head alone": head_alone,
    "frozen tie": frozen_tie,
    "peft": low_rank_llama,
}
FEATURES = {
    "first.base": merak.Column(), "first.up": merak.Column(),
    "second.base": merak.Row(), "second.down": merak.Row(),
}  # fmt: skip


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]()


def loss_fn(outputs: Any, batch: Any) -> torch.Tensor:
    return loss_of_logits(outputs, batch["labels"])


def batch_of(step: int) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (MICROBATCHES * SAMPLES, SEQUENCE), generator=draws)
    return {"input_ids": ids, "labels": ids}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Costs:
    """Counts what a rank spends on gradients while it is entered."""

    def __init__(self, parallel: Any) -> None:
        self.seen: Counter[str] = Counter()
        self._transfers = parallel.engine._state.transfers
        self._all_reduce, self._send = dist.all_reduce, self._transfers.send
        self._save = joint_call._end_forward

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):  # gradients; losses are waited for
            self.seen["reduced"] += tensor.numel()
        return self._all_reduce(tensor, *args, **kwargs)

    def send(self, step: Any, tensors: Any) -> None:
        if step.payload is Payload.GRADIENT:
            self.seen["sent"] += sum(tensor.numel() for tensor in tensors)
        self._send(step, tensors)

    def save_forward(self, run: Any, made: Any, *others: Any) -> Any:
        outputs = self._save(run, made, *others)
        self.seen["saved"] += sum(tensor.numel() for tensor in made.saved or ())
        return outputs

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen["saved"] += tensor.numel()
        return tensor

    def __enter__(self) -> Counter[str]:
        self._patches = [
            mock.patch("merak.engine.comm.gradient_buckets.dist.all_reduce", self.all_reduce),
            mock.patch.object(self._transfers, "send", self.send),
            mock.patch.object(joint_call, "_end_forward", self.save_forward),
            saved_tensors_hooks(self.save, lambda tensor: tensor),
        ]
        for patch in self._patches:
            patch.__enter__()
        return self.seen

    def __exit__(self, *error: Any) -> None:
        for patch in self._patches:
            patch.__exit__(*error)


def run_parallel(
    layout: Layout, kind: str, schedule: str, sizes: tuple[int, ...] | None = None
) -> tuple[Outcome, Counter[str]]:
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def share(step: int) -> dict[str, torch.Tensor]:
        parts = [c.split(SAMPLES)[mesh.dp_rank :: dp] for c in batch_of(step).values()]
        return {n: torch.cat(c) for n, c in zip(("input_ids", "labels"), parts)}

    parallel = merak.parallelize(
        model_of(kind),
        share(0),
        loss_fn=loss_fn,
        optimizer=adamw,
        num_microbatches=MICROBATCHES // dp,
        schedule=schedule,
        partition=sizes,
        feature_dict=FEATURES if kind == "adapted" else None,
    )
    outcome = Outcome(place=(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank))
    for step in range(STEPS):
        with Costs(parallel) as seen:
            outcome.losses.append(float(parallel.step(share(step))))
        if step == 0:
            named = parallel.engine.parameters.items()
            outcome.first = {n: p.grad.clone() for n, p in named if p.grad is not None}
    named = parallel.engine.parameters.items()
    outcome.final = {n: p.detach().clone() for n, p in named}
    outcome.shards = dict(parallel.engine.shards)
    states = parallel.optimizer.state if parallel.optimizer is not None else {}
    assert all(parameter.requires_grad for parameter in states)
    return outcome, seen


def run_alone(kind: str) -> Outcome:
    outcome = Outcome()
    model = model_of(kind)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for number in range(MICROBATCHES):
            part = {n: c.split(SAMPLES)[number] for n, c in batch_of(step).items()}
            loss = loss_fn(model(part["input_ids"]), part) / MICROBATCHES
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        outcome.losses.append(sum(losses))
        if step == 0:
            named = model.named_parameters()
            outcome.first = {n: p.grad.clone() for n, p in named if p.grad is not None}
    outcome.final = {n: p.detach().clone() for n, p in model.named_parameters()}
    return outcome


@pytest.mark.parametrize(
    ("kind", "layout", "schedule"),
    [
        ("adapted", (1, 2, 2), "early_recompute"),
        slow("adapted", (1, 1, 2), "chimera"),
        slow("head alone", (2, 1, 2), "interleaved_1f1b"),
        slow("frozen tie", (1, 1, 3), "zero_bubble_v"),
        slow("peft", (1, 1, 2), "shifted_critical_path"),
    ],
)
def test_what_is_trained_gets_the_gradients_of_one_process(
    pool: RankPool, kind: str, layout: Layout, schedule: str
) -> None:
    expected = run_alone(kind)
    dp, tp, pp = layout
    results = pool.run(run_parallel, dp * tp * pp, layout, kind, schedule)
    ranks = [outcome for outcome, _ in results]
    assert ranks[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert_gradients_equal(whole(ranks, "first"), expected.first)
    final = whole(ranks, "final")
    for name, value in expected.final.items():
        if name not in expected.first:
            assert torch.equal(final[name], value), name


def test_what_is_frozen_costs_nothing(pool: RankPool) -> None:
    """The first stage is frozen, and the second sends no gradient of its input to it."""
    results = pool.run(run_parallel, 4, (2, 1, 2), "adapted", "1f1b", (3, 3))
    trained = sum(gradient.numel() for gradient in run_alone("adapted").first.values())
    for outcome, seen in results:
        if outcome.place[2] == 0:
            assert not outcome.first
            assert seen == Counter()
        else:
            assert seen["sent"] == 0
            assert seen["reduced"] == trained
            assert seen["saved"] > 0


@pytest.mark.slow
def test_asynchronous_updates_leave_what_is_frozen(pool: RankPool) -> None:
    results = pool.run(run_parallel, 2, (1, 1, 2), "adapted", "pipedream_2bw")
    expected = model_of("adapted")
    for outcome, _ in results:
        for name, value in outcome.final.items():
            parameter = expected.get_parameter(name)
            assert torch.equal(value, parameter) == (not parameter.requires_grad), name
