"""Activations that wait in host memory: the same training, and the bytes that were foreseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from merak import parallelize
from merak.core.start.init import init
from merak.data import signature
from merak.engine import Engine, build_engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from tests.multirank.memory_jobs import MODELS, MemoryJob, batch_of, measure
from tests.multirank.test_asynchronous import batch_of as texts
from tests.multirank.test_asynchronous import loss_fn, make_optimizer, uneven
from tests.multirank.test_memory import assert_close
from tests.multirank.test_oom_replan import CALL, PROPAGATE, Fault, check
from tests.multirank.test_schedules import batches, tiny_gpt2

Case = tuple[str, dict[str, Any]]
"""A model and options of its training."""


def gradients(schedules: list[str], cache: Path) -> list[list[bool]]:
    """Per schedule and choice, whether losses and gradients are those without offloading."""
    mesh = init(dp=1, tp=1, pp=2)
    found = []
    for schedule in schedules:
        seen = []
        for away in (None, "full", "1,3,4"):
            options = EngineOptions(
                schedule=schedule, num_microbatches=4, recompute="off", offload_activations=away
            )
            sample = signature(batches(1)[0]).columns
            source = GraphSource(tiny_gpt2(), cache_dir=cache)
            engine = build_engine(source, sample, mesh, options)
            losses = engine.train_step(0, [sample] * 4, batches(4), 0.25)
            assert all(len(s._saved) == 0 for s in engine._state.stages.values())
            grads = [p.grad for p in engine.parameters.values()]
            seen.append([losses, *(g.clone() for g in grads if g is not None)])
        first, *others = seen
        found.append([all(map(torch.equal, first, other)) for other in others])
    return found


def test_schedules_give_the_same_gradients_to_the_last_bit(pool, tmp_path):
    schedules = ["1f1b", "interleaved_1f1b", "zero_bubble_v", "chimera"]
    for rank in pool.run(gradients, 2, schedules, tmp_path):
        for schedule, same in zip(schedules, rank, strict=True):
            assert all(same), schedule


def trained(degrees: tuple[int, int, int], cases: list[Case]) -> list[bool]:
    """Per case, whether two steps leave the same losses and parameters with offloading."""
    dp, tp, pp = degrees
    init(dp=dp, tp=tp, pp=pp)
    found = []
    for family, options in cases:
        expected, others = (steps(family, options, away) for away in (None, "full"))
        found.append(len(expected) > 2 and all(map(torch.equal, expected, others)))
    return found


def moved_bytes(engine: Engine) -> list[int]:
    """Sizes of all copies to the host from now on."""
    sizes: list[int] = []
    for offload in {s.offload for s in engine._state.stages.values() if s.offload is not None}:
        make = offload._in_host

        def in_host(num_bytes: int, make: Any = make) -> torch.Tensor:
            sizes.append(num_bytes)
            made: torch.Tensor = make(num_bytes)
            return made

        offload._in_host = in_host
    return sizes


def steps(family: str, options: dict[str, Any], away: str | None) -> list[torch.Tensor]:
    """Losses of two steps, and the parameters behind them."""
    count = 4
    if family == "uneven":
        model, extra = uneven(), {"loss_fn": loss_fn}
        batch = texts(count, 0)
    else:
        torch.manual_seed(0)
        model, extra = MODELS[family](0.1), {}
        batch = {n: torch.cat([c] * (count // 2)) for n, c in batch_of(family).items()}
        count //= 2
    parallel = parallelize(
        model, batch, optimizer=make_optimizer, num_microbatches=count,
        offload_activations=away, **options, **extra,
    )  # fmt: skip
    sizes = moved_bytes(parallel.engine)
    losses = [parallel.step(batch) for _ in range(2)]
    assert bool(sizes) == (away is not None)
    return [*losses, *(p.detach().clone() for p in parallel.engine.optimizer_params.named.values())]


@pytest.mark.slow
def test_asynchronous_schedules_train_the_same(pool):
    cases = [("uneven", {"schedule": name}) for name in ("pipedream", "pipedream_2bw")]
    assert pool.run(trained, 2, (1, 1, 2), cases) == [[True] * 2] * 2


@pytest.mark.slow
def test_shared_optimizers_train_the_same(pool):
    cases = [("gpt2", {"zero": 1}), ("llama", {"zero": 2}), ("gpt2", {"zero": 3})]
    assert pool.run(trained, 2, (2, 1, 1), cases) == [[True] * 3] * 2


@pytest.mark.slow
def test_tensor_parallel_jobs_train_the_same(pool):
    cases = [("gpt2", {}), ("llama", {"sequence_parallel": True})]
    cases += [("gpt2", {"schedule": "zero_bubble_h1", "sub_pipelining": "off"})]
    assert pool.run(trained, 2, (1, 2, 1), cases) == [[True] * 3] * 2


@pytest.mark.slow
def test_a_step_that_runs_out_of_memory_runs_again(pool, tmp_path):
    away = (("offload_activations", "full"),)
    faults = [Fault(CALL, (1,), 3, options=away), Fault(PROPAGATE, (0,), 2, options=away)]
    check(pool, (1, 1, 2), faults, tmp_path)


@pytest.mark.slow
def test_what_stays_on_the_device_is_what_was_foreseen(pool, tmp_path):
    full = {"offload_activations": "full"}
    jobs = [
        MemoryJob("gpt2", 0.1, options={"recompute": "off", **full}),
        MemoryJob("t5", 0.1, options={"recompute": "0.5", **full}),
        MemoryJob("llama", autocast=torch.bfloat16, options={"offload_activations": "0.5"}),
        MemoryJob("gpt2", 0.1, "zero_bubble_h1", 4, options=full),
        MemoryJob("gpt2", 0.1, options={"recompute": "off"}),
    ]
    ranks = pool.run(measure, 2, (1, 1, 2), jobs, tmp_path)
    assert_close(ranks)
    # Stages follow from measured speeds: one may have nothing to offload.
    moved, kept = ([found[place].measured for found in ranks] for place in (0, -1))
    assert all(map(int.__le__, moved, kept)) and sum(moved) < sum(kept)


@pytest.mark.slow
def test_shares_of_the_sequence_move_too(pool, tmp_path):
    options = {"sequence_parallel": True, "recompute": "off"}
    jobs = [
        MemoryJob("gpt2", 0.1, options={**options, "offload_activations": away})
        for away in ("full", "off")
    ]
    ranks = pool.run(measure, 2, (1, 2, 1), jobs, tmp_path)
    assert_close(ranks)
    for moved, kept in ranks:
        assert moved.measured < kept.measured
