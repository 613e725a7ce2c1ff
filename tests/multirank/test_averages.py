"""Moving averages of parameters (`ema_decay`), against torch's AveragedModel in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import merak
from merak.checkpoint.optimizer_state import AVERAGE
from merak.checkpoint.pretrained.dcp import export_dcp, load_dcp
from merak.core import mesh
from merak.core.errors import ArgumentsError, TrainingError, WeightsError
from tests.multirank.ranks import RankPool
from tests.multirank.test_optimizers import Make, assert_equal, batch_of, make_model, muon
from tests.tiers import slow

DECAY = 0.8
NUM_STEPS = 5

Setting = tuple[dict[str, int], dict[str, Any], Make]
"""Degrees, options and optimizer of a job."""

Job = tuple[Setting, str, str]
"""A job, the folder that it goes on from, and the one that it saves behind three steps, or ""."""

AWAY, LATE = {"offload_optimizer": "cpu"}, {"delay_optimizer_update": True}


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2)


def alone(make: Make, num_steps: int) -> dict[str, Any]:
    """Averages, parameters, and the losses of a batch with both, in one process."""
    model = make_model()
    optimizer = make(model.parameters())
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(num_steps):
        optimizer.zero_grad()
        model(**batch_of(step)).backward()
        optimizer.step()
        averaged.update_parameters(model)
    with torch.no_grad():
        losses = [float(own(**batch_of(99))) for own in (averaged, model)]
    averages = averaged.module.state_dict()
    return {"average": averages, "now": model.state_dict(), "losses": losses}


def lay_out(
    setting: Setting, dtype: torch.dtype = torch.float64
) -> tuple[Any, Callable[[int], dict[str, torch.Tensor]]]:
    degrees, options, make = setting
    ranks = merak.init(**degrees, device="cpu")

    def own(step: int) -> dict[str, torch.Tensor]:
        batch = batch_of(step).items()
        return {n: t.to(dtype).chunk(ranks.dp)[ranks.dp_rank] for n, t in batch}

    model = make_model().to(dtype)
    options = {"optimizer": make, "ema_decay": DECAY} | options
    return merak.parallelize(model, own(0), **options), own


def trained(job: Job) -> dict[str, Any]:
    """What a job has trained, with the losses of a batch."""
    setting, source, target = job
    parallel, own = lay_out(setting)
    if source:
        parallel.load_checkpoint(source)
    while parallel.num_steps < (3 if target else NUM_STEPS):
        parallel.step(own(parallel.num_steps))
    if target:
        parallel.save_checkpoint(target)
    now = parallel.gather_state_dict()
    with merak.averaged_parameters(parallel.model):
        average = parallel.gather_state_dict()
        losses = [float(parallel.evaluate(own(99)))]
        with pytest.raises(TrainingError, match=r"inside merak.averaged_parameters, where"):
            parallel.save_checkpoint("none")
        with pytest.raises(TrainingError, match=r"stepped inside merak.averaged_parameters"):
            parallel.step(own(99))
    losses.append(float(parallel.evaluate(own(99))))
    assert_equal(parallel.gather_state_dict(), now)
    return {"average": average, "now": now, "losses": losses}


def is_folded(setting: Setting, dtype: torch.dtype, is_late: bool) -> bool:
    """Whether this rank's averages are those of what each update has left of its parameters.

    Args:
        setting: of the job.
        dtype: of the parameters.
        is_late: whether updates are delayed; a job for each number of them then has what they
            leave, since reading it ends the delay.
    """
    average: dict[str, torch.Tensor] = {}
    for num_steps in range(1, NUM_STEPS) if is_late else (NUM_STEPS,):
        parallel, own = lay_out(setting, dtype)
        params = parallel.engine.optimizer_params
        for step in range(num_steps):
            parallel.step(own(step))
            if is_late and step + 1 < num_steps:
                continue
            parallel.engine.complete_updates()
            for name, tensor in params.named.items():
                low = tensor.dtype is torch.bfloat16
                value = tensor.detach().to(torch.float32 if low else tensor.dtype, copy=True)
                known = average.get(name)
                average[name] = value if known is None else known.lerp(value, 1 - DECAY)
        states = {name: parallel.optimizer.state[t][AVERAGE] for name, t in params.named.items()}
        mesh.reset()
    return bool(states) and all(torch.equal(states[name], average[name]) for name in states)


def without(folder: str) -> bool:
    """Whether a job without averages drops those of a checkpoint; it saves another."""
    parallel, _ = lay_out(({"dp": 4}, {"ema_decay": None}, adamw))
    parallel.load_checkpoint(folder)
    parallel.save_checkpoint(f"{folder}-without")
    with (
        pytest.raises(ArgumentsError, match="keeps no averages of its parameters; give ema_decay"),
        merak.averaged_parameters(parallel.model),
    ):
        pass
    states = parallel.optimizer.state.values()
    return bool(states) and all("step" in own and AVERAGE not in own for own in states)


def everything(jobs: list[Job], folder: str) -> tuple[list[dict[str, Any]], list[bool]]:
    found = []
    for job in jobs:
        found.append(trained(job))
        mesh.reset()
    masters = {"zero": 1, "master_weights": True}
    folds = [
        is_folded(({"dp": 4}, masters, adamw), torch.bfloat16, False),
        is_folded(({"dp": 2, "pp": 2}, {}, adamw), torch.bfloat16, False),
        is_folded(({"dp": 2, "pp": 2}, {"zero": 1} | AWAY | LATE, adamw), torch.float64, True),
        without(folder),
    ]
    return found, folds


def check(found: dict[str, Any], make: Make, num_steps: int) -> None:
    expected = alone(make, num_steps)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)  # float32, as reported
    assert_equal(found["now"], expected["now"])
    assert_equal(found["average"], expected["average"])


def test_averages_are_those_of_one_process(pool: RankPool, tmp_path: Path) -> None:
    folder, files = str(tmp_path / "saved"), {"offload_optimizer": str(tmp_path)}
    jobs: list[Job] = [
        (({"dp": 2, "pp": 2}, {"zero": 1}, adamw), "", folder),
        (({"dp": 2, "tp": 2}, {"zero": 3}, adamw), folder, ""),
        (({"tp": 2, "pp": 2}, AWAY, adamw), folder, ""),
        (({"dp": 4}, {"zero": 2} | files, adamw), folder, ""),
        (({"dp": 2, "tp": 2}, {"zero": 1}, muon), "", ""),
    ]
    ranks = pool.run(everything, 4, jobs, folder)
    for ((_, _, make), _, target), found in zip(jobs, ranks[0][0], strict=True):
        check(found, make, 3 if target else NUM_STEPS)
    assert [folds for _, folds in ranks] == [[True] * 4] * 4
    model = make_model()
    export_dcp(Path(folder), tmp_path / "exported", average=True)
    load_dcp(model, tmp_path / "exported")
    assert_equal(model.state_dict(), alone(adamw, 3)["average"])
    with pytest.raises(WeightsError, match="has no averages of its parameters; train with ema"):
        export_dcp(Path(f"{folder}-without"), tmp_path / "none", average=True)


@pytest.mark.parametrize("zero", [slow(zero) for zero in range(4)])
def test_averages_of_all_degrees(pool: RankPool, zero: int) -> None:
    setting = ({"dp": 2, "tp": 2, "pp": 2}, {"zero": zero, "num_microbatches": 2}, adamw)
    found = pool.run(trained, 8, (setting, "", ""))
    check(found[0], adamw, NUM_STEPS)
