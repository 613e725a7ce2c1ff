"""Batches whose shapes change from step to step and from microbatch to microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from merak.core.mesh import reset
from merak.core.shards import join
from merak.core.start.init import init
from merak.data import signature
from merak.engine import build_engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.schedule.registry import build, names
from tests.multirank.ranks import RankPool
from tests.multirank.training import VOCABULARY, Layout, gpt2, llama
from tests.tiers import slow

Batch = dict[str, torch.Tensor]
Step = dict[str, Any]

LENGTHS = (9, 5, 12, 9, 7)
"""Of the steps' first microbatches; the second one's are a token longer."""

MICROBATCHES = (2, 2, 2, 1, 2)
"""How many each step has: some have fewer."""

SAMPLES = (2, 2, 2, 1, 2)
"""Samples of each step's last microbatch: the fourth step is ragged."""


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


SCHEDULES = tuple(name for name in names() if build(name, 2, 4).is_synchronous)
"""Those after a step of which every gradient is there."""

MODELS = {"gpt2": gpt2, "llama": llama, "t5": t5}


def batches_of(step: int, family: str, replica: int) -> list[Batch]:
    """A step's microbatches of a replica, each of another length."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    found = []
    for number in range(MICROBATCHES[step]):
        is_last = number == MICROBATCHES[step] - 1
        shape = (SAMPLES[step] if is_last else 2, LENGTHS[step] + number)
        ids = torch.randint(1, VOCABULARY, shape, generator=generator)
        other = (shape[0], 15 - LENGTHS[step]) if family == "t5" else shape
        labels = torch.randint(1, VOCABULARY, other, generator=generator)
        found.append({"input_ids": ids, "labels": labels})
    return found


def model_of(family: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[family]()


def train_in_one_process(family: str, num_replicas: int) -> list[Step]:
    """Every step's losses and gradients in one process."""
    model = model_of(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = []
    for step in range(len(LENGTHS)):
        optimizer.zero_grad()
        rows = [batches_of(step, family, replica) for replica in range(num_replicas)]
        batches = [batch for row in rows for batch in row]
        losses = [model(**batch)["loss"] / len(batches) for batch in batches]
        torch.stack(losses).sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        steps.append({"loss": float(sum(losses)), "gradients": gradients})
    return steps


def train_on_ranks(
    layout: Layout, family: str, schedule: str, cache: Path, num_microbatches: int = 2
) -> Mapping[str, Any]:
    """The same on this rank of a layout, with room for three shapes alone."""
    dp, tp, pp = layout
    mesh = init(dp=dp, tp=tp, pp=pp, device="cpu")
    sample = signature(batches_of(0, family, 0)[0]).columns
    options = EngineOptions(schedule=schedule, num_microbatches=num_microbatches, max_shapes=3)
    source = GraphSource(model_of(family), device=mesh.device, cache_dir=cache)
    engine = build_engine(source, sample, mesh, options)
    optimizer = torch.optim.SGD(engine.optimizer_params.named.values(), lr=0.05)
    steps = []
    for step in range(len(LENGTHS)):
        engine.optimizer_params.clear_gradients()
        batches = batches_of(step, family, mesh.dp_rank)
        columns = [signature(batch).columns for batch in batches]
        losses = engine.train_step(step, columns, batches, 1.0 / (len(batches) * dp))
        own = {n: p.grad.clone() for n, p in engine.parameters.items() if p.grad is not None}
        optimizer.step()
        steps.append({"loss": float(losses.sum()), "gradients": own})
    place = (mesh.dp_rank, mesh.tp_rank, mesh.pp_rank)
    return {"steps": steps, "shards": dict(engine.shards), "place": place}


def train_by_every_schedule(layout: Layout, family: str, cache: Path) -> list[Mapping[str, Any]]:
    """`train_on_ranks` by one schedule after another, some of which need four microbatches."""
    found = []
    for schedule in SCHEDULES:
        found.append(train_on_ranks(layout, family, schedule, cache, num_microbatches=4))
        reset()
    return found


def whole_gradients(ranks: Sequence[Mapping[str, Any]], step: int) -> dict[str, torch.Tensor]:
    """A step's gradients of the whole model, from the first replica's ranks."""
    found: dict[str, list[torch.Tensor]] = {}
    shards: dict[str, Any] = {}
    for rank in sorted(ranks, key=lambda rank: rank["place"]):
        if rank["place"][0] == 0:
            shards |= rank["shards"]
            for name, gradient in rank["steps"][step]["gradients"].items():
                found.setdefault(name, []).append(gradient)
    return {n: join(g, shards[n]) if n in shards else g[0] for n, g in found.items()}


@pytest.mark.parametrize(
    ("family", "layout", "schedule"),
    [
        ("llama", (1, 2, 1), "1f1b"),
        slow("llama", (1, 2, 2), "1f1b"),
        slow("t5", (1, 1, 2), "zero_bubble_h1"),
        slow("gpt2", (2, 1, 2), "interleaved_1f1b"),
    ],
)
def test_gradients_over_changing_shapes(
    pool: RankPool, family: str, layout: Layout, schedule: str, tmp_path: Path
) -> None:
    (expected,) = pool.run(train_in_one_process, 1, family, layout[0])
    num_ranks = layout[0] * layout[1] * layout[2]
    ranks = pool.run(train_on_ranks, num_ranks, layout, family, schedule, tmp_path)
    assert_steps(ranks, expected, layout[0])


@pytest.mark.slow
def test_every_schedule_takes_changing_shapes(pool: RankPool, tmp_path: Path) -> None:
    layout: Layout = (1, 1, 2)
    (expected,) = pool.run(train_in_one_process, 1, "gpt2", 1)
    by_rank = pool.run(train_by_every_schedule, 2, layout, "gpt2", tmp_path)
    for ranks in zip(*by_rank, strict=True):
        assert_steps(ranks, expected, 1)


def assert_steps(
    ranks: Sequence[Mapping[str, Any]], expected: Sequence[Step], num_replicas: int
) -> None:
    """Every step's losses and gradients are those of one process."""
    for step, wanted in enumerate(expected):
        losses = {r["place"]: r["steps"][step]["loss"] for r in ranks}
        replicas = [losses[replica, 0, 0] for replica in range(num_replicas)]
        assert sum(replicas) == pytest.approx(wanted["loss"], rel=1e-5)
        found = whole_gradients(ranks, step)
        assert found.keys() == wanted["gradients"].keys()
        largest = max(float(g.abs().max()) for g in wanted["gradients"].values())
        for name, gradient in wanted["gradients"].items():
            size = max(float(gradient.abs().max()), 1e-3 * largest)
            assert float((found[name] - gradient).abs().max()) <= 1e-5 * size, (step, name)
