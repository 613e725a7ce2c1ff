"""Bytes that replicas hold with mixed precision and Adam, counted in real storages."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

import merak
from merak.graph.weights.absent import AbsentTensor
from tests.multirank.ranks import RankPool

WIDTH, DEPTH = 128, 8
PHI = DEPTH * WIDTH * WIDTH
GATHERED = 2 / DEPTH
"""Bytes per parameter of the first layer, which a backward leaves gathered for the next forward."""


class Square(nn.Module):
    """Layers whose rows divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": x.float().square().mean()}


def mixed() -> nn.Module:
    """The same with two layers of one weight, far apart, and two that are frozen."""
    model = Square()
    model.layers[-1].weight = model.layers[0].weight
    for layer in model.layers[2:4]:
        layer.requires_grad_(False)
    return model


Storages = dict[int, torch.UntypedStorage]


@contextmanager
def beside_what_there_is() -> Iterator[Storages]:
    """The storages of before; what Python knows by then is not looked through again."""
    before = storages()
    gc.freeze()
    try:
        yield before
    finally:
        gc.unfreeze()


def held(before: Storages) -> int:
    """Bytes of all storages of tensors and gradients that Python knows, but for some."""
    return sum(s.nbytes() for place, s in storages().items() if place not in before)


def held_at_last(before: Storages) -> int:
    """What is held once threads that communicate have let go of what has arrived."""
    found = [held(before)]
    for _ in range(5):
        time.sleep(0.05)
        found.append(held(before))
    return min(found)


def storages() -> Storages:
    """Every storage of a tensor or gradient that Python knows, by its place.

    As long as it is held, nothing else can come to lie in its place.
    """
    gc.collect()
    found: Storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), AbsentTensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                # A distributed tensor is a face of its local one, without memory of its own, as a
                # sparse one is of two; a trace's fake ones have none at all.
                if tensor is None or isinstance(tensor, DTensor | FakeTensor):
                    continue
                if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    found[storage._cdata] = storage
    return found


def count_all(choices: list[tuple[int, bool]]) -> list[tuple[list[float], float]]:
    merak.init(dp=torch.distributed.get_world_size(), device="cpu")
    return [count(*choice) for choice in choices]


def count(
    zero: int, float32_gradients: bool, make: Callable[[], nn.Module] = Square
) -> tuple[list[float], float]:
    """Bytes per parameter: at the start of microbatches of the second step, and after it."""
    with beside_what_there_is() as before:
        return count_beside(before, zero, float32_gradients, make())


def count_beside(
    before: Storages, zero: int, float32_gradients: bool, model: nn.Module
) -> tuple[list[float], float]:
    batch = {"x": torch.ones(4, WIDTH, dtype=torch.bfloat16)}
    parallel = merak.parallelize(
        model.to(torch.bfloat16), batch, num_microbatches=2, master_weights=True, zero=zero,
        gradient_sums="float32" if float32_gradients else "own", bucket_bytes=WIDTH * WIDTH,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip
    parallel.step(batch)
    engine, seen = parallel.engine, []
    compute = engine._state.microbatches.compute_batch_only

    def note(microbatch: Any) -> None:
        engine._state.reducer.wait()  # what is under way is two buckets at most,
        if engine._state.fsdp is not None:
            engine._state.fsdp.order.take_reductions()  # or a segment's gradients
        seen.append(held_at_last(before) / PHI)
        compute(microbatch)

    with mock.patch.object(engine._state.microbatches, "compute_batch_only", note):
        parallel.step(batch)
    engine.optimizer_params.wait()
    return seen, held_at_last(before) / PHI


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_bytes_fall_as_the_formulas_say(pool: RankPool, degree: int) -> None:
    # Masters and two moments take 12 bytes, parameters 2; gradients in their own type 2, or 4.
    formulas = {
        (0, False): 16, (1, False): 4 + 12 / degree, (2, False): 2 + 14 / degree,
        (0, True): 18, (1, True): 6 + 12 / degree, (2, True): 2 + 16 / degree,
        (3, True): 16 / degree,
    }  # fmt: skip
    if degree == 4:
        formulas = {choice: formulas[choice] for choice in ((1, False), (2, False), (3, True))}
    for rank in pool.run(count_all, degree, list(formulas)):
        for (choice, expected), ((_, between), after) in zip(formulas.items(), rank):
            # A batch, and counts of steps.
            begun = expected + (GATHERED if choice[0] == 3 else 0)
            assert begun <= between <= 1.03 * begun, choice
            # When all is done, shares of the gradients are left in the masters' type.
            final = {0: 18, 3: 16 / degree}.get(choice[0], 2 + 16 / degree)
            assert final <= after <= 1.03 * final, choice


def count_mixed() -> tuple[list[float], float]:
    merak.init(dp=2, device="cpu")
    return count(3, True, mixed)


@pytest.mark.slow
def test_tied_and_frozen_parameters_are_in_shares(pool: RankPool) -> None:
    expected = (5 * 16 + 2 * 2) / DEPTH / 2  # five weights are trained, and two frozen
    for (_, between), after in pool.run(count_mixed, 2):
        assert expected + GATHERED <= between <= 1.03 * (expected + GATHERED)
        assert expected <= after <= 1.03 * expected
