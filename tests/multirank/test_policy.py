"""Policies whose loss is any function of log-probabilities, as reinforcement learning has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.training import policy
from examples.training.rollouts import language_model
from merak.core import mesh
from tests.multirank import verl_job
from tests.multirank.ranks import RankPool

NUM_SAMPLES, MICROBATCH, NUM_STEPS = 8, 2, 2
HALVES = [{"pp": 2}, {"tp": 2}]


def batch(seed: int) -> tuple[policy.Sequences, torch.Tensor]:
    """Samples of unequal lengths, and a gain of each."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(4, 14, (NUM_SAMPLES,), generator=generator).tolist()
    rows = [torch.randint(64, (count,), generator=generator) for count in counts]
    ids = torch.nested.nested_tensor(rows, layout=torch.jagged)
    temperature = 0.5 + torch.rand(NUM_SAMPLES, generator=generator)
    gains = torch.randn(NUM_SAMPLES, generator=generator)
    return policy.Sequences(ids, temperature, MICROBATCH), gains


def loss_of(gains: torch.Tensor) -> policy.Loss:
    """A policy gradient with an entropy bonus, whose code reads values."""

    def loss(outputs: dict[str, torch.Tensor], number: int) -> tuple[torch.Tensor, Any]:
        own = gains[number * MICROBATCH :][:MICROBATCH].tolist()
        rows = zip(outputs["log_probs"].unbind(), own, strict=True)
        each = [-(row[:-1].exp() * gain).sum() for row, gain in rows]
        value = sum(each) / NUM_SAMPLES - 0.01 * outputs["entropy"].values().mean()
        return value, {"smallest": min(one.item() for one in each)}

    return loss


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


Found = tuple[list[Any], float, dict[str, torch.Tensor]]


def trained(folder: str) -> dict[str, Found]:
    """Of each layout: losses of steps around a checkpoint, of an evaluation, weights."""
    import merak

    found = {}
    for degrees in HALVES:
        mesh.reset()
        merak.init(**degrees, device="cpu")
        given = batch(9)[0], 16
        training = policy.PolicyTraining(language_model(), adam, *given, nan_policy="ignore")
        steps: list[Any] = []
        for step in range(NUM_STEPS):
            sequences, gains = batch(step)
            made = training.run(sequences, loss_of(gains), trains=True)
            steps.append(([one[:2] for one in made], training.step(0.1)))
            if step == 0:  # a step that the checkpoint undoes
                checkpoint = f"{folder}/{next(iter(degrees))}"
                training.parallel.save_checkpoint(checkpoint)
                training.run(batch(7)[0], loss_of(batch(7)[1]), trains=True)
                training.step(0.1)
                training.parallel.load_checkpoint(checkpoint)
        sequences, gains = batch(5)
        made = training.run(sequences, loss_of(gains), trains=False)
        weights = {name: tensor.clone() for name, tensor in training.weights()}
        found[next(iter(degrees))] = steps, sum(one[0] for one in made), weights
    return found


def on_one_process() -> tuple[list[Any], float, dict[str, torch.Tensor]]:
    """The same with torch alone."""
    model = language_model()
    alone = policy.Policy(model)
    optimizer = adam(model.parameters())
    steps = []

    def run(seed: int, trains: bool) -> list[Any]:
        sequences, gains = batch(seed)
        columns, found = sequences.columns(16), []

        def compute(outputs: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            value, rest = loss_of(gains)(outputs, number)
            found.append((value.item(), rest))
            return value

        alone.loss.running.compute = compute
        for start in range(0, NUM_SAMPLES, MICROBATCH):
            part = {name: column[start:][:MICROBATCH] for name, column in columns.items()}
            value = alone(**part)["loss"]
            if trains:
                value.backward()
        return found

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        found = run(step, trains=True)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        steps.append((found, norm.item()))
    return steps, sum(value for value, _ in run(5, trains=False)), model.state_dict()


def test_loss_of_values_trains_as_on_one_process(pool: RankPool, tmp_path: Path) -> None:
    """The core of `examples/training/verl_engine.py`, with a checkpoint amid it."""
    steps, evaluated, weights = on_one_process()
    first, last = pool.run(trained, 2, str(tmp_path))
    for own, loss, streamed in last.values():
        for (made, norm), (expected, norm_of_one) in zip(own, steps, strict=True):
            assert [value for value, _ in made] == pytest.approx([e for e, _ in expected], rel=1e-4)
            smallest = [rest["smallest"] for _, rest in expected]
            assert [rest["smallest"] for _, rest in made] == pytest.approx(smallest, rel=1e-4)
            assert norm == pytest.approx(norm_of_one, rel=1e-4)
        assert loss == pytest.approx(evaluated, rel=1e-4)
        assert streamed.keys() == weights.keys()
        for name, tensor in streamed.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-4)
    assert first["pp"][0][0][0] == []  # outputs are on the last stage


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}, {}], ids=("pp2", "tp2", "dp2"))
def test_verl_engine(degrees: dict[str, int], pool: RankPool, tmp_path: Path) -> None:
    """verl's base class, batches and loss of an actor, with a checkpoint amid it."""
    model = verl_job.saved_model(tmp_path / "model")
    ranks = pool.run(verl_job.trained, 2, degrees, model, tmp_path / "checkpoint")
    steps, made, weights = verl_job.on_one_process(model)
    own, outputs, streamed = ranks[0] if "tp" in degrees else ranks[1]
    for (losses, norm, rate), (alone, norm_of_one, rate_of_one) in zip(own, steps, strict=True):
        if degrees:  # each of two replicas has losses of its own
            assert losses == pytest.approx(alone, rel=1e-4)
        assert norm == pytest.approx(norm_of_one, rel=1e-4)
        assert rate == rate_of_one
    first = 0 if degrees else verl_job.NUM_SAMPLES // 2
    for name, rows in outputs.items():
        for found, expected in zip(rows, made[name][first:], strict=True):
            counted = slice(None, -1)  # nothing follows the last token
            torch.testing.assert_close(found[counted], expected[counted], rtol=1e-4, atol=1e-4)
    assert streamed.keys() == weights.keys()
    for name, tensor in streamed.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-4)
