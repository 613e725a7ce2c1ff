"""Local SGD and DiLoCo: replicas step on their own, against the same arithmetic in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import TrainingError
from tests import optimizers
from tests.multirank.ranks import RankPool
from tests.multirank.test_parallelize import BATCH, Classifier, adamw, batch_of
from tests.multirank.training import Setup, train_merak
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

CLIP = 0.2
DILOCO = {"local_steps": 3, "outer_optimizer": "nesterov"}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def own_part(step: int, dp: int, replica: int) -> dict[str, torch.Tensor]:
    return {name: t.split(BATCH // dp)[replica] for name, t in batch_of(step, "loss").items()}


def make(mesh: Any, optimizer: Any, options: dict[str, Any], max_norm: float | None) -> Any:
    return merak.parallelize(
        Classifier(),
        own_part(0, mesh.dp, mesh.dp_rank),
        optimizer=optimizer,
        num_microbatches=4 // mesh.dp,
        max_grad_norm=max_norm,
        **options,
    )


def parameters(parallel: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in parallel.engine.parameters.items()}


def train(layout: tuple[int, ...], steps: int, settings: list[dict[str, Any]]) -> list[Any]:
    """Per setting: parameters after some steps of plain SGD."""
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = []
    for options in settings:
        parallel = make(mesh, sgd, options, None)
        for step in range(steps):
            parallel.step(own_part(step, dp, mesh.dp_rank))
        found.append(parameters(parallel))
    return found


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        ((2, 1, 2), "chimera"),
        slow((2, 2, 1), "1f1b"),
        slow((2, 1, 2), "zero_bubble_h1"),
    ],
)
def test_averages_after_every_step_are_reductions_of_gradients(
    pool: RankPool, layout: tuple[int, ...], schedule: str
) -> None:
    dp, tp, pp = layout
    settings = [{"schedule": schedule}, {"schedule": schedule, "local_steps": 1}]
    for reduced, averaged in pool.run(train, dp * tp * pp, layout, 3, settings):
        assert_gradients_equal(averaged, reduced)


def lamb(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizers.Lamb(parameters, lr=0.05)


def rounds(layout: tuple[int, ...], num_steps: int, options: dict[str, Any], optimizer: Any) -> Any:
    """Parameters inside a round, and after an evaluation, which ends it."""
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    parallel = make(mesh, optimizer, options, CLIP)
    for step in range(num_steps):
        parallel.step(own_part(step, dp, mesh.dp_rank))
        parallel.check_replicas()  # inside rounds, too
    inside = parameters(parallel)
    parallel.evaluate(own_part(0, dp, mesh.dp_rank))
    parallel.check_replicas()
    return mesh.dp_rank, inside, parameters(parallel)


class OneProcess:
    """DiLoCo, or averages, of replicas that one process trains in turn."""

    def __init__(self, dp: int, options: dict[str, Any], optimizer: Any) -> None:
        self.replicas = [Classifier() for _ in range(dp)]
        self.inner = [optimizer(model.parameters()) for model in self.replicas]
        self.anchor = Classifier()
        self.outer = torch.optim.SGD(self.anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.is_average = options.get("outer_optimizer", "average") == "average"

    def step(self, step: int) -> None:
        for replica, (model, inner) in enumerate(zip(self.replicas, self.inner)):
            inner.zero_grad()
            model(**own_part(step, len(self.replicas), replica))["loss"].backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            inner.step()

    @torch.no_grad()
    def end_round(self) -> None:
        by_replica = zip(*(model.parameters() for model in self.replicas))
        for anchor, own in zip(self.anchor.parameters(), by_replica):
            mean = torch.stack(list(own)).mean(dim=0)
            anchor.grad = anchor - mean
            if self.is_average:
                anchor.copy_(mean)
        if not self.is_average:
            self.outer.step()
        for model in self.replicas:
            model.load_state_dict(copy.deepcopy(self.anchor.state_dict()))


@pytest.mark.parametrize(
    ("layout", "options", "optimizer"),
    [
        ((2, 1, 2), DILOCO, adamw),
        slow((2, 2, 1), DILOCO, adamw),
        slow((2, 1, 2), {**DILOCO, "schedule": "chimera"}, adamw),
        slow((2, 2, 1), {"local_steps": 3}, lamb),
    ],
)
def test_rounds_equal_those_of_one_process(
    pool: RankPool, layout: tuple[int, ...], options: dict[str, Any], optimizer: Any
) -> None:
    dp, tp, pp = layout
    if tp > 1:
        options = {**options, "feature_dict": {"wide.0": "column", "wide.2": "row"}}
    expected = OneProcess(dp, options, optimizer)
    for step in range(7):
        expected.step(step)
        if step % 3 == 2:
            expected.end_round()
    inside = [dict(model.named_parameters()) for model in copy.deepcopy(expected.replicas)]
    expected.end_round()
    after = dict(expected.anchor.named_parameters())
    for replica, own, then in pool.run(rounds, dp * tp * pp, layout, 7, options, optimizer):
        assert own.keys() == then.keys()
        for found, wanted in ((own, inside[replica]), (then, after)):
            for name, value in found.items():
                if value.shape == wanted[name].shape:  # not a shard
                    torch.testing.assert_close(value, wanted[name].detach(), rtol=1e-4, atol=1e-5)
    first = inside[0]["first.weight"]
    assert any(not torch.equal(first, other["first.weight"]) for other in inside[1:])


def going_on(
    layout: tuple[int, ...], steps: range, folder: str, save: int | None, optimizer: Any
) -> Any:
    """Train from a checkpoint if the first step is not 0, and save before step `save`."""
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    split = {"feature_dict": {"wide.0": "column", "wide.2": "row"}} if tp > 1 else {}
    parallel = make(mesh, optimizer, {**DILOCO, **split}, CLIP)
    if steps.start:
        parallel.load_checkpoint(folder)
    for step in steps:
        if step == save:
            parallel.save_checkpoint(folder)
        parallel.step(own_part(step, dp, mesh.dp_rank))
    parallel.engine.complete_updates()
    momenta = {n: m.clone() for n, m in parallel.engine.local_steps.momenta().items()}
    return parameters(parallel), momenta


@pytest.mark.parametrize(("layout", "optimizer"), [slow((2, 1, 2), adamw), slow((2, 2, 1), lamb)])
def test_a_saved_round_goes_on_as_it_would_have(
    pool: RankPool, tmp_path: Path, layout: tuple[int, ...], optimizer: Any
) -> None:
    folder = str(tmp_path / "saved")
    wanted: list[dict[str, torch.Tensor]] = [{}, {}]
    for rank in pool.run(going_on, 4, layout, range(9), folder, 5, optimizer):
        for own, found in zip(wanted, rank):
            own.update(found)
    for parameters_, momenta in pool.run(
        going_on, 2, (2, 1, 1), range(5, 9), folder, None, optimizer
    ):
        assert any(bool(m.any()) for m in momenta.values())
        for found, expected in ((parameters_, wanted[0]), (momenta, wanted[1])):
            for name, value in found.items():
                if value.shape == expected[name].shape:  # not a shard
                    torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [(2, 1, 1), slow((2, 1, 1, 2))])
def test_trainers_weigh_replicas_by_their_tokens(
    pool: RankPool, layout: tuple[int, ...], cache: str
) -> None:
    """Replicas have differing numbers of label tokens; an average counts them as a sum does."""
    arguments = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 3}
    setups = [
        Setup("gpt2", padded=False, arguments={**arguments, "local_steps": steps})
        for steps in (0, 1)
    ]
    for reduced, averaged in pool.run(train_merak, math.prod(layout), layout, setups, cache):
        assert averaged.losses == pytest.approx(reduced.losses, rel=1e-5)
        assert_gradients_equal(averaged.final, reduced.final)


@pytest.mark.slow
def test_a_trainer_ends_with_one_model(pool: RankPool, cache: str) -> None:
    arguments = {"max_steps": 4, **DILOCO, "max_grad_norm": 1.0, "check_replicas_steps": 1}
    setups = [Setup("gpt2", arguments=arguments)]
    (first,), (second,) = pool.run(train_merak, 2, (2, 1, 1), setups, cache)
    assert first.losses == second.losses and len(first.losses) == 4
    for name, value in first.final.items():
        assert torch.equal(value, second.final[name])


def broken() -> str:
    mesh = merak.init(dp=2, tp=2, pp=1, device="cpu")
    features = {"wide.0": "column", "wide.2": "row"}
    parallel = make(mesh, adamw, {**DILOCO, "feature_dict": features}, None)
    parallel.step(own_part(0, 2, mesh.dp_rank))
    engine = parallel.engine
    name = next(name for name in engine.parameters if name not in engine.shards)
    if mesh.rank == 3:
        with torch.no_grad():
            engine.parameters[name].view(-1)[0] += 1
    with pytest.raises(TrainingError) as caught:
        parallel.check_replicas()
    return str(caught.value)


def test_copies_inside_a_replica_are_compared_inside_a_round(pool: RankPool) -> None:
    for told in pool.run(broken, 4):
        assert "differs on ranks 2, 3" in told


def overflow() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The parameters before and after a step that is not finite on one replica."""
    mesh = merak.init(dp=2, tp=1, pp=1, device="cpu")
    parallel = make(mesh, sgd, {**DILOCO, "nan_policy": "skip"}, CLIP)
    before = parameters(parallel)
    if mesh.rank == 1:
        parallel.engine.parameters["last.weight"].register_hook(lambda g: g * float("nan"))
    parallel.step(own_part(0, 2, mesh.dp_rank))
    return before, parameters(parallel)


@pytest.mark.slow
def test_replicas_skip_the_same_steps(pool: RankPool) -> None:
    for before, after in pool.run(overflow, 2):
        for name, value in after.items():
            assert torch.equal(value, before[name])
