"""A loop of one's own that saves, and goes on in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from merak.core.errors import WeightsError
from tests.multirank.ranks import RankPool
from tests.multirank.test_parallelize import Classifier, Layout, adamw, batch_of


def losses(layout: Layout, steps: range, folder: str) -> tuple[list[float], Any]:
    """Train, from a checkpoint if the first step is not 0; save after the last one."""
    dp, tp, pp = layout
    mesh = merak.init(dp=dp, tp=tp, pp=pp, device="cpu")

    def own(step: int) -> dict[str, torch.Tensor]:
        return {
            name: value.chunk(dp)[mesh.dp_rank] for name, value in batch_of(step, "loss").items()
        }

    parallel = merak.parallelize(
        Classifier(), example_batch=own(0), optimizer=adamw, num_microbatches=2, zero=1
    )
    values = parallel.load_checkpoint(folder) if steps.start else None
    assert parallel.num_steps == steps.start
    found = [float(parallel.step(own(step))) for step in steps]
    parallel.save_checkpoint(folder, {"seen": steps.stop, "rate": 0.1})
    return found, values


def refused(folder: str) -> str:
    merak.init(pp=2, device="cpu")
    parallel = merak.parallelize(
        Classifier(), example_batch=batch_of(0, "loss"), optimizer=adamw, num_microbatches=2
    )
    with pytest.raises(WeightsError) as caught:
        parallel.load_checkpoint(folder)
    return str(caught.value)


def test_a_loop_goes_on_in_another_layout(pool: RankPool, tmp_path: Path) -> None:
    folder, other = str(tmp_path / "saved"), str(tmp_path / "other")
    ((whole, _), _) = pool.run(losses, 2, (1, 1, 2), range(6), other)
    ((first, _), _) = pool.run(losses, 2, (1, 1, 2), range(3), folder)
    ((then, values), _) = pool.run(losses, 2, (2, 1, 1), range(3, 6), folder)
    assert first + then == pytest.approx(whole, rel=1e-5)
    assert values == {"seen": 3, "rate": 0.1}
    file = tmp_path / "saved" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for told in pool.run(refused, 2, folder):
        assert "saved is damaged (rank-00001.safetensors has " in told
