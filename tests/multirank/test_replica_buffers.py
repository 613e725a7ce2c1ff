"""Buffers that the forward writes, on replicas: the same everywhere after every step."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from merak.check import Case, CheckOptions, Job, Layout
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import written_buffers as w

KINDS = (w.Averaged, w.Spectral, w.BatchNormed, w.Watched, w.Queued, w.Followed)


class All(nn.Module):
    """A model of each kind, whose losses are added."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(kind() for kind in KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(x) for model in self.kinds]).sum()


WARNED = {w.Queued: "queue", w.Held: "held['mean']"}
SAMPLES = 4


def test_losses_gradients_buffers_and_evaluations(pool: RankPool) -> None:
    """As replicas in one process, one after the other, that start a step with equal buffers."""

    options = CheckOptions(num_microbatches=2, microbatch=SAMPLES, steps=3, evaluate=True)
    job = Job(Case("All", All, w.draw), Layout(dp=2), options)
    check_on(pool, job)


def train(kind: type[nn.Module], layout: tuple[int, int], options: dict[str, Any]) -> Any:
    """Losses and buffers of this rank after some steps, and what was logged."""
    import merak

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("merak").addHandler(handler)
    dp, pp = layout
    mesh = merak.init(dp=dp, pp=pp, device="cpu")
    torch.manual_seed(mesh.rank)  # replicas that are made otherwise go on with the first one's
    model = kind()
    make = partial(torch.optim.SGD, lr=0.1)
    parallel = merak.parallelize(model, w.draw(0, 4), optimizer=make, num_microbatches=2, **options)
    losses = [
        float(parallel.step({"x": w.draw(step, 4 * dp)["x"][4 * mesh.dp_rank :][:4]}))
        for step in range(3)
    ]
    logging.getLogger("merak").removeHandler(handler)
    held = parallel.engine.held()
    buffers = {name: b.clone() for name, b in model.named_buffers() if name in held}
    return losses, buffers, said


@pytest.mark.parametrize("kind", [w.Averaged, w.Queued, slow(w.Held)])
def test_rank_0_alone_names_what_is_not_as_in_one_process(
    pool: RankPool, kind: type[nn.Module]
) -> None:
    ranks = pool.run(train, 2, kind, (2, 1), {})
    for _, buffers, _ in ranks:
        assert buffers.keys() == ranks[0][1].keys()
        assert all(torch.equal(value, ranks[0][1][name]) for name, value in buffers.items())
    said = [text for text in ranks[0][2] if "buffers" in text]
    assert len(said) == (kind in WARNED)
    assert not said or WARNED[kind] in said[0]
    assert not ranks[1][2]


def train_and_evaluate() -> list[float]:
    """Losses of steps, and of an evaluation behind each, over a pipeline."""
    import merak

    merak.init(pp=2, device="cpu")
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.1)
    parallel = merak.parallelize(w.Held(), w.draw(0, 4), optimizer=make)
    called = (parallel.step, parallel.evaluate)
    return [float(call(w.draw(step, 4))) for step in range(3) for call in called]


def test_an_evaluation_reads_on_one_stage_what_training_leaves_on_another(pool: RankPool) -> None:
    torch.manual_seed(0)
    model, expected = w.Held(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model.train()(w.draw(step, 4)["x"])
        loss.backward()
        optimizer.step()
        expected += [loss.item(), model.eval()(w.draw(step, 4)["x"]).item()]
    for found in pool.run(train_and_evaluate, 2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_averaged_weights_are_those_of_one_process_with_the_whole_batch(pool: RankPool) -> None:
    two, one = (
        pool.run(train, 2, w.Averaged, (2, 1), {}),
        pool.run(train, 1, w.Averaged, (1, 1), {}),
    )
    assert set(two[0][1]) == set(one[0][1])
    assert torch.equal(two[0][1]["count"], one[0][1]["count"])  # counts rounds, not samples


def ragged(kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    """Buffers after a step whose replicas have microbatches of other numbers and sizes."""
    import merak
    from merak.data import signature

    mesh = merak.init(dp=2, device="cpu")
    torch.manual_seed(0)
    model = kind()
    parallel = merak.parallelize(model, w.draw(0, 8), num_microbatches=2)
    batches = [w.draw(i, 4) for i in range(2)] if mesh.dp_rank == 0 else [w.draw(2, 3)]
    parallel.engine.train_step(0, [signature(b).columns for b in batches], batches, 0.5)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("kind", [w.BatchNormed, slow(w.Queued)])
def test_replicas_with_other_microbatches_end_alike(pool: RankPool, kind: type[nn.Module]) -> None:
    first, second = pool.run(ragged, 2, kind)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_copies_of_a_stage_in_two_pipes_end_alike(pool: RankPool) -> None:
    ranks = pool.run(train, 2, w.Averaged, (1, 2), {"schedule": "chimera"})
    said = [text for text in ranks[0][2] if "buffers" in text]
    assert len(said) == 1 and "average" in said[0]
    for rank in ranks[1:]:
        for name in rank[1].keys() & ranks[0][1].keys():
            assert torch.equal(rank[1][name], ranks[0][1][name]), name
