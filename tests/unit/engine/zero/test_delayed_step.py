"""Delayed updates beside a loop of plain PyTorch that holds every step's gradients back."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import ArgumentsError, MerakError, TrainingError
from merak.parallel import ParallelModel
from merak.plan.optimizer import home
from tests.unit.engine.models import gpt2, text_batch

pytestmark = pytest.mark.usefixtures("one_rank")

DELAYED = {"offload_optimizer": "cpu", "delay_optimizer_update": True}

BATCH = {name: torch.cat([column] * 2) for name, column in text_batch().items()}

Optimizer = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)


class Plain:
    """Training in plain PyTorch, with the update of every step behind the next one's backward."""

    def __init__(self, model: nn.Module, optimizer: Any = Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer(model.parameters())
        self.held: list[torch.Tensor | None] = []
        self.rate = 0.0

    def step(self, batch: Mapping[str, torch.Tensor], max_norm: float | None = None) -> float:
        """Two microbatches at the parameters of the update before, and that of the last step."""
        losses = []
        for half in zip(*(column.chunk(2) for column in batch.values()), strict=True):
            loss = self.model(**dict(zip(batch, half, strict=True))).loss / 2
            loss.backward()
            losses.append(loss.detach())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        found = [parameter.grad for parameter in self.model.parameters()]
        self.update()
        self.held, self.rate = found, self.optimizer.param_groups[0]["lr"]
        return float(sum(losses))

    def update(self) -> None:
        """Step the gradients that are held, with the learning rate that their step had."""
        (group,) = self.optimizer.param_groups
        now, group["lr"] = group["lr"], self.rate
        held = self.held or [None for _ in self.model.parameters()]
        for parameter, gradient in zip(self.model.parameters(), held, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.held, group["lr"] = [], now


def delayed(model: nn.Module, optimizer: Any = Optimizer, **options: Any) -> ParallelModel:
    """The same with Merak."""
    options = {"num_microbatches": 2} | DELAYED | options
    return merak.parallelize(model, BATCH, optimizer=optimizer, **options)


def both(**options: Any) -> tuple[Plain, ParallelModel]:
    return Plain(gpt2()), delayed(gpt2(), **options)


def assert_same(plain: Plain, own: ParallelModel) -> None:
    """The same parameters, with all updates, and the same states of the optimizer."""
    plain.update()
    found = own.gather_state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(found[name], value), name
    assert own.optimizer is not None
    states = plain.optimizer.state_dict()["state"], own.optimizer.state_dict()["state"]
    assert states[0].keys() == states[1].keys() and states[0]
    for number, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(states[1][number][name], value), (number, name)


def test_losses_and_parameters_are_those_of_a_loop_that_holds_gradients_back() -> None:
    home_bytes, home.PART_BYTES = home.PART_BYTES, 2**10
    plain, own = both()
    try:
        for number in range(5):
            assert float(own.step(BATCH)) == plain.step(BATCH)
            rate = 1e-2 / (number + 2)
            for optimizer in (plain.optimizer, own.optimizer):
                assert optimizer is not None
                optimizer.param_groups[0]["lr"] = rate
            if number == 2:  # which ends the delay: the step behind it has all updates
                plain.update()
                own.evaluate(BATCH)
        assert_same(plain, own)
    finally:
        home.PART_BYTES = home_bytes


def test_gradients_are_clipped_before_they_are_held_back() -> None:
    plain, own = both(max_grad_norm=0.1)
    for _ in range(3):
        assert float(own.step(BATCH)) == pytest.approx(plain.step(BATCH, 0.1), rel=1e-6)


@pytest.mark.parametrize("folder", [False, True])
def test_a_job_that_resumes_goes_on_as_the_one_that_saved(folder: bool, tmp_path: Path) -> None:
    where = {"offload_optimizer": str(tmp_path / "states")} if folder else {}
    own = delayed(gpt2(), **where)
    own.step(BATCH), own.step(BATCH)
    own.save_checkpoint(tmp_path / "saved")
    again = delayed(gpt2(), **where)
    again.step(BATCH)  # of whose update nothing is left
    again.load_checkpoint(tmp_path / "saved")
    expected = [float(own.step(BATCH)) for _ in range(3)]
    assert [float(again.step(BATCH)) for _ in range(3)] == expected
    found, values = again.gather_state_dict(), own.gather_state_dict()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_what_a_script_does_between_steps_is_kept() -> None:
    sgd = partial(torch.optim.SGD, lr=0.5)
    plain, own = Plain(gpt2(), sgd), delayed(gpt2(), sgd)
    hooked = list[int]()

    def doubled(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """A hook of the script's own, which changes gradients before they are stepped."""
        for group in optimizer.param_groups:
            hooked.append(sum(p.grad is not None for p in group["params"]))
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(2)

    assert own.optimizer is not None
    own.optimizer.register_step_pre_hook(doubled)
    for number in range(4):
        plain.rate = 1.0
        plain.optimizer.param_groups[0]["lr"] = 1.0
        assert float(own.step(BATCH)) == pytest.approx(plain.step(BATCH), rel=1e-5)
        own.optimizer.zero_grad(set_to_none=False)  # of gradients that are held back
        with torch.no_grad():
            for model in (plain.model, own.model):
                if number % 2:
                    model.transformer.h[0].mlp.c_fc.weight.mul_(0.5)
                else:
                    model.transformer.wte.weight.data[3] = 7.0
    plain.update()
    assert min(hooked) == len(list(plain.model.parameters()))
    found = own.gather_state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_left_out_lets_the_update_before_wait() -> None:
    plain, own = both(nan_policy="skip")
    plain.step(BATCH), own.step(BATCH)
    with torch.no_grad():
        own.model.transformer.wte.weight[0, 0] = torch.nan
    own.step(BATCH)
    with torch.no_grad():
        own.model.transformer.wte.weight[0, 0] = plain.model.transformer.wte.weight[0, 0]
    assert float(own.step(BATCH)) == plain.step(BATCH)
    assert_same(plain, own)


def test_an_update_that_fails_says_so_at_the_next_step_and_is_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = delayed(gpt2(), offload_optimizer=str(tmp_path / "states"))
    own.step(BATCH)
    own.save_checkpoint(tmp_path / "saved")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    own.step(BATCH)
    for again in (partial(own.step, BATCH), partial(own.save_checkpoint, tmp_path / "other")):
        with pytest.raises(TrainingError, match=r"is full: .* resume from the last"):
            again()
    assert not (tmp_path / "other").exists()
    monkeypatch.undo()
    later = delayed(gpt2())
    later.load_checkpoint(tmp_path / "saved")
    assert later.num_steps == 1


class Own(torch.optim.SGD):
    """Another class, whose step may do anything."""


class Written(nn.Module):
    """A model that writes into a parameter while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return {"loss": (x @ self.weight).square().mean()}


def test_which_jobs_are_refused() -> None:
    with pytest.raises(MerakError, match=r"steps on the device; add offload_optimizer='cpu'"):
        delayed(gpt2(), offload_optimizer=None)
    with pytest.raises(MerakError, match=r"'pipedream' updates weights several times inside one"):
        delayed(gpt2(), schedule="pipedream")
    with pytest.raises(ArgumentsError, match=r"in a thread, as torch's own .* Own is none of them"):
        delayed(gpt2(), partial(Own, lr=0.1))
    with pytest.raises(MerakError, match="writes into the parameter 'weight'; leave it out"):
        merak.parallelize(Written(), {"x": torch.ones(2, 8)}, optimizer=Optimizer, **DELAYED)


def test_a_model_that_is_laid_out_anew_has_all_updates() -> None:
    plain, first = both()
    for _ in range(2):
        plain.step(BATCH), first.step(BATCH)
    plain.update()
    found = delayed(first.model).gather_state_dict()
    expected = plain.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
