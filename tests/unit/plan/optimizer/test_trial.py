"""Optimizers judged by what they do to small tensors."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from merak.engine.optimizer.one_bit import OneBitLamb
from merak.plan.optimizer import trial
from merak.plan.optimizer.needs import Findings, Needs, Reductions
from merak.plan.optimizer.small_tensors import LARGE, SMALL, JobTensor, small_tensors
from merak.plan.optimizer.trial import run_trial
from tests import optimizers
from tests.tiers import one_in

TP = (
    JobTensor(0, (256, 64), 0, 2),
    JobTensor(0, (64, 256), 1, 2),
    JobTensor(0, (64,)),
    JobTensor(0, (256,), 0, 2),
)
ZERO = tuple(JobTensor(0, one.shape, row_degree=3) for one in TP)
PP = tuple(JobTensor(0, one.shape) for one in TP)


def found_for(cls: Any, tensors: Sequence[JobTensor] = TP, **options: Any) -> Findings:
    parameters = [nn.Parameter(torch.zeros(one.shape)) for one in tensors]
    optimizer = cls(parameters, **options)
    small = small_tensors(tensors, optimizer.param_groups)
    return run_trial(optimizer, small, torch.device("cpu"))


@one_in(3)
@pytest.mark.parametrize("tensors", [TP, ZERO, PP])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.0}),  # as a schedule that warms up begins
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adam, {"lr": torch.tensor(1e-3), "amsgrad": True}),
        (optimizers.Lion, {}),
    ],
)
def test_elementwise_updates_are_the_same_on_shards(
    cls: Any, options: dict[str, Any], tensors: Sequence[JobTensor]
) -> None:
    assert found_for(cls, tensors, **options) == Findings()


@one_in(2)
@pytest.mark.parametrize("tensors", [TP, ZERO])
@one_in(2)
@pytest.mark.parametrize(
    "cls",
    [
        torch.optim.Adafactor,
        optimizers.Lamb,
        optimizers.NovoGrad,
        optimizers.Shampoo,
        optimizers.Soap,
        optimizers.Came,
    ],
)
def test_updates_of_whole_parameters_differ_on_shards_alone(
    cls: Any, tensors: Sequence[JobTensor]
) -> None:
    found = found_for(cls, tensors)
    assert "cut along dim" in found.cut
    assert not (found.across or found.draws or found.unknown)
    assert found_for(cls, PP) == Findings()


class Reads(optimizers.Lamb):
    """Reads the norms as numbers, as many do."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        direction = optimizers.adam(g, state)
        norm, length = p.norm(), direction.norm()
        return direction * (norm / length) if norm > 0 and length > 0 else direction


class OfPlaces(optimizers.Each):
    """Takes a norm of what depends on where elements are."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        return g / (torch.linspace(0.5, 1.0, g.numel()).to(g).view_as(g) * g).norm()


class OfNumbers(optimizers.Each):
    """Divides by how many elements there are, which only a whole tensor knows."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        return g / (g.norm() / g.numel())


class OddState(optimizers.Lamb):
    """Has a state that is neither a shard nor a number."""

    def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
        state.setdefault("history", torch.zeros(4))[0] += 1
        return super().update(p, g, state, group)


@one_in(2)
@pytest.mark.parametrize("tensors", [TP, ZERO])
@pytest.mark.parametrize(
    ("cls", "reductions"),
    [
        (optimizers.Lamb, Reductions(2, 1, False)),
        (optimizers.Lars, Reductions(5, 1, False)),
        (optimizers.NovoGrad, Reductions(1, 1, False)),
        (Reads, Reductions(2, 1, True)),
        (lambda p: OneBitLamb(p, warmup_steps=3), Reductions(3, 1, False)),
        (OfPlaces, None),
        (OfNumbers, None),
        (OddState, None),
        (optimizers.Came, None),
        (torch.optim.Adafactor, None),
    ],
)
def test_norms_of_whole_parameters_are_enough_for_some(
    cls: Any, reductions: Reductions | None, tensors: Sequence[JobTensor]
) -> None:
    found = found_for(cls, tensors)
    assert found.cut and found.reductions == reductions
    assert found.needs is (Needs.REDUCTIONS if reductions else Needs.WHOLE)


def test_matrices_alone() -> None:
    matrices = TP[:2]
    found = found_for(torch.optim.Muon, matrices, lr=0.02)
    assert "shape (256, 64) cut along dim 0" in found.cut and not found.across


@pytest.mark.parametrize("tensors", [TP, ZERO, PP])
def test_a_rate_estimated_over_all_parameters_looks_across(tensors: Sequence[JobTensor]) -> None:
    assert found_for(optimizers.Prodigy, tensors).across


def test_what_draws_random_numbers_cannot_be_judged() -> None:
    for tensors in (TP, PP):
        found = found_for(optimizers.StochasticRounding, tensors)
        assert found.draws and not found.across and "random" in found.unknown


def test_random_states_are_left_as_they_were() -> None:
    before = torch.get_rng_state(), random.getstate()
    found_for(optimizers.StochasticRounding)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_what_a_class_prints_comes_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            print("weight decay is decoupled")

    assert found_for(Talking, lr=0.1) == Findings()
    assert capsys.readouterr().out.count("decoupled") == 1


class Wrapper(torch.optim.Optimizer):
    """Wraps another optimizer, in the way of Lookahead."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


@pytest.mark.parametrize("tensors", [TP, ZERO])
@pytest.mark.parametrize(("cls", "is_cut"), [(torch.optim.AdamW, False), (optimizers.Lamb, True)])
def test_what_wraps_another_optimizer_is_judged_by_that_one(
    cls: Any, is_cut: bool, tensors: Sequence[JobTensor]
) -> None:
    found = found_for(lambda parameters: Wrapper(cls(parameters)), tensors)
    assert bool(found.cut) is is_cut and not found.across and not found.unknown


def test_a_closure_is_found_out() -> None:
    assert found_for(optimizers.Sam).closure
    assert not found_for(torch.optim.SGD, lr=0.1).closure


def test_thresholds_are_shrunk_with_the_tensors() -> None:
    """Above the threshold whole, and below it as a shard: the two are stepped otherwise."""
    tall = [JobTensor(0, (4096, 64), 0, 2)]
    assert found_for(optimizers.Shampoo, tall, max_dim=3000).cut
    assert found_for(optimizers.Shampoo, tall, max_dim=1000) == Findings()


def test_an_update_that_begins_late_is_met_all_the_same() -> None:
    class Late(optimizers.Lamb):
        def __init__(self, params: Any, start_step: int = 1000) -> None:
            super().__init__(params, start_step=start_step)

        def update(self, p: Any, g: torch.Tensor, state: Any, group: Any) -> torch.Tensor:
            state["step"] = state.get("step", 0) + 1
            late = state["step"] > group["start_step"]
            return super().update(p, g, state, group) if late else g

    assert found_for(Late).cut


def test_what_takes_long_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 0.0)
    assert "take more than" in found_for(torch.optim.SGD, lr=0.1).unknown


def test_an_optimizer_around_another_is_copied() -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__(inner.param_groups, {})
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.param_groups = self.param_groups
            self.inner.step()

    def around(cls: Any) -> Any:
        return lambda parameters: Around(cls(parameters, lr=0.1))

    assert found_for(around(torch.optim.SGD)) == Findings()
    assert found_for(around(optimizers.Lamb)).cut


def test_an_optimizer_that_must_be_in_train_mode_is_put_there() -> None:
    class ScheduleFree(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)
            self.is_training = False

        def train(self) -> None:
            self.is_training = True

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert self.is_training
            super().step()

    assert found_for(ScheduleFree) == Findings()


def test_small_tensors_keep_their_kind_and_one_is_large() -> None:
    group: dict[str, Any] = {"lr": 0.1}
    tensors = [
        JobTensor(0, (50_000, 768), 0, 2),
        JobTensor(0, (768, 3072), 1, 2),
        JobTensor(0, (768, 3072), 1, 2),
        JobTensor(0, (768,)),
        JobTensor(0, (512, 256, 3, 3), row_degree=64),
    ]
    *ordinary, large = small_tensors(tensors, [group])
    assert len(ordinary) == 4  # one of two alike
    assert all(torch.Size(one.shape).numel() <= SMALL for one in ordinary)
    tall, wide, flat, kernel = (one.shape for one in ordinary)
    assert tall[0] > tall[1] and wide[0] < wide[1] and flat == (768,) and kernel[2:] == (3, 3)
    assert LARGE >= torch.Size(large.shape).numel() > 2 * 16_384
