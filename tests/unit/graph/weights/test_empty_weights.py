"""Models without weights: what they cost, what they know, what they refuse."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from merak.core.errors import WeightsError
from merak.graph.weights.deferred_init import replay
from merak.graph.weights.empty_weights import empty_weights, is_building, origin_of

CPU = torch.device("cpu")


def remake(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    origin = origin_of(tensor)
    assert origin is not None
    return replay(origin.tape, origin.view, CPU, lambda index: torch.manual_seed(seed + index))


def test_parameters_take_no_memory_and_buffers_are_real() -> None:
    with empty_weights():
        model = nn.Sequential(nn.Linear(10**7, 10**7), nn.BatchNorm1d(3))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model[0].weight.shape == (10**7, 10**7)
    assert model[0].weight.requires_grad
    assert torch.equal(model[1].running_var, torch.ones(3))


@pytest.mark.slow
def test_a_175b_model_is_built_in_seconds_within_0_7_gb() -> None:
    script = """
from transformers import GPT2Config, GPT2LMHeadModel
from merak.cli.trace import peak_rss_bytes
from merak.graph.weights.empty_weights import empty_weights
with empty_weights():
    model = GPT2LMHeadModel(GPT2Config(n_layer=96, n_embd=12288, n_head=96, n_positions=2048))
print(sum(p.numel() for p in model.parameters()), end=" ")
print(peak_rss_bytes())
"""
    source = Path(sys.modules[WeightsError.__module__].__file__).parents[2]
    output = subprocess.check_output(
        [sys.executable, "-c", script], text=True, env={**os.environ, "PYTHONPATH": str(source)}
    )
    parameters, peak_bytes = map(int, output.split())
    assert parameters > 174e9
    assert peak_bytes < 0.7e9


def test_a_parameter_stays_the_object_its_constructor_knows() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Parameter(torch.empty(3, 3))
            shared.note = "kept"
            self.one, self.two, self.three = shared, shared, nn.Linear(3, 3)
            self.three.weight = shared
            shared.data.fill_(2.0)

    with empty_weights():
        model = Tied()
        lstm = nn.LSTM(2, 3)
    assert model.one is model.two is model.three.weight
    assert model.one.note == "kept"
    assert torch.equal(remake(model.one), torch.full((3, 3), 2.0))
    assert lstm._flat_weights[0] is lstm.weight_ih_l0


def fill_rows(weight: torch.Tensor) -> None:
    weight.data.normal_(5.0, 0.1)
    weight.data[1].zero_()
    weight.data.t()[2, 2:] = 7.0


@pytest.mark.parametrize(
    "initialise",
    [
        nn.init.ones_,
        nn.init.eye_,
        fill_rows,
        lambda w: nn.init.constant_(w, 3.0),
        lambda w: w.data.copy_(torch.arange(20.0).view(4, 5)),
        lambda w: w.data.copy_(torch.linspace(0, 1, 5)).mul_(2).clamp_(max=1.5),
        nn.init.orthogonal_,
        lambda w: nn.init.sparse_(w, 0.5, std=1.0),
        nn.init.trunc_normal_,
        lambda w: nn.init.trunc_normal_(w, std=4.0),
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
    ],
)
def test_a_replay_does_what_the_initialisation_does(
    initialise: Callable[[torch.Tensor], None],
) -> None:
    """With one draw and one seed, the numbers are the same as without the tape."""
    with empty_weights():
        layer = nn.Linear(5, 4, bias=False)
        initialise(layer.weight)
    usual = nn.Linear(5, 4, bias=False)
    torch.manual_seed(11)
    initialise(usual.weight)
    origin = origin_of(layer.weight)
    assert origin is not None
    seeded: list[int] = []

    def seed_once(index: int) -> None:
        if not seeded:
            torch.manual_seed(11)
        seeded.append(index)

    made = replay(origin.tape, origin.view, CPU, seed_once)
    assert torch.equal(made, usual.weight)


def test_values_made_before_registration_are_remembered() -> None:
    with empty_weights():
        layer = nn.Module()
        layer.scale = nn.Parameter(torch.tensor(2.5))
        layer.steps = nn.Parameter(torch.log(torch.arange(1.0, 5.0)) * torch.ones(4))
        layer.noise = nn.Parameter(torch.randn(10000) * 0.5 + 3)
        layer.table = nn.Parameter(torch.from_numpy(torch.eye(3).numpy()), requires_grad=False)
    assert remake(layer.scale) == 2.5
    assert torch.equal(remake(layer.steps), torch.log(torch.arange(1.0, 5.0)))
    assert abs(remake(layer.noise).std() - 0.5) < 0.02
    assert torch.equal(remake(layer.noise, seed=1), remake(layer.noise, seed=1))
    assert not torch.equal(remake(layer.noise, seed=1), remake(layer.noise, seed=2))
    assert torch.equal(remake(layer.table), torch.eye(3))
    assert not layer.table.requires_grad


def test_numbers_made_on_the_device_of_a_parameter_are_remembered() -> None:
    with empty_weights():
        layer = nn.Linear(3, 1)
        layer.weight.data = torch.tensor([[1.0, 2.0, 3.0]], device=layer.weight.device)
        layer.bias.data = layer.bias.new_tensor([4.0])
        layer.steps = nn.Parameter(torch.arange(3.0, device=layer.bias.device) * 2)
    assert remake(layer.weight).tolist() == [[1.0, 2.0, 3.0]]
    assert remake(layer.bias).tolist() == [4.0]
    assert remake(layer.steps).tolist() == [0.0, 2.0, 4.0]


def test_constructors_may_move_parameters_to_a_device() -> None:
    with empty_weights():
        moved = nn.Linear(2, 2).to("cpu")
        nn.init.ones_(moved.weight)
        cast = nn.Linear(2, 2).to("cpu", torch.bfloat16)
        norm = nn.BatchNorm1d(3).to(device="cpu")
    assert moved.weight.is_meta and cast.weight.is_meta and norm.weight.is_meta
    assert torch.equal(remake(moved.weight), torch.ones(2, 2))
    assert remake(cast.weight).dtype == torch.bfloat16
    assert torch.equal(norm.running_var, torch.ones(3))


def test_dtype_at_construction_is_kept() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with empty_weights():
            layer = nn.Linear(2, 2)
            nn.init.ones_(layer.weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert remake(layer.weight).dtype == torch.bfloat16


def test_a_buffer_computed_from_a_parameter_is_remade() -> None:
    with empty_weights():
        layer = nn.Linear(3, 2)
        nn.init.ones_(layer.weight)
        layer.register_buffer("initial", layer.weight.detach() * 2)
    assert torch.equal(remake(layer.initial), torch.full((2, 3), 2.0))


def test_what_was_overwritten_is_not_computed_again() -> None:
    with empty_weights():
        layer = nn.Linear(3, 2)
        nn.init.zeros_(layer.weight)
    origin = origin_of(layer.weight)
    assert origin is not None
    assert len(origin.tape.needed(origin.view)) == 1


def test_memory_that_nobody_wrote_is_zero() -> None:
    with empty_weights():
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.empty(1000))
    assert not remake(layer.weight).any()


def test_a_constructor_that_needs_numbers_is_refused() -> None:
    message = r"numbers of Linear.weight .*build this model normally"
    with pytest.raises(WeightsError, match=message), empty_weights():
        layer = nn.Linear(3, 2)
        if layer.weight.sum() > 0:
            layer.bias.data.zero_()
    assert not is_building()
    assert not nn.Linear(3, 2).weight.is_meta


def test_contexts_that_would_lose_the_initialisation_are_refused() -> None:
    with pytest.raises(WeightsError, match="entered twice"), empty_weights(), empty_weights():
        pass
    message = r"under merak\.empty_weights alone"
    with pytest.raises(WeightsError, match=message), torch.device("meta"), empty_weights():
        pass


def test_outside_everything_is_as_before() -> None:
    with empty_weights():
        nn.Linear(2, 2)
    assert not nn.Linear(2, 2).weight.is_meta
    assert origin_of(nn.Linear(2, 2).weight) is None
