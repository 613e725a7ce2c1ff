"""Shards over groups of replicas (`zero_group_size`), against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import merak
from merak.core import mesh
from tests.multirank.memory_jobs import MemoryJob, measure
from tests.multirank.ranks import RankPool
from tests.multirank.test_averages import DECAY, adamw
from tests.multirank.test_optimizers import Make, assert_equal, batch_of, make_model, muon
from tests.tiers import slow

NUM_STEPS = 4
MOST_NORM = 0.3
"""Below the norms of the steps, so that all of them are clipped."""

Setting = tuple[dict[str, int], dict[str, Any], Make, str, str]
"""Degrees, options, optimizer; the folder that it goes on from and the one that it saves, or ""."""


def alone(make: Make) -> dict[str, torch.Tensor]:
    model = make_model()
    optimizer = make(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        model(**batch_of(step)).backward()
        if make is adamw:
            assert torch.nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM) > MOST_NORM
        optimizer.step()
    return model.state_dict()


def trained(settings: list[Setting]) -> list[tuple[dict[str, torch.Tensor], dict[str, int]]]:
    """Per setting, the whole parameters, and elements by what this rank holds of them."""
    found = []
    for degrees, options, make, source, target in settings:
        ranks = merak.init(**degrees, device="cpu")
        share = {
            step: {n: t.chunk(ranks.dp)[ranks.dp_rank] for n, t in batch_of(step).items()}
            for step in range(NUM_STEPS)
        }
        parallel = merak.parallelize(
            make_model(),
            share[0],
            optimizer=make,
            num_microbatches=2,
            **{"max_grad_norm": MOST_NORM} | options,
        )
        if source:
            parallel.load_checkpoint(source)
        stop = 2 if target else NUM_STEPS
        for step in range(parallel.num_steps, stop):
            parallel.step(share[step])
        if target:
            parallel.save_checkpoint(target)
        for step in range(stop, NUM_STEPS):
            parallel.step(share[step])
        held = {n: t.numel() for n, t in parallel.engine.optimizer_params.named.items()}
        found.append((parallel.gather_state_dict(), held))
        mesh.reset()
    return found


def test_groups_of_replicas_train_as_one_process(pool: RankPool, tmp_path: Any) -> None:
    folder, other = str(tmp_path / "groups"), str(tmp_path / "all")
    groups = {"zero_group_size": 2}
    settings: list[Setting] = [
        ({"dp": 4}, {"zero": 3} | groups, adamw, "", folder),
        ({"dp": 2, "tp": 2}, {"zero": 1}, adamw, folder, other),
        ({"dp": 4}, {"zero": 2, "ema_decay": DECAY} | groups, adamw, other, ""),
        ({"dp": 4}, {"zero": 1, "offload_optimizer": "cpu"} | groups, adamw, folder, ""),
        ({"dp": 4}, {"zero": 1, "max_grad_norm": None} | groups, muon, "", ""),
    ]
    ranks = pool.run(trained, 4, settings)
    expected = {make: alone(make) for make in (adamw, muon)}
    for number, (_, options, make, *_) in enumerate(settings):
        assert_equal(ranks[0][number][0], expected[make])
        if "zero_group_size" not in options:
            continue
        held = [own[number][1] for own in ranks]
        assert held[0] == held[2] and held[1] == held[3]
        if make is adamw:
            whole = {name: tensor.numel() for name, tensor in expected[make].items()}
            assert {name: held[0][name] + held[1][name] for name in whole} == whole


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [slow(own, zero) for own in ({"dp": 4, "tp": 2}, {"dp": 4, "pp": 2}) for zero in (1, 2, 3)],
)
def test_groups_within_tp_and_pp(pool: RankPool, degrees: dict[str, int], zero: int) -> None:
    options = {"zero": zero, "zero_group_size": 2}
    found = pool.run(trained, 8, [(degrees, options, adamw, "", "")])
    assert_equal(found[0][0][0], alone(adamw))


@pytest.mark.slow
def test_groups_hold_what_so_many_replicas_would(pool: RankPool, tmp_path: Any) -> None:
    levels = [{"zero": zero} for zero in (1, 2, 3)]
    jobs = [MemoryJob("gpt2", options=own | {"zero_group_size": 2}) for own in levels]
    found = pool.run(measure, 4, (4, 1, 1), jobs, tmp_path)
    whole = pool.run(
        measure, 2, (2, 1, 1), [MemoryJob("gpt2", options=o) for o in levels], tmp_path
    )
    for own, other in zip(found[0], whole[0], strict=True):
        assert (own.estimated, own.at) == (other.estimated, other.at)
        assert own.measured == pytest.approx(other.measured, rel=0.01)
