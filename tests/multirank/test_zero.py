"""The optimizer shared among replicas, and float32 masters: the same training, in fewer bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.checkpoint.saver import save_state
from merak.checkpoint.state import RankState, load_state
from merak.core.errors import ScheduleError
from tests.multirank.ranks import RankPool
from tests.multirank.test_parallelize import BATCH, Classifier, batch_of
from tests.multirank.training import Layout
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

STEPS = 4
FEATURES = {
    "wide.0": merak.Column(), "wide.2": merak.Row(),
    "again.0": merak.Column(), "again.2": merak.Row(),
}  # fmt: skip


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def make(layout: Layout, dtype: torch.dtype, **options: Any) -> Any:
    dp, _, _ = layout
    model = options.pop("model", Classifier)().to(dtype)
    example = share(0, dtype)
    return merak.parallelize(
        model, example, num_microbatches=4 // dp, feature_dict=FEATURES, max_grad_norm=0.2,
        **{"optimizer": adamw, **options},
    )  # fmt: skip


def share(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    mesh = merak.core.mesh.current_mesh()
    size = BATCH // mesh.dp
    batch = {n: t.split(size)[mesh.dp_rank] for n, t in batch_of(step, "loss").items()}
    return {**batch, "x": batch["x"].to(dtype)}


class Untied(Classifier):
    """Without a weight that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.again[0].weight = nn.Parameter(0.1 * torch.randn(64, 16))


def train(layout: Layout, name: str, schedule: str, settings: list[dict[str, Any]]) -> list[Any]:
    """Per setting: losses, parameters, what was stepped, and bytes of states and gradients."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    dtype = getattr(torch, name)
    results = []
    for options in settings:
        parallel = make(layout, dtype, schedule=schedule, **options)
        losses = [parallel.step(share(step, dtype)).item() for step in range(STEPS)]
        engine = parallel.engine
        final = {n: p.detach().clone() for n, p in engine.parameters.items()}
        bytes_of = {
            "state": sum(
                value.nbytes
                for state in parallel.optimizer.state.values()
                for value in state.values()
                if value.numel() > 1
            ),
            "gradients": sum(
                p.grad.nbytes
                for p in {*engine.parameters.values(), *engine.optimizer_params.named.values()}
                if p.grad is not None
            ),
            "whole": sum(p.nbytes for p in engine.parameters.values()),
        }
        results.append((losses, final, bytes_of))
    return results


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [((2, 1, 2), "1f1b"), slow((2, 2, 1), "1f1b"), slow((2, 1, 2), "interleaved_1f1b")],
)
def test_shared_steps_equal_whole_ones_in_half_the_bytes(
    pool: RankPool, layout: Layout, schedule: str
) -> None:
    dp, tp, pp = layout
    settings = [{"zero": zero} for zero in (0, 1, 2)]
    for rank in pool.run(train, dp * tp * pp, layout, "float32", schedule, settings):
        (losses, expected, whole), *shared = rank
        for found, parameters, spent in shared:
            assert found == pytest.approx(losses, rel=1e-5)
            assert_gradients_equal(parameters, expected)  # the parameters, to its tolerance
            assert spent["whole"] == whole["whole"]
            # Rows that do not divide make a share a row larger.
            assert 0.4 * whole["state"] <= spent["state"] <= 0.6 * whole["state"]
            assert spent["gradients"] <= 0.6 * whole["gradients"]


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [((2, 1, 2), "chimera"), slow((1, 1, 2), "gems"), slow((1, 1, 4), "chimera")],
)
def test_copies_of_a_stage_share_its_optimizer(
    pool: RankPool, layout: Layout, schedule: str
) -> None:
    dp, tp, pp = layout
    model = Classifier if pp == 2 else Untied
    settings = [{"zero": zero, "model": model} for zero in (0, 1)]
    for (losses, expected, whole), (found, parameters, spent) in pool.run(
        train, dp * tp * pp, layout, "float32", schedule, settings
    ):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_gradients_equal(parameters, expected)  # the parameters, to its tolerance
        assert spent["state"] <= (0.5 / dp + 0.1) * whole["state"]


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 4])
def test_copies_share_an_optimizer_that_reads_whole_tensors(pool: RankPool, pp: int) -> None:
    own = {"model": Untied, "optimizer": adafactor}
    settings = [{"zero": zero, **own} for zero in (0, 1)]
    for (losses, expected, _), (found, parameters, _) in pool.run(
        train, pp, (1, 1, pp), "float32", "chimera", settings
    ):
        assert found == pytest.approx(losses, rel=1e-5)
        assert_gradients_equal(parameters, expected)


def refused(options: dict[str, Any]) -> str:
    merak.init(pp=4, device="cpu")
    with pytest.raises(ScheduleError) as caught:
        make((1, 1, 4), torch.float32, schedule="chimera", **options)
    return str(caught.value)


@pytest.mark.slow
def test_copies_that_share_weights_with_others_do_not_share_an_optimizer(pool: RankPool) -> None:
    for said in pool.run(refused, 4, {"zero": 1}):
        assert "zero=1 shards the optimizer over the copies of a stage, but 'wide.0.weight'" in said
        assert "on pp ranks (0, 3) and (1, 2)" in said
    for said in pool.run(refused, 4, {"zero": 2}):
        assert "which have microbatches of their own; use zero=1" in said


def test_masters_take_steps_that_bfloat16_would_lose(pool: RankPool) -> None:
    settings = [{}, {"master_weights": True}, {"master_weights": True, "zero": 1}]
    ranks = pool.run(train, 4, (2, 1, 2), "bfloat16", "1f1b", settings)
    for plain, masters, shared in ranks:
        assert all(p.dtype == torch.bfloat16 for p in masters[1].values())
        assert masters[2]["state"] == 2 * plain[2]["state"]  # moments in float32
        assert shared[2]["state"] < 0.6 * masters[2]["state"]
        assert masters[0] == pytest.approx(shared[0], rel=1e-4)
        for name, value in masters[1].items():
            torch.testing.assert_close(shared[1][name], value, rtol=2**-7, atol=1e-5)
    expected = reference()
    found = {name: p for _, masters, _ in ranks for name, p in masters[1].items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float(), value, rtol=2**-6, atol=2e-3)


def reference() -> dict[str, torch.Tensor]:
    """One process: bfloat16 compute, float32 sums, masters and moments."""
    masters = Classifier().bfloat16().float()
    optimizer = adamw(masters.parameters())
    for step in range(STEPS):
        model = copy.deepcopy(masters).bfloat16()
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        batch = batch_of(step, "loss")
        for part in range(4):
            x, y = (batch[n].split(BATCH // 4)[part] for n in ("x", "y"))
            (model(x.bfloat16(), y)["loss"] / 4).backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = parameter.grad
        nn.utils.clip_grad_norm_(masters.parameters(), 0.2)
        optimizer.step()
    return {name: p.detach() for name, p in masters.named_parameters()}


def resume(layout: Layout, folder: str, options: dict[str, Any], start: int) -> Any:
    """Train from a step on, from a checkpoint unless it is the first; save at step 2."""
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    parallel = make(layout, torch.bfloat16, master_weights=True, **options)
    engine = parallel.engine
    optimizer_tensors = engine.optimizer_params.optimizer_tensors()
    held = (engine.held(), engine.shards, mesh, optimizer_tensors)
    if start:
        load_state(folder, RankState(parallel.model, parallel.optimizer, *held))
    losses = []
    for step in range(start, STEPS):
        if step == 2 and not start:
            save_state(folder, RankState(parallel.model, parallel.optimizer, *held))
        losses.append(parallel.step(share(step, torch.bfloat16)).item())
    masters = {n: s.tensor.detach().clone() for n, s in optimizer_tensors.items() if s.rows is None}
    return losses, masters


@pytest.mark.slow
def test_masters_and_shares_resume_in_another_layout(pool: RankPool, tmp_path: Any) -> None:
    folder = str(tmp_path / "state")
    before = pool.run(resume, 4, (2, 2, 1), folder, {"zero": 1}, 0)
    after = pool.run(resume, 2, (1, 1, 2), folder, {}, 2)
    again = pool.run(resume, 4, (2, 1, 2), folder, {"zero": 2}, 2)
    assert after[0][0] == pytest.approx(before[0][0][2:], rel=1e-3)
    assert again[0][0] == pytest.approx(before[0][0][2:], rel=1e-3)
    # Both copies of a stage have rows, and save them.
    copies = {"zero": 1, "schedule": "chimera"}
    also = pool.run(resume, 2, (1, 1, 2), folder, copies, 2)
    assert also[0][0] == pytest.approx(before[0][0][2:], rel=1e-3)
    of_copies = str(tmp_path / "copies")
    first = pool.run(resume, 2, (1, 1, 2), of_copies, copies, 0)
    rest = pool.run(resume, 2, (1, 1, 2), of_copies, {}, 2)
    assert rest[0][0] == pytest.approx(first[0][0][2:], rel=1e-3)
    # Masters keep what bfloat16 parameters would round away.
    for _, masters in after:
        assert all(m.dtype == torch.float32 for m in masters.values())
        assert any(not torch.equal(m, m.bfloat16().float()) for m in masters.values())


def curve(autocast: torch.dtype | None) -> list[float]:
    """Losses of 300 steps."""
    merak.init(pp=2, device="cpu")
    parallel = merak.parallelize(
        Classifier(),
        batch_of(0, "loss"),
        # Small enough that the curve has no spikes, which no rounding would repeat.
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        num_microbatches=2,
        autocast=autocast,
    )
    return [parallel.step(batch_of(step % 8, "loss")).item() for step in range(300)]


@pytest.mark.slow
def test_bfloat16_and_float32_learn_alike(pool: RankPool) -> None:
    single, half = (torch.tensor(pool.run(curve, 2, t)[0]) for t in (None, torch.bfloat16))
    assert not torch.equal(single, half)
    means = [losses.view(-1, 50).mean(dim=1) for losses in (single, half)]
    assert means[0][-1] < 0.8 * means[0][0]
    # A hundredth of the first loss: rounding to 8 bits, over many steps.
    assert float((means[0] - means[1]).abs().max()) < 0.01 * float(means[0][0])


def between(zero: int) -> list[int]:
    """Bytes of whole gradients when each microbatch of a step begins here."""
    from unittest import mock

    merak.init(dp=2, device="cpu")
    parallel = make((2, 1, 1), torch.float32, zero=zero)
    engine, seen = parallel.engine, []
    compute = engine._state.microbatches.compute_batch_only

    def note(microbatch: Any) -> None:
        held = [p.grad.nbytes for p in engine.parameters.values() if p.grad is not None]
        seen.append(sum(held))
        compute(microbatch)

    with mock.patch.object(engine._state.microbatches, "compute_batch_only", note):
        parallel.step(share(0, torch.float32))
    return seen


def test_shared_gradients_are_whole_at_no_time_between_microbatches(pool: RankPool) -> None:
    for zero, keeps in ((1, True), (2, False)):
        for seen in pool.run(between, 2, zero):
            assert len(seen) == 2
            assert seen[0] == 0
            assert (seen[1] > 0) is keeps
