"""What a callback changes in Python, while a model is trained, is what the next step runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from merak.core.errors import TrainingError
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    VOCABULARY,
    Block,
    Layout,
    Setup,
    alone,
    make_merak,
    make_reference,
)
from tests.tiers import slow

SETUP = Setup(
    "gpt2",
    padded=False,
    arguments={"max_steps": 4, "per_device_eval_batch_size": 4, "max_grad_norm": 1.0},
)

TEMPERATURE = 1.0


class Weighted(nn.Module):
    """A model whose loss depends on Python values of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0
        self.config = SimpleNamespace(scale=1.0)
        self.weights = {"head": 1.0}
        self.takes_skip = True
        self.num_calls = 0
        self.scales = torch.ones(VOCABULARY)
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(Block(width) for width in (8, 64, 32))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        first = x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        x = x + first if self.takes_skip else x
        logits = self.head(x) * self.scales * self.weights["head"] / TEMPERATURE
        logits = logits * torch.full((1,), 0.5, device=logits.device)
        logits = logits.square() if logits.dtype == torch.float64 else logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss * self.weight + self.config.scale * logits.square().mean()}


def set_weight(model: Any, step: int) -> None:
    model.weight = 1.0 + step / 2


def set_item(model: Any, step: int) -> None:
    model.weights["head"] = 1.0 + step / 2


def set_global(model: Any, step: int) -> None:
    global TEMPERATURE
    TEMPERATURE = 1.0 + step / 2


def set_flag(model: Any, step: int) -> None:
    model.takes_skip = step % 2 == 0


def set_dropout(model: Any, step: int) -> None:
    model.config.scale = {0: 1.0, 2: 0.5}.get(step, model.config.scale)


def set_tensor(model: Any, step: int) -> None:
    if step == 1:
        model.scales = torch.linspace(0.5, 2.0, VOCABULARY)
    elif step == 3:
        model.scales.mul_(3.0)


def set_default_dtype(model: Any, step: int) -> None:
    torch.set_default_dtype(torch.float64 if step == 1 else torch.float32)


def freeze(model: Any, step: int) -> None:
    if step == 2:
        for parameter in model.blocks.parameters():
            parameter.requires_grad_(False)


CHANGES = [
    set_weight,
    set_item,
    set_global,
    set_flag,
    set_dropout,
    set_tensor,
    set_default_dtype,
    freeze,
]


class Changing(TrainerCallback):
    """Changes something before every step."""

    def __init__(self, change: Callable[[Any, int], None]) -> None:
        self.change = change

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.change(kwargs["model"], state.global_step)


def seen(trainer: Trainer) -> dict[str, Any]:
    """Losses and norms of a training, and the parameters after it."""
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    model: Any = trainer.model
    held = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
    return {
        "losses": [float(log["loss"]) for log in logs],
        "norms": [float(log["grad_norm"]) for log in logs],
        "parameters": held,
    }


def train_frozen(zero: int, cache: str) -> dict[str, Any]:
    import merak

    merak.init(dp=2, device="cpu")
    setup = Setup("gpt2", padded=False, arguments=dict(SETUP.arguments) | {"zero": zero})
    found = seen(make_merak(setup, 2, cache, model=model(), callbacks=[Changing(freeze)]))
    return {kind: found[kind] for kind in ("losses", "norms")}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, slow(3)])
def test_frozen_parameters_of_sharded_optimizers_stay(
    pool: RankPool, cache: str, zero: int
) -> None:
    expected = reference(CHANGES.index(freeze))
    for found in pool.run(train_frozen, 2, zero, cache):
        for kind in ("losses", "norms"):
            torch.testing.assert_close(found[kind], expected[kind], rtol=1e-4, atol=1e-5)


def model() -> nn.Module:
    torch.manual_seed(5)
    return Weighted()


def train(layout: Layout, numbers: list[int], cache: str) -> list[dict[str, Any]]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = []
    for number in numbers:
        set_global(None, 0)
        callbacks = [Changing(CHANGES[number])]
        found.append(seen(make_merak(SETUP, dp, cache, model=model(), callbacks=callbacks)))
    return found


def reference(number: int) -> dict[str, Any]:
    set_global(None, 0)
    with alone():
        trainer = make_reference(SETUP, callbacks=[Changing(CHANGES[number])], model=model())
        return seen(trainer)


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        ((1, 1, 2), [CHANGES.index(set_weight), CHANGES.index(set_tensor)]),
        slow((1, 1, 2), range(len(CHANGES))),
        slow((1, 2, 1), range(len(CHANGES))),
    ],
)
def test_changes_take_effect(
    pool: RankPool, cache: str, layout: Layout, numbers: Sequence[int]
) -> None:
    for number, *ranks in zip(numbers, *pool.run(train, 2, layout, numbers, cache), strict=True):
        expected = reference(number)
        for rank in ranks:
            for kind in ("losses", "norms"):
                torch.testing.assert_close(rank[kind], expected[kind], rtol=1e-4, atol=1e-5)
            for name, parameter in rank["parameters"].items() if layout[1] == 1 else ():
                torch.testing.assert_close(
                    parameter, expected["parameters"][name], rtol=1e-3, atol=1e-4
                )


@pytest.mark.slow
def test_a_replaced_tensor_takes_effect_on_replicas_of_two_stages(
    pool: RankPool, cache: str
) -> None:
    number = CHANGES.index(set_tensor)
    expected = reference(number)
    assert len({round(loss, 2) for loss in expected["losses"]}) == len(expected["losses"])
    for (found,) in pool.run(train, 4, (2, 1, 2), [number], cache):
        for kind in ("losses", "norms"):
            torch.testing.assert_close(found[kind], expected[kind], rtol=1e-4, atol=1e-5)
        for name, parameter in found["parameters"].items():
            torch.testing.assert_close(
                parameter, expected["parameters"][name], rtol=1e-3, atol=1e-4
            )


def set_on_rank_0(model: Any, step: int) -> None:
    if step == 1 and os.environ["RANK"] == "0":
        model.weight = 2.0


def thaw(model: Any, step: int) -> None:
    model.head.bias.requires_grad_(step > 0)


REFUSED = [set_on_rank_0, thaw]


def refused(layout: Layout, cache: str) -> list[str]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    said = []
    for change in REFUSED:
        made = model()
        change(made, 0)
        trainer = make_merak(SETUP, dp, cache, model=made, callbacks=[Changing(change)])
        with pytest.raises(TrainingError) as caught:
            trainer.train()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("layout", [(1, 1, 2), slow((2, 1, 1))])
def test_what_cannot_be_followed_is_refused(pool: RankPool, cache: str, layout: Layout) -> None:
    for alone_on_rank_0, thawed in pool.run(refused, 2, layout, cache):
        assert alone_on_rank_0.startswith("model.weight is 2.0 on rank 0 and unchanged on rank 1")
        assert thawed.startswith("head.bias was frozen when training began")
