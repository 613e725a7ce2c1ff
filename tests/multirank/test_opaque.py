"""Opaque modules on real ranks: gradients, buffers and evaluations as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.check import Case, CheckOptions, Job, Layout
from merak.core.errors import ScheduleError
from merak.core.mesh import current_mesh
from merak.graph.trace.opaque.loops import MOST_PASSES
from tests.multirank.check_on import check_on
from tests.multirank.opaque_models import (
    Gated,
    HitExperts,
    Mapped,
    Reversible,
    SortedExperts,
    Stack,
    batch_of,
    case_of,
)
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph.loop_models import Blocks, DeltaRule, Selective
from tests.unit.graph.loop_models import batch_of as loop_batch
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

STEPS = 3
Degrees = tuple[int, int, int]
Seen = tuple[list[float], dict[str, torch.Tensor]]


def check(pool: RankPool, block: type[nn.Module], job: tuple[Layout, str]) -> None:
    layout, schedule = job

    # Of evaluations, the second one has fewer samples.
    options = CheckOptions(schedule, num_microbatches=3, steps=2, evaluate=layout.dp == 1)
    checked = Job(case_of(block), layout, options)
    report = check_on(pool, checked)
    assert report.tolerance == 1e-5
    # Experts whose rows are sorted by them are operators.
    kept = [] if block is SortedExperts else [f"blocks.{number}" for number in range(2)]
    assert [one.module for one in report.kept_whole] == kept
    assert {one.class_name for one in report.kept_whole} <= {block.__name__}
    assert report.segments > 3
    if layout.tp > 1:
        assert report.tp_sharded_fraction > 0  # of what is around the blocks


@pytest.mark.parametrize("block", [HitExperts, slow(Mapped)])
def test_as_a_pipeline(pool: RankPool, block: type[nn.Module]) -> None:
    check(pool, block, (Layout(pp=2), "early_recompute"))


@pytest.mark.parametrize("block", [Gated, slow(SortedExperts), slow(Reversible)])
def test_split(pool: RankPool, block: type[nn.Module]) -> None:
    check(pool, block, (Layout(tp=2), "1f1b"))


def test_replicas_that_choose_other_experts(pool: RankPool) -> None:
    check(pool, HitExperts, (Layout(dp=2, pp=2), "zero_bubble_h1"))


@pytest.mark.parametrize(("block", "tp"), [slow(Selective, 2), slow(DeltaRule, 4)])
def test_loops_on_shards(pool: RankPool, block: type[nn.Module], tp: int) -> None:
    """Functions that loop over the tokens, each called with a rank's channels or heads."""

    case = Case(block.__name__, partial(Blocks, block), partial(loop_batch, MOST_PASSES + 6))
    checked = Job(case, Layout(tp=tp), CheckOptions(num_microbatches=1, microbatch=2, steps=2))
    report = check_on(pool, checked)
    assert (report.reason, report.tolerance) == (None, 1e-5)
    assert [one.class_name for one in report.kept_whole] == ["function"]
    assert report.tp_sharded_fraction > 0.8


def train(degrees: Degrees, settings: list[dict[str, Any]]) -> list[Seen]:
    """Per setting: losses of training and of an evaluation, and the parameters after it."""
    dp, tp, pp = degrees
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    mesh = current_mesh()

    def share(step: int) -> dict[str, torch.Tensor]:
        own = slice(mesh.dp_rank, None, dp)  # of the step's four microbatches
        return {n: torch.cat(t.chunk(4)[own]) for n, t in batch_of(step, 16).items()}

    found = []
    for options in settings:
        torch.manual_seed(5)
        model = Stack(partial(HitExperts if options.pop("experts", False) else Gated, drop=0.4))
        parallel = merak.parallelize(
            model, share(0), optimizer=partial(torch.optim.SGD, lr=0.05),
            num_microbatches=4 // dp, **options,
        )  # fmt: skip
        losses = [float(parallel.step(share(step))) for step in range(STEPS)]
        losses.append(float(parallel.evaluate(share(9))))
        with parallel.engine.whole_model():
            named = dict(parallel.model.named_parameters())
            names = parallel.engine.parameters
            found.append((losses, {n: named[n].detach().clone() for n in names}))
    return found


@pytest.fixture(scope="module")
def one_rank(pool: RankPool) -> list[Seen]:
    ((gated, experts),) = pool.run(train, 1, (1, 1, 1), [{}, {"experts": True}])
    return [gated, experts]


@pytest.mark.parametrize("degrees", [slow((1, 1, 2)), slow((1, 2, 1))])
def test_dropout_is_drawn_alike_in_every_layout_and_again(
    pool: RankPool, one_rank: list[Seen], degrees: Degrees
) -> None:
    settings = [{"recompute": "full"}, {"recompute": "off", "experts": True}]
    settings.append({"recompute": "full", "experts": True})
    settings.append({"recompute": "off", "offload_activations": "full", "experts": True})
    for first, kept, *others in pool.run(train, 2, degrees, settings):
        assert first[0] == pytest.approx(one_rank[0][0], rel=1e-5)
        assert kept[0] == pytest.approx(one_rank[1][0], rel=1e-5)
        for losses, parameters in others:
            assert losses == kept[0]
            for name, value in parameters.items():
                assert torch.equal(value, kept[1][name]), name
        if degrees[1] == 1:
            assert_gradients_equal(first[1], {n: one_rank[0][1][n] for n in first[1]})
            assert_gradients_equal(kept[1], {n: one_rank[1][1][n] for n in kept[1]})


@pytest.mark.slow
def test_replicas_share_the_optimizer(pool: RankPool, one_rank: list[Seen]) -> None:
    settings = [{"experts": True, "zero": 0}, {"experts": True, "zero": 2}]
    for own in pool.run(train, 2, (2, 1, 1), settings):
        for losses, parameters in own:
            assert losses == pytest.approx(one_rank[1][0], rel=1e-5)
            assert_gradients_equal(parameters, one_rank[1][1])


def refused(degrees: Degrees, again: bool, options: dict[str, Any]) -> str:
    merak.init(*degrees, device="cpu")
    try:
        merak.parallelize(
            Stack(HitExperts, again), batch_of(0, 8), num_microbatches=2, **options
        )  # fmt: skip
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("degrees", "again", "options", "said"),
    [
        ((2, 1, 1), False, {"zero": 3}, "modules that use their parameters for some values alone"),
        ((1, 1, 2), True, {"partition": (2, 3)}, "is shared by layers on pp ranks"),
    ],
)
def test_what_cannot_leave_parameters_out_is_refused(
    pool: RankPool, degrees: Degrees, again: bool, options: dict[str, Any], said: str
) -> None:
    for sentence in pool.run(refused, 2, degrees, again, options):
        assert said in sentence


def mixed(degrees: Degrees) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """One step in bfloat16: on ranks, and in plain PyTorch."""
    merak.init(*degrees, device="cpu")
    torch.manual_seed(5)
    model = Stack(HitExperts)
    plain = Stack(HitExperts)
    plain.load_state_dict(model.state_dict())
    batch = batch_of(0, 16)
    parallel = merak.parallelize(model, batch, num_microbatches=4, autocast=torch.bfloat16)
    loss = float(parallel.step(batch))
    own = {n: p.grad.clone() for n, p in parallel.engine.parameters.items() if p.grad is not None}
    total = 0.0
    for microbatch in (dict(zip(batch, part, strict=True)) for part in _parts(batch)):
        with torch.autocast("cpu", torch.bfloat16):
            part_loss = plain(**microbatch)["loss"] / 4
        part_loss.backward()
        total += float(part_loss.detach())
    return [(loss, own), (total, {n: _gradient(p) for n, p in plain.named_parameters()})]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _parts(batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(column.chunk(4) for column in batch.values()), strict=True))


def test_mixed_precision_is_torchs_autocast(pool: RankPool) -> None:
    for (loss, own), (expected, gradients) in pool.run(mixed, 2, (1, 1, 2)):
        assert loss == pytest.approx(expected, rel=1e-6)
        for name, gradient in own.items():
            # The same products in the same order: autocast is all that decides their types.
            assert torch.allclose(gradient, gradients[name], rtol=1e-5, atol=1e-7), name
