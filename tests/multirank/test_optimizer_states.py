"""States of an optimizer in a script's hands, against one process: right, or refused by line."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import TrainingError
from tests.multirank.ranks import RankPool, as_script
from tests.multirank.test_optimizers import LAYOUTS, assert_equal, batch_of, make_model, muon
from tests.tiers import slow

NUM_STEPS = 4


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2)


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            if value.dim():
                value.mul_(0.5)


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in filter(lambda one: one in optimizer.state, model.parameters()):
        states = optimizer.state.get(parameter, {})
        made = {key: 0.5 * value if value.dim() else value for key, value in states.items()}
        optimizer.state[parameter] = made


def begun_anew(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name in ("blocks.0.up.weight", "blocks.3.down.weight"):
        optimizer.state.pop(model.get_parameter(name), None)
    if model.get_parameter("blocks.1.up.bias") in optimizer.state:
        del optimizer.state[model.get_parameter("blocks.1.up.bias")]


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scaled(model, copy.copy(optimizer))


def by_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    assert all(optimizer.state[parameter]["step"] > 0 for parameter in model.parameters())
    scaled(model, optimizer)


WAYS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "scaled": scaled,
    "replaced": replaced,
    "begun_anew": begun_anew,
    "loaded": loaded,
    "by_steps": by_steps,
}


def alone(make: Any, way: str) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(**batch_of(step)).backward()
        optimizer.step()
        WAYS[way](model, optimizer)
    return model.state_dict()


@as_script
def trained(make: Any, way: str, degrees: dict[str, int], zero: int) -> dict[str, torch.Tensor]:
    import merak

    mesh = merak.init(**degrees, device="cpu")

    def share(step: int) -> dict[str, torch.Tensor]:
        return {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in batch_of(step).items()}

    model = make_model()
    parallel = merak.parallelize(model, share(0), optimizer=make, zero=zero)
    for step in range(NUM_STEPS):
        parallel.step(share(step))
        assert parallel.optimizer is not None
        WAYS[way](model, parallel.optimizer)
    return parallel.gather_state_dict()


@pytest.mark.parametrize(
    ("make", "way", "layout"),
    [
        (adamw, "scaled", "zero1"),
        slow(adamw, "by_steps", "pp"),
        slow(muon, "scaled", "tp"),
        *(slow(adamw, way, layout) for way in WAYS for layout in ("zero3", "tp_zero1")),
        slow(muon, "begun_anew", "tp_zero1"),
    ],
)
def test_a_script_finds_states_by_parameters(
    pool: RankPool, make: Any, way: str, layout: str
) -> None:
    degrees, zero = LAYOUTS[layout]
    ranks = pool.run(trained, math.prod(degrees.values()), make, way, degrees, zero)
    assert_equal(ranks[0], alone(make, way))


@as_script
def refused(degrees: dict[str, int], zero: int) -> dict[str, str]:
    import merak

    mesh = merak.init(**degrees, device="cpu")
    batch = {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in batch_of(0).items()}
    model = make_model()
    parallel = merak.parallelize(model, batch, optimizer=adamw, zero=zero)
    parallel.step(batch)
    optimizer, first = parallel.optimizer, model.get_parameter("blocks.0.up.weight")
    assert optimizer is not None

    def of_neurons() -> None:
        optimizer.state[first]["exp_avg"][3:5] = 0.0

    def of_whole_shape() -> None:
        optimizer.state[first]["exp_avg"] = torch.zeros(64, 16, dtype=torch.float64)
        parallel.step(batch)

    tries: dict[str, Callable[[], object]] = {
        "norms": lambda: [optimizer.state[p]["exp_avg"].norm().item() for p in model.parameters()],
        "neurons": of_neurons,
        "saves": lambda: torch.save(optimizer.state_dict(), "/dev/null"),
        "whole": of_whole_shape,
    }
    found = {}
    for name, attempt in tries.items():
        found[name] = ""
        try:
            attempt()
        except TrainingError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("layout", ["zero1", slow("tp_zero3")])
def test_what_needs_whole_states_is_refused(pool: RankPool, layout: str) -> None:
    degrees, zero = LAYOUTS[layout]
    for found in pool.run(refused, math.prod(degrees.values()), degrees, zero):
        for name in ("norms", "neurons", "saves"):
            assert "a state of the optimizer: " in found[name]
            assert "test_optimizer_states.py:" in found[name]
        assert "a state of the optimizer has the whole shape (64, 16)" in found["whole"]


@as_script
def counted(degrees: dict[str, int], zero: int) -> list[int]:
    import merak

    mesh = merak.init(**degrees, device="cpu")
    batch = {n: t.chunk(mesh.dp)[mesh.dp_rank] for n, t in batch_of(0).items()}
    model = make_model()
    parallel = merak.parallelize(model, batch, optimizer=adamw, zero=zero)
    parallel.step(batch)
    return [p.numel() for p in model.parameters()] + [p.data.nelement() for p in model.parameters()]


@pytest.mark.parametrize("layout", [slow("tp"), slow("zero3"), slow("pp")])
def test_a_script_counts_the_elements_of_the_whole_model(pool: RankPool, layout: str) -> None:
    degrees, zero = LAYOUTS[layout]
    expected = [p.numel() for p in make_model().parameters()]
    for found in pool.run(counted, math.prod(degrees.values()), degrees, zero):
        assert found == expected + expected


@as_script
def norms_of_gradients(way: str) -> str:
    """A loop that sums norms of the gradients that it finds."""
    import merak

    merak.init(pp=2, device="cpu")
    model = make_model()
    parallel = merak.parallelize(model, batch_of(0))
    optimizer = adamw(model.parameters())
    for step in range(2):  # the optimizer has this rank's parameters from its first step on
        optimizer.zero_grad()
        parallel.step(batch_of(step))
        optimizer.step()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)  # right on the rank that has it
    try:
        if way == "groups":
            own = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(own, 1.0)
        sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["sum", slow("groups")])
def test_gradients_of_other_stages_are_not_left_out(pool: RankPool, way: str) -> None:
    for said in pool.run(norms_of_gradients, 2, way):
        if way == "sum":
            assert "this script reads a value that this rank does not have" in said
            assert "p.grad.square().sum().item()" in said and "a gradient: 'blocks." in said
        else:
            assert "this script reads the gradient of some of all parameters" in said
            assert "clip_grad_norm_(own, 1.0)" in said and "max_grad_norm" in said
