"""Shards of parameters between steps: right or refused in a loop, whole where they are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from merak.core.errors import ArgumentsError, TrainingError
from merak.core.shards import join
from tests.multirank.ranks import RankPool, as_script
from tests.multirank.test_teachers import Byol, Found, alone, batch_of, sgd
from tests.shared_cache import not_shared
from tests.tiers import slow

NUM_STEPS = 3


def scaled(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9)


def rows_of_unit_norm(model: nn.Module) -> None:
    import merak

    with merak.gathered_parameters(model, "online.1.up.weight") as whole, torch.no_grad():
        for weight in whole.values():
            weight.div_(weight.norm(dim=1, keepdim=True))


def of_unit_norm(model: nn.Module) -> None:
    """Every trained parameter, by gathering."""
    import merak

    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for name in names:
        with merak.gathered_parameters(model, name) as whole, torch.no_grad():
            whole[name].div_(whole[name].norm())


def redrawn(model: nn.Module) -> None:
    import merak

    names = ["online.0.up.weight", "online.2.down.weight", "predictor.bias"]
    with merak.gathered_parameters(model, names) as whole:
        for count, weight in enumerate(whole.values()):
            # Every rank draws something else: the first one's is everyone's.
            rank = merak.current_mesh().rank if torch.distributed.is_initialized() else 0
            torch.manual_seed(100 * rank + count)
            nn.init.xavier_uniform_(weight) if weight.dim() > 1 else nn.init.normal_(weight)


def by_gradients(model: nn.Module) -> None:
    """An update by hand, as far as the gradient's norm has it, by code that walks the model."""
    import merak

    names = [name for name, p in model.named_parameters() if p.requires_grad]
    with merak.gathered_parameters(model, names, in_place=True) as whole:
        assert whole.keys() == set(names)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad / (1 + parameter.grad.norm()), alpha=0.1)


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "scaled": scaled,
    "rows": rows_of_unit_norm,
    "unit": of_unit_norm,
    "redrawn": redrawn,
    "gradients": by_gradients,
}


@as_script
@not_shared()
def trained(degrees: dict[str, int], way: str, options: dict[str, Any]) -> Found:
    import merak

    mesh = merak.init(device="cpu", **degrees)
    model = Byol()
    example = batch_of(0, mesh.dp_rank, mesh.dp)
    parallel = merak.parallelize(model, example, optimizer=sgd, num_microbatches=2, **options)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(parallel.step(batch_of(step, mesh.dp_rank, mesh.dp)).item())
        WAYS[way](model)
    return losses, parallel.gather_state_dict()


@pytest.mark.parametrize(
    ("degrees", "options", "way"),
    [
        ({"tp": 2}, {}, "redrawn"),
        slow({"dp": 2}, {"zero": 3}, "unit"),
        slow({"tp": 2}, {}, "unit"),
        slow({"pp": 2}, {}, "redrawn"),
        slow({"dp": 2}, {"zero": 3}, "redrawn"),
        slow({"tp": 2, "dp": 2}, {"zero": 3}, "unit"),
        slow({"tp": 2, "pp": 2}, {}, "gradients"),
        slow({"dp": 2}, {"zero": 1}, "gradients"),
        slow({"tp": 2, "dp": 2}, {"zero": 3}, "gradients"),
    ],
)
def test_whole_parameters_are_read_and_written_as_in_one_process(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any], way: str
) -> None:
    size = int(torch.tensor(list(degrees.values())).prod())
    losses, weights = alone(WAYS[way])
    first, *_ = pool.run(trained, size, degrees, way, options)
    torch.testing.assert_close(first[0], losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(first[1], dict(weights), rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    """A model of tokens whose head is its embedding, with a buffer that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.count += 1
        logits = self.head(self.layers(self.embedding(x)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())}


Streamed = tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor], str]


@as_script
@not_shared()
def streamed(degrees: dict[str, int], options: dict[str, Any]) -> Streamed:
    """Names and tensors that this rank gets, and the whole state dict on rank 0."""
    import merak

    merak.init(device="cpu", **degrees)
    batch = {"x": torch.arange(32).view(4, 8) % 16}
    parallel = merak.parallelize(Tied(), batch, optimizer=sgd, num_microbatches=2, **options)
    parallel.step(batch)
    names, tensors = [], {}
    for name, tensor in parallel.stream_weights(rank=1):
        names.append(name)
        if tensor is not None:
            tensors[name] = tensor.clone()
    assert all(tensor is not None for _, tensor in merak.stream_weights(parallel.model, None))
    try:
        parallel.stream_weights(rank=2)
    except ArgumentsError as error:
        return names, tensors, parallel.gather_state_dict(), str(error)
    raise AssertionError


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        slow({"pp": 2}, {}),
        slow({"tp": 2}, {}),
        slow({"dp": 2}, {"zero": 3}),
    ],
)
def test_weights_are_streamed_whole_to_one_rank(
    pool: RankPool, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    first, second = pool.run(streamed, 2, degrees, options)
    assert first[0] == second[0] and not first[1]
    assert second[1].keys() == first[2].keys() == Tied().state_dict().keys()
    torch.testing.assert_close(second[1], first[2], rtol=0, atol=0)
    assert first[3] == "rank=2 is none of the 2 ranks; use 0 to 1, or None for all."


@as_script
def refused(degrees: dict[str, int], zero: int) -> dict[str, str]:
    """What a loop of one's own hears of what it does with shards."""
    import merak

    merak.init(device="cpu", **degrees)
    model = Byol()
    taken = list(model.parameters())
    parallel = merak.parallelize(model, batch_of(0), optimizer=sgd, zero=zero)
    parallel.step(batch_of(0))
    optimizer = parallel.optimizer
    assert optimizer is not None

    def update() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)

    tries: dict[str, Callable[[], object]] = {
        "norms": lambda: [parameter.norm().item() for parameter in taken],
        "draws": lambda: nn.init.xavier_uniform_(model.get_submodule("online.0.up").weight),
        "clips": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "groups": lambda: [p.norm() for g in optimizer.param_groups for p in g["params"]],
        "update": update,
        "unknown": lambda: merak.gathered_parameters(model, "onlin.0.up.weight").__enter__(),
    }
    found = {}
    for name, attempt in tries.items():
        found[name] = ""
        try:
            attempt()
        except (TrainingError, ArgumentsError) as error:
            found[name] = str(error)
    parallel.step(batch_of(1))
    return found


@pytest.mark.parametrize(("degrees", "zero"), [({"tp": 2}, 0), slow({"dp": 2}, 3)])
def test_what_needs_the_whole_is_refused(
    pool: RankPool, degrees: dict[str, int], zero: int
) -> None:
    for found in pool.run(refused, 2, degrees, zero):
        of_model = {"norms": zero != 1, "draws": zero != 1, "clips": True, "groups": True}
        for name, is_refused in of_model.items():
            assert ("merak.gathered_parameters" in found[name]) == is_refused
            assert ("test_sharded_parameters.py:" in found[name]) == is_refused
        assert "max_grad_norm" in found["clips"]
        assert ("sync_model_params" in found["update"]) == bool(zero)
        assert "has no parameter 'onlin.0.up.weight'; did you mean" in found["unknown"]


@as_script
def joined_by_hand() -> dict[str, torch.Tensor]:
    """Gradients that a script has gathered by the layout that the engine gave it."""
    import merak

    merak.init(device="cpu", tp=2)
    parallel = merak.parallelize(Byol(), batch_of(0), optimizer=sgd)
    parallel.step(batch_of(0))
    found = {}
    for name, parameter in parallel.engine.parameters.items():
        gradient = parameter.grad
        if gradient is not None and (shard := parallel.engine.shards.get(name)) is not None:
            parts = [torch.empty_like(gradient) for _ in range(2)]
            torch.distributed.all_gather(parts, gradient.contiguous())
            found[name] = join(parts, shard)
    return found


@pytest.mark.slow
def test_a_script_that_asks_for_the_layout_joins_shards_itself(pool: RankPool) -> None:
    model = Byol()
    model(**batch_of(0))["loss"].backward()
    for found in pool.run(joined_by_hand, 2):
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


@as_script
@not_shared()
def updated_by_hand(degrees: dict[str, int]) -> dict[str, torch.Tensor]:
    import merak

    merak.init(device="cpu", **degrees)
    model = Byol()
    parallel = merak.parallelize(model, batch_of(0))
    for step in range(NUM_STEPS):
        parallel.step(batch_of(step))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.5)
    return parallel.gather_state_dict()


def test_elementwise_updates_by_hand_are_those_of_one_process(pool: RankPool) -> None:
    model = Byol()
    optimizer = sgd(p for p in model.parameters() if p.requires_grad)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(**batch_of(step))["loss"].backward()
        optimizer.step()
    found, _ = pool.run(updated_by_hand, 2, {"tp": 2})
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-4, atol=1e-6)
