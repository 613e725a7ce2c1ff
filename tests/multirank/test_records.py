"""The engine's own trace, gathered over the ranks of every pipeline."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from merak.core.health.timeouts import extend_timeouts
from merak.core.start.init import init
from merak.data import signature
from merak.engine import build_engine
from merak.engine.health.step_records import StepRecord
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.schedule.ir import Action, Kind
from merak.schedule.simulator.timeline import measured_timeline
from tests.multirank.ranks import RankPool
from tests.multirank.test_schedules import batches, tiny_gpt2


def recorded(schedule: str) -> tuple[StepRecord, ...]:
    """The last two of three steps, the last of which has fewer microbatches."""
    mesh = init(pp=2, dp=2)
    options = EngineOptions(schedule=schedule, num_microbatches=4, recorded_steps=2)
    sample = signature(batches(1)[0]).columns
    engine = build_engine(GraphSource(tiny_gpt2()), sample, mesh, options)
    for step, count in enumerate((4, 4, 3)):
        for parameter in engine.parameters.values():
            parameter.grad = None
        engine.train_step(step, [sample] * count, batches(count))
    return engine.recorded_steps()


def timeouts() -> list[float]:
    """Of every group's operations, s, after the watch has seen to them."""
    mesh = init(pp=2, device="cpu", timeout_s=30.0)
    options = EngineOptions(num_microbatches=2)
    sample = signature(batches(1)[0]).columns
    build_engine(GraphSource(tiny_gpt2()), sample, mesh, options)
    extend_timeouts(4000.0, 0)
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(mesh.device) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_torchs_own_timeouts_come_after_the_watch(pool) -> None:
    for found in pool.run(timeouts, 2):
        assert len(found) > 3  # the job, axes of the mesh, channels
        assert set(found) == {4000.0}


def test_steps_are_recorded_on_one_clock(pool) -> None:
    by_rank = pool.run(recorded, 4, "zero_bubble_v")
    for of_first, of_last in (by_rank[::2], by_rank[1::2]):  # replicas
        assert of_first == of_last
        assert [step.step for step in of_first] == [1, 2]
        assert [step.schedule.num_microbatches for step in of_first] == [4, 3]
        for step in of_first:
            ends = {action: end for own in step.records for action, _, end in own}
            for rank, own in enumerate(step.records):
                assert tuple(action for action, _, _ in own) == step.schedule.actions[rank]
                for (_, _, end), (_, start, _) in pairwise(own):
                    assert end <= start
                for action, start, end in own:
                    assert start < end
                    needed = Action(Kind.FORWARD, action.stage - 1, action.microbatch)
                    if action.kind is not Kind.FORWARD or needed not in ends:
                        continue
                    # Clocks are aligned to half a round trip: a forward follows the one before.
                    assert ends[needed] < start + 2e-3
            spans = [record for own in step.records for record in own]
            makespan_s = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
            assert measured_timeline(step.schedule, step.records).end_s == makespan_s


def loop_of_its_own(folder: str) -> tuple[list[dict[str, float]], Any]:
    """Figures of a user's own loop, and on rank 0 the record of its run."""
    import merak
    from merak.record.files import read_run

    mesh = merak.init(pp=2, device="cpu")
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16)}
    parallel = merak.parallelize(
        Blocks(),
        batch,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        num_microbatches=4,
        run_record=folder,
    )
    found = []
    for _ in range(2):
        for _ in range(2):
            loss = parallel.step(batch)
        found.append(parallel.figures(loss=float(loss)))
    return found, read_run(folder) if mesh.rank == 0 else None


class Blocks(torch.nn.Module):
    """Four equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


@pytest.mark.slow
def test_a_loop_of_its_own_is_recorded(pool: RankPool, tmp_path: Path) -> None:
    (figures, record), (others, nothing) = pool.run(loop_of_its_own, 2, str(tmp_path))
    assert nothing is None and len(figures) == 2
    assert [own["bubble"] for own in figures] == [own["bubble"] for own in others]
    assert all(own["step_seconds"] > 0 and own["memory_gb_pp1"] > 0 for own in figures)
    assert [log.step for log in record.logs] == [2, 4]
    assert [log.figures["loss"] for log in record.logs] == [own["loss"] for own in figures]
    assert [step.step for step in record.steps] == [0, 1, 2, 3]
    assert record.job.model == "Blocks" and len(record.job.stages) == 2
