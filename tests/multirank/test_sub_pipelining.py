"""Sub-pipelined tensor parallelism gives the gradients of plain tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from merak.core.mesh import init
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.layout import EngineOptions
from merak.engine.program import HalvedRun
from merak.graph.build import GraphSource
from merak.schedule.registry import build, names
from tests.multirank.compare import assert_gradients_close
from tests.multirank.training import SEQUENCE, VOCABULARY, bert, gpt2, llama

SYNCHRONOUS = tuple(name for name in names() if build(name, 4, 8).is_synchronous)
MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def batches(count: int, samples: int, masked: bool) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        ids = torch.randint(1, VOCABULARY, (samples, SEQUENCE), generator=draws)
        mask = torch.ones_like(ids)
        mask[::2, -3:] = 0
        found.append(
            {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if masked else {})
        )
    return found


def gradients(
    family: str, schedules: list[str], degrees: tuple[int, int], samples: int, cache: Path
) -> Any:
    """One step in halves and one not: losses, gradients, and which segments ran in halves."""
    tp, pp = degrees
    mesh = init(tp=tp, pp=pp)
    found = {}
    own = batches(4, samples, family != "gpt2")
    sample = signature(own[0]).columns
    for schedule in schedules:
        for in_halves in (True, False):
            torch.manual_seed(0)
            model = MODELS[family](0.1)
            options = EngineOptions(
                schedule=schedule, num_microbatches=4, sub_pipelining="on" if in_halves else "off"
            )
            engine = build_engine(GraphSource(model, cache_dir=cache), sample, mesh, options)
            losses = engine.train_step(0, [sample] * 4, own, 0.25)
            grads = {name: p.grad.clone() for name, p in engine.parameters.items()}
            runs = [r for s in engine._parts.base.stages.values() for r in s.runs]
            halved = [
                s.whole.segment.name for r in runs if isinstance(r, HalvedRun) for s in r.segments
            ]
            found[schedule, in_halves] = (losses, grads, halved)
    return found


def compare(ranks: list[Any], schedules: list[str]) -> None:
    for rank in ranks:
        for schedule in schedules:
            losses, found, halved = rank[schedule, True]
            plain, expected, whole = rank[schedule, False]
            assert not whole
            assert torch.allclose(losses, plain, rtol=1e-6, atol=0)
            assert_gradients_close(found, expected)
            assert (
                not all(torch.equal(found[name], g) for name, g in expected.items()) or not halved
            )


@pytest.mark.parametrize("family", list(MODELS))
def test_halves_give_what_the_whole_gives(pool, tmp_path, family):
    ranks = pool.run(gradients, 4, family, ["1f1b", "gpipe"], (2, 2), 4, tmp_path)
    compare(ranks, ["1f1b", "gpipe"])
    halved = {name for rank in ranks for name in rank["1f1b", True][2]}
    blocks = 4 * 2  # attention and feed-forward of four layers, and more
    assert len(halved) >= blocks


def test_every_schedule_runs_in_halves(pool, tmp_path):
    schedules = [name for name in SYNCHRONOUS if name not in ("1f1b", "gpipe")]
    ranks = pool.run(gradients, 4, "llama", schedules, (2, 2), 2, tmp_path)
    compare(ranks, schedules)
    assert all(any(rank[name, True][2] for rank in ranks) for name in schedules)
    recomputing = {name for name in schedules if any(build(name, 2, 4).recompute)}
    assert recomputing >= {"early_recompute", "last_no_recompute", "shifted_critical_path"}


def test_an_odd_microbatch_runs_whole(pool, tmp_path):
    ranks = pool.run(gradients, 2, "llama", ["1f1b"], (2, 1), 3, tmp_path)
    compare(ranks, ["1f1b"])
    assert not any(rank["1f1b", True][2] for rank in ranks)
