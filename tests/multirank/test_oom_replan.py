"""A step that runs out of memory on some rank is run again, with fewer activations kept."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from merak.core.errors import TrainingError
from merak.core.start.init import init
from merak.data import signature
from merak.engine import Engine, build_engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from tests.multirank.ranks import RankError
from tests.multirank.test_schedules import batches, tiny_gpt2

ENOUGH = 10**9
WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB."


@dataclass(frozen=True)
class Fault:
    """Where memory runs out: on some ranks, in some calls of a function after the first few."""

    function: str
    ranks: tuple[int, ...]
    after: int = 0
    times: int = 1
    schedule: str = "1f1b"
    options: tuple[tuple[str, Any], ...] = ()


@contextmanager
def injected(fault: Fault, rank: int, engine: Engine) -> Iterator[None]:
    """Inside, the fault happens; calls of all functions that are named count together."""
    calls = iter(range(10**9))

    def failing(place: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def may_fail(*args: Any, **kwargs: Any) -> Any:
            number = next(calls) - fault.after
            if rank not in fault.ranks or not 0 <= number < fault.times:
                return real(*args, **kwargs)
            if place != "oom_guard":
                raise torch.OutOfMemoryError(WORDS)
            return real(fail_once(args[0]))

        return may_fail

    with ExitStack() as patches:
        for function in fault.function.split():
            place, name = function.rsplit(".", 1)
            holder: Any = (
                engine._state.oom_guard if place == "oom_guard" else importlib.import_module(place)
            )
            stand_in = failing(place, getattr(holder, name))
            patches.enter_context(mock.patch.object(holder, name, stand_in))
        yield


def fail_once(make: Callable[[], Any]) -> Callable[[], Any]:
    attempts = iter(range(2))

    def attempt() -> Any:
        if next(attempts) == 0:
            raise torch.OutOfMemoryError(WORDS)
        return make()

    return attempt


class Normed(nn.Module):
    """Blocks with batch norms, whose buffers a step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block, norm in zip(self.blocks, self.norms):
            x = nn.functional.dropout(torch.tanh(norm(block(x))), 0.3)
        return {"loss": nn.functional.cross_entropy(x, y)}


def normed_batches(count: int) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(8, 6, generator=draws), "y": torch.randint(0, 6, (8,), generator=draws)}
        for _ in range(count)
    ]


def one_step(
    options: EngineOptions, cache: Path, fault: Fault | None, normed: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients and buffers after a step, and how many segments are kept here."""
    from merak.core.mesh import current_mesh

    mesh = current_mesh()
    torch.manual_seed(0)
    model = Normed() if normed else tiny_gpt2()
    count = options.num_microbatches
    every = (normed_batches if normed else batches)(count * mesh.dp)
    sample = signature(every[0]).columns
    engine = build_engine(GraphSource(model, cache_dir=cache), sample, mesh, options)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with injected(fault or Fault(CALL, ()), mesh.rank, engine):
        losses = engine.train_step(
            3, [sample] * count, every[mesh.dp_rank :: mesh.dp], 1.0 / (count * mesh.dp)
        )
    assert torch.equal(before, torch.get_rng_state())
    for stage in engine._state.stages.values():
        assert len(stage._saved) == 0
    found = [losses, *(item.tensor.grad for item in engine.optimizer_params.items.values())]
    found += [engine._state.buffers[name] for name in sorted(engine._state.buffers)]
    program = engine._state.base
    flags = engine._state.plan_for.base.schedule.recompute
    kept = sum(
        not flags[number] or segment.saved
        for number, stage in program.stages.items()
        for segment in stage.segments
    )
    return [torch.as_tensor(t).clone() for t in found if t is not None], kept


def compare(
    degrees: tuple[int, int, int], faults: list[Fault], cache: Path, normed: bool = False
) -> list[int]:
    """How many segments fewer are kept after each fault, where all else is as without it."""
    dp, tp, pp = degrees
    init(dp=dp, tp=tp, pp=pp)
    fewer = []
    undisturbed: dict[object, tuple[list[torch.Tensor], int]] = {}
    for fault in faults:
        options = EngineOptions(
            schedule=fault.schedule, num_microbatches=4, recompute="off", **dict(fault.options)
        )
        key = (fault.schedule, fault.options)
        if key not in undisturbed:
            undisturbed[key] = one_step(options, cache, None, normed)
        expected, most = undisturbed[key]
        options = replace(options, recompute="auto", memory_budget=ENOUGH)
        found, kept = one_step(options, cache, fault, normed)
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert torch.equal(one, other), fault
        fewer.append(most - kept)
    return fewer


CALL = "merak.engine.segments.run.call_function merak.engine.segments.joint_call.call_of"
PROPAGATE = "merak.engine.segments.run.propagate merak.engine.segments.joint_call.begin_backward"
BUFFER = "merak.engine.zero.fsdp.make_buffer"
SUM = "merak.ops.collectives._copy_to_sum"  # forward and backward


def check(pool, degrees, faults, tmp_path, **options):
    """Where memory ran out fewer segments are kept; elsewhere as many as before."""
    num_ranks = degrees[0] * degrees[1] * degrees[2]
    by_rank = pool.run(compare, num_ranks, degrees, faults, tmp_path, *options.values())
    for place, fault in enumerate(faults):
        positions = {rank // (num_ranks // degrees[2]) for rank in fault.ranks}
        for rank, found in enumerate(by_rank):
            if rank // (num_ranks // degrees[2]) in positions:
                assert found[place] > 0, (fault, rank)
            elif fault.schedule == "1f1b":
                assert found[place] == 0, (fault, rank)


@pytest.mark.slow
def test_all_kinds_of_schedules_run_the_step_again(pool, tmp_path):
    forward = ("gpipe", "early_recompute", "interleaved_1f1b", "zero_bubble_h1", "gems")
    faults = [Fault(CALL, (1,), 3, schedule=name) for name in forward]
    backward = ("zero_bubble_v", "chimera", "dualpipe_v", "shifted_critical_path")
    faults += [Fault(PROPAGATE, (0,), 4, schedule=name) for name in backward]
    check(pool, (1, 1, 2), faults, tmp_path)


@pytest.mark.slow
def test_wherever_memory_runs_out_the_step_is_run_again(pool, tmp_path):
    faults = [Fault(CALL, (0, 1)), Fault(PROPAGATE, (1,), 0), Fault(CALL, (1,), 5, 2)]
    # Buffers of transfers and sums, of which each rank has several.
    faults += [Fault("oom_guard.allocate", (rank,), n) for rank in (0, 1) for n in (0, 3, 8)]
    once = (("tied_gradients", "step"),)
    faults += [Fault(PROPAGATE, (1,), 6, options=once)]
    check(pool, (1, 1, 2), faults, tmp_path)


@pytest.mark.slow
def test_replicas_are_kept_together(pool, tmp_path):
    faults = [
        Fault(CALL, (1,), 3),
        Fault(PROPAGATE, (0,), 10),
        Fault("oom_guard.allocate", (1,), 1),
    ]
    faults += [Fault(PROPAGATE, (0,), 4, options=(("zero", zero),)) for zero in (1, 2)]
    check(pool, (2, 1, 1), faults, tmp_path)


@pytest.mark.slow
def test_shares_of_parameters_are_gathered_to_the_end(pool, tmp_path):
    """Replicas hold shares of the parameters, also of a weight that two positions read."""
    options = (("zero", 3), ("sub_pipelining", "off"))
    faults = [Fault(CALL, (2,), 9, options=options), Fault(PROPAGATE, (1,), 3, options=options)]
    # Buffers of gathers and of sums of gradients, before either has begun.
    faults += [Fault(BUFFER, (rank,), n, options=options) for rank, n in ((0, 2), (1, 20), (3, 21))]
    faults += [Fault(CALL, (0,), 5, schedule="early_recompute", options=options)]
    # Gradients that a backward has left for later are reduced later, too.
    split: dict[str, Any] = {"schedule": "zero_bubble_h1", "options": options}
    faults += [Fault(CALL, (2,), 5, **split), Fault(PROPAGATE, (1,), 3, **split)]
    faults += [Fault(BUFFER, (rank,), n, **split) for rank, n in ((0, 20), (1, 24), (3, 33))]
    check(pool, (2, 1, 2), faults, tmp_path)


@pytest.mark.slow
@pytest.mark.drains_tp
def test_shares_of_parameters_are_gathered_beside_sums_over_tp(pool, tmp_path):
    options = (("zero", 3), ("sub_pipelining", "off"))
    faults = [Fault(SUM, (1,), 5, options=options), Fault(BUFFER, (2,), 40, options=options)]
    faults += [Fault(SUM, (1,), n, schedule="zero_bubble_h1", options=options) for n in (6, 11)]
    check(pool, (2, 2, 1), faults, tmp_path)


@pytest.mark.slow
@pytest.mark.drains_tp
def test_sums_over_tp_are_completed(pool, tmp_path):
    """Memory may run out between the sums of one segment, forward, backward or recomputing."""
    off, on = (("sub_pipelining", "off"),), (("sub_pipelining", "on"),)
    faults = [Fault(SUM, (1,), n, options=off) for n in (1, 5, 8, 12)]
    faults += [Fault(CALL, (0,), 9, options=off)]
    faults += [Fault(SUM, (1,), n, options=on) for n in (1, 20)]
    faults += [Fault("merak.engine.segments.run_sub_pipelined.run_part", (0,), 25, options=on)]
    faults += [Fault(SUM, (0,), 6, schedule="zero_bubble_h1", options=off)]
    check(pool, (1, 2, 1), faults, tmp_path)


@pytest.mark.slow
@pytest.mark.drains_tp
def test_tensor_parallel_pipelines_run_the_step_again(pool, tmp_path):
    off = (("sub_pipelining", "off"),)
    faults = [Fault(SUM, (3,), n, options=off) for n in (5, 7)]
    check(pool, (1, 2, 2), faults, tmp_path)


def test_buffers_are_as_after_one_step(pool, tmp_path):
    faults = [Fault(CALL, (1,), 2), Fault(PROPAGATE, (0,), 1)]
    check(pool, (1, 1, 2), faults, tmp_path, normed=True)


def test_nothing_left_to_give_up_ends_with_the_numbers(pool, tmp_path):
    fault = Fault(CALL, (1,), 0, 10**6)
    with pytest.raises(RankError) as caught:
        pool.run(compare, 2, (1, 1, 2), [fault], tmp_path)
    text = str(caught.value)
    assert "rank 0 failed" in text and "rank 1 failed" in text
    assert "PlanError: step 3 ran out of memory on pp rank 1 (CUDA out of memory." in text
    assert "where every segment recomputes and" in text
    assert "a larger tp or a smaller microbatch" in text


@dataclass(frozen=True)
class Final:
    """A job in which an out-of-memory error ends the job, and how it begins to say so."""

    schedule: str
    function: str
    sentence: str
    options: tuple[tuple[str, Any], ...] = ()


def ending(jobs: list[Final], cache: Path) -> list[str]:
    """What each job says where memory runs out on the only rank."""
    mesh = init()
    said = []
    for job in jobs:
        options = EngineOptions(schedule=job.schedule, num_microbatches=2, **dict(job.options))
        model = Normed()
        every = normed_batches(2)
        sample = signature(every[0]).columns
        engine = build_engine(GraphSource(model, cache_dir=cache), sample, mesh, options)
        optimizer = torch.optim.SGD(engine.parameters.values(), lr=0.1)
        engine.connect_optimizer(optimizer)
        # As transformers does, whose schedules wrap the step once more.
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        fault = Fault(job.function, (0,), 1, 10**6)
        try:
            with injected(fault, 0, engine):
                if "evaluation" in job.sentence:
                    engine.evaluate([sample] * 2, every)
                engine.train_step(3, [sample] * 2, every, 0.5, optimizer.step)
                optimizer.step()
        except TrainingError as error:
            said.append(str(error))
    return said


def test_where_a_step_cannot_be_run_again_the_error_says_what_to_do(pool, tmp_path):
    step = "torch.optim.sgd._single_tensor_sgd"
    jobs = [
        Final("1f1b", CALL, "step 3 on pp rank 0 ran out of memory (CUDA out of"),
        Final("pipedream", CALL, "has updated weights by then, so that the step cannot be run"),
        Final("1f1b", CALL, "the evaluation of a microbatch on pp rank 0 ran out of"),
        Final("pipedream", step, "the optimizer's step ran out of memory (CUDA out of memory."),
    ]
    (said,) = pool.run(ending, 1, jobs, tmp_path)
    assert len(said) == len(jobs)
    for job, sentence in zip(jobs, said):
        assert job.sentence in sentence and "; use " in sentence


@pytest.mark.slow
def test_memory_that_stays_short_does_not_collect_a_tied_gradient_twice(pool, tmp_path):
    """Neither the sum of a tied gradient nor what follows it has room, whatever is let go."""
    fault = Fault("merak.engine.comm.tied_gradients.add_gradient", (0,), 1, 10**6)
    with pytest.raises(RankError) as caught:
        pool.run(compare, 2, (1, 1, 2), [fault], tmp_path)
    text = str(caught.value)
    assert "TrainingError: memory ran out (CUDA out of memory." in text
    assert "although all activations of the step had been freed before" in text
