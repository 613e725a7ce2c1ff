"""Initial weights: as the constructor makes them, the same for every set of names."""

import math
from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import nn

from merak.core.errors import WeightsError
from merak.core.random import seed_for
from merak.core.shards import ParameterShard, join
from merak.graph.weights.empty_weights import empty_weights
from merak.graph.weights.materialize import materialize
from tests.unit.checkpoint.models import FAMILIES, gpt2

CPU = torch.device("cpu")
families = pytest.mark.parametrize("build", FAMILIES.values(), ids=FAMILIES.keys())


def made(
    build: Callable[[], nn.Module],
    names: Iterable[str] | None = None,
    shards: Mapping[str, ParameterShard] | None = None,
    shard_index: int = 0,
    seed: int = 5,
) -> nn.Module:
    """A model built without weights whose parameters `names` are then created."""
    with empty_weights():
        model = build()
    chosen = names if names is not None else [name for name, _ in model.named_parameters()]
    materialize(model, chosen, device=CPU, seed=seed, shards=shards or {}, shard_index=shard_index)
    return model


@families
def test_distribution_is_that_of_the_constructor(build: Callable[[], nn.Module]) -> None:
    """Constants are equal; means and deviations within six standard errors of the two samples."""
    torch.manual_seed(0)
    usual, ours = build(), made(build)
    expected = dict(usual.named_parameters())
    assert list(expected) == [name for name, _ in ours.named_parameters()]
    for name, parameter in ours.named_parameters():
        other = expected[name]
        assert (parameter.shape, parameter.dtype) == (other.shape, other.dtype), name
        assert parameter.requires_grad == other.requires_grad, name
        assert parameter.stride() == other.stride(), name
        if other.unique().numel() <= 1:
            assert torch.equal(parameter, other), name
            continue
        error = 6 * other.std() * math.sqrt(2 / other.numel())
        assert (parameter.mean() - other.mean()).abs() < error, name
        assert (parameter.std() - other.std()).abs() < error, name
        assert parameter.abs().max() < 2 * other.abs().max(), name


@families
def test_buffers_and_tying_are_those_of_the_constructor(build: Callable[[], nn.Module]) -> None:
    usual, ours = build(), made(build)
    for (name, buffer), (other_name, other) in zip(
        ours.named_buffers(), usual.named_buffers(), strict=True
    ):
        assert name == other_name
        assert torch.equal(buffer, other), name
    names = [name for name, _ in usual.named_parameters(remove_duplicate=False)]
    assert names == [name for name, _ in ours.named_parameters(remove_duplicate=False)]
    for one in names:
        for two in names:
            same = usual.get_parameter(one) is usual.get_parameter(two)
            assert (ours.get_parameter(one) is ours.get_parameter(two)) == same


@families
def test_every_subset_of_names_gets_the_same_values(build: Callable[[], nn.Module]) -> None:
    whole = made(build)
    names = [name for name, _ in whole.named_parameters()]
    for start in range(3):
        part = made(build, names[start::3])
        for index, name in enumerate(names):
            parameter = part.get_parameter(name)
            assert parameter.is_meta == (index % 3 != start), name
            assert parameter.shape == whole.get_parameter(name).shape
            if not parameter.is_meta:
                assert torch.equal(parameter, whole.get_parameter(name)), name


def test_a_materialised_model_trains() -> None:
    model = made(gpt2)
    tokens = torch.arange(20)[None]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert abs(loss.item() - math.log(200)) < 0.5
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_shards_are_the_parts_of_the_whole() -> None:
    name = "transformer.h.1.attn.c_attn.weight"
    shard = ParameterShard(dim=1, parts=(64, 64, 64), degree=2)
    parts = [made(gpt2, [name], {name: shard}, index).get_parameter(name) for index in (0, 1)]
    assert [part.shape for part in parts] == [(64, 96), (64, 96)]
    assert torch.equal(join([p.data for p in parts], shard), made(gpt2).get_parameter(name))


def test_tied_names_are_one_parameter_by_whichever_name_they_are_asked_for() -> None:
    model = made(gpt2, ["lm_head.weight"])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.lm_head.weight.is_meta
    shard = ParameterShard(dim=0, parts=(200,), degree=4)
    model = made(gpt2, ["transformer.wte.weight"], {"lm_head.weight": shard}, 3)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.shape == (50, 64)


def test_draws_are_seeded_by_job_seed_and_parameter_name() -> None:
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = made(gpt2, [name], seed=7).get_parameter(name)
    torch.manual_seed(seed_for(7, "init", name, 0))
    assert torch.equal(weight, torch.empty(64, 256).normal_(0.0, 0.02))
    assert not torch.equal(weight, made(gpt2, [name], seed=8).get_parameter(name))


def test_the_random_state_of_the_script_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    made(gpt2)
    assert torch.equal(torch.rand(3), expected)


def test_weight_norm_starts_at_the_norm_of_its_direction() -> None:
    def build() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    layer = made(build)
    parts = layer.parametrizations.weight
    assert torch.allclose(parts.original0, parts.original1.norm(dim=1, keepdim=True))


def test_real_parameters_keep_their_values_and_object() -> None:
    model = gpt2()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    held = model.transformer.ln_f.weight
    name = "transformer.h.0.attn.c_attn.weight"
    shard = ParameterShard(dim=1, parts=(64, 64, 64), degree=2)
    names = [name, "transformer.ln_f.weight"]
    materialize(model, names, device=CPU, seed=0, shards={name: shard}, shard_index=1)
    assert model.transformer.ln_f.weight is held
    assert torch.equal(held, before["transformer.ln_f.weight"])
    thirds = before[name].view(64, 3, 2, 32)
    assert torch.equal(model.get_parameter(name), thirds[:, :, 1].reshape(64, 96))
    assert model.get_parameter("transformer.h.1.mlp.c_fc.weight").is_meta
    assert model.lm_head.weight is model.transformer.wte.weight


def test_dtype_and_attributes_are_those_of_the_model() -> None:
    with empty_weights():
        model = nn.Linear(3, 2)
        model.weight.note = "kept"
    model.to(torch.bfloat16)
    model.weight.requires_grad_(False)
    materialize(model, ["weight"], device=CPU, seed=0, shards={}, shard_index=0)
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.note == "kept"
    assert not model.weight.requires_grad
    assert model.bias.is_meta


def test_a_parameter_of_unknown_origin_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(WeightsError, match=r"weight, of shape \(2, 3\).*merak.empty_weights"):
        materialize(model, ["weight"], device=CPU, seed=0, shards={}, shard_index=0)


def test_a_parameter_computed_from_an_unknown_tensor_is_refused() -> None:
    outside = torch.empty(2, 3, device="meta")
    with empty_weights():
        model = nn.Linear(3, 2)
        model.weight.data.copy_(outside)
    with pytest.raises(WeightsError, match=r"^weight, of .*build this model normally"):
        materialize(model, ["weight"], device=CPU, seed=0, shards={}, shard_index=0)


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(WeightsError, match="no parameter 'wieght'"):
        materialize(nn.Linear(3, 2), ["wieght"], device=CPU, seed=0, shards={}, shard_index=0)


def test_materialising_inside_the_context_is_refused() -> None:
    with pytest.raises(WeightsError, match="leave its block first"), empty_weights():
        materialize(nn.Linear(3, 2), [], device=CPU, seed=0, shards={}, shard_index=0)
