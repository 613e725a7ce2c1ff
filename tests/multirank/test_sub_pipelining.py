"""Sub-pipelined tensor parallelism gives the gradients of plain tensor parallelism."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn

from merak.core.start.init import init
from merak.data import signature
from merak.engine import build_engine
from merak.engine.segments import joint_call
from merak.graph.joint import segment as joint_segments
from merak.graph.program.program import SubPipelinedRun
from merak.graph.segment.build import GraphSource, build_graph
from merak.plan import sub_pipelining as overlap
from merak.plan.cost.measured_times import SegmentTimes
from merak.plan.engine_options import EngineOptions
from merak.plan.layout import Layout
from merak.plan.partition import Partition
from merak.plan.step_plans import StepPlans
from merak.schedule.registry import build, names
from tests.multirank.training import SEQUENCE, VOCABULARY, bert, gpt2, llama
from tests.tiers import slow
from tests.unit.graph.architectures import ARCHITECTURES
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

SYNCHRONOUS = tuple(name for name in names() if build(name, 4, 8).is_synchronous)


class Block(nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Blocks whose last one is in one segment with the loss."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def blocks(dropout: float) -> nn.Module:
    return Blocks(dropout)


def architecture(name: str, samples: int) -> list[dict[str, torch.Tensor]]:
    """Batches of one of the architectures that tensor parallelism must split."""
    batch = ARCHITECTURES[name].batch()
    rows = torch.arange(samples) % 2
    return [{column: values[rows] for column, values in batch.items()}] * 4


def frozen(dropout: float) -> nn.Module:
    """GPT-2 of which only the upper layers train."""
    model = gpt2(dropout)
    for module in (model.transformer.wpe, model.transformer.wte, model.transformer.h[0]):
        module.requires_grad_(False)
    return model


MODELS = {
    "gpt2": gpt2,
    "frozen": frozen,
    "llama": llama,
    "bert": bert,
    "blocks": blocks,
    "t5": lambda dropout: ARCHITECTURES["t5"].build(),
    "opt": lambda dropout: ARCHITECTURES["opt"].build(),
}


def draw(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 6, 16, generator=torch.Generator().manual_seed(1))}


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


def own_batches(family: str, samples: int) -> list[dict[str, torch.Tensor]]:
    if family == "blocks":
        return [draw(samples)] * 4
    if family in ARCHITECTURES and family not in ("gpt2", "llama", "bert"):
        return architecture(family, samples)
    return batches(4, samples, family in ("llama", "bert"))


def gradients(
    family: str, schedules: list[str], degrees: tuple[int, int], samples: int, cache: Path
) -> Any:
    """One step in halves and one not: losses, gradients, and which segments ran in halves."""
    tp, pp = degrees
    mesh = init(tp=tp, pp=pp)
    found = {}
    own = own_batches(family, samples)
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
            trained = engine.parameters.items()
            grads = {name: p.grad.clone() for name, p in trained if p.requires_grad}
            runs = [r for s in engine._state.base.stages.values() for r in s.runs]
            halved = [
                s.whole.segment.name
                for r in runs
                if isinstance(r, SubPipelinedRun)
                for s in r.segments
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
            assert_gradients_equal(found, expected)
            assert (
                not all(torch.equal(found[name], g) for name, g in expected.items()) or not halved
            )


@pytest.mark.parametrize("family", ["gpt2", slow("bert"), slow("frozen")])
def test_sub_microbatches_give_what_the_microbatch_gives(pool, tmp_path, family):
    ranks = pool.run(gradients, 4, family, ["1f1b", "gpipe"], (2, 2), 4, tmp_path)
    compare(ranks, ["1f1b", "gpipe"])
    halved = {name for rank in ranks for name in rank["1f1b", True][2]}
    blocks = 2 * 2  # attention and feed-forward of two layers, and more
    assert len(halved) >= blocks


@pytest.mark.slow
def test_every_schedule_runs_unequal_sub_microbatches(pool, tmp_path):
    schedules = [name for name in SYNCHRONOUS if name not in ("1f1b", "gpipe")]
    ranks = pool.run(gradients, 4, "llama", schedules, (2, 2), 3, tmp_path)
    compare(ranks, schedules)
    assert all(any(rank[name, True][2] for rank in ranks) for name in schedules)
    recomputing = {name for name in schedules if any(build(name, 2, 4).recompute)}
    assert recomputing >= {"early_recompute", "last_no_recompute", "shifted_critical_path"}


@pytest.mark.slow
def test_unequal_sub_microbatches_draw_and_mask_as_the_microbatch(pool, tmp_path):
    ranks = pool.run(gradients, 4, "bert", ["1f1b", "gpipe"], (2, 2), 3, tmp_path)
    compare(ranks, ["1f1b", "gpipe"])
    assert len({name for rank in ranks for name in rank["1f1b", True][2]}) >= 2 * 2


@pytest.mark.parametrize(("family", "blocks"), [slow("t5", 2 * 2 + 2 * 3), slow("opt", 2 * 2)])
def test_equal_and_flat_values_cross_segments(pool, tmp_path, family, blocks):
    """T5 hands a bias of positions on, which no sample has; OPT hands on samples in flat rows."""
    ranks = pool.run(gradients, 4, family, ["1f1b", "gpipe"], (2, 2), 3, tmp_path)
    compare(ranks, ["1f1b", "gpipe"])
    assert len({name for rank in ranks for name in rank["1f1b", True][2]}) >= blocks


@pytest.mark.parametrize("samples", [5])
def test_a_block_with_the_loss_in_its_segment_is_sub_pipelined(pool, tmp_path, samples):
    ranks = pool.run(gradients, 2, "blocks", ["1f1b"], (2, 1), samples, tmp_path)
    compare(ranks, ["1f1b"])
    columns = dict(signature(draw(samples)).columns)
    whole = build_graph(GraphSource(blocks(0.1)), columns, training=True)
    assert ranks[0]["1f1b", True][2] == [segment.name for segment in whole.segments]


def kept(choices: list[str], cache: Path) -> list[tuple[list[torch.Tensor], int]]:
    """Of sub-pipelined steps: losses and gradients, and what forwards keep of what recomputes."""
    mesh, own, found = init(tp=2), batches(2, 4, False), []
    sample, end = signature(own[0]).columns, joint_call._end_forward
    for recompute in choices:
        counts = []

        def noted(run: Any, made: Any, *others: Any, counts: list[int] = counts) -> None:
            end(run, made, *others)
            counts.append(sum(tensor.numel() for tensor in made.kept))

        torch.manual_seed(0)
        options = EngineOptions(num_microbatches=2, sub_pipelining="on", recompute=recompute)
        source = GraphSource(gpt2(0.1), cache_dir=cache)
        engine = build_engine(source, sample, mesh, options)
        with mock.patch.object(joint_call, "_end_forward", noted):
            losses = engine.train_step(0, [sample] * 2, own, 0.5)
        grads = [p.grad.clone() for p in engine.parameters.values() if p.grad is not None]
        found.append(([losses, *grads], sum(counts)))
    return found


def test_sub_microbatches_keep_what_is_slow_to_recompute(pool, tmp_path):
    for (off, nothing), (full, least), (selective, more) in pool.run(
        kept, 2, ["off", "full", "selective"], tmp_path
    ):
        assert all(map(torch.equal, off, full)) and all(map(torch.equal, off, selective))
        assert nothing <= least < more


def gradients_without_graphs(schedules: list[str], cache: Path) -> tuple[Any, int]:
    """Of GPT-2, of whose segments those with an activation have no joint graph."""
    derive, refused = joint_segments.derive, []

    def derived(graph: fx.Graph, *others: Any) -> Any:
        if any("tanh" in str(node.target) for node in graph.nodes):
            refused.append(graph)
            raise ValueError("no graph")
        return derive(graph, *others)

    with mock.patch.multiple(joint_segments, derive=derived, _MADE={}):
        return gradients("gpt2", schedules, (2, 1), 4, cache), len(refused)


@pytest.mark.slow
def test_segments_that_autograd_runs_are_whole_between_turns_of_the_others(pool, tmp_path):
    schedules = ["1f1b", "early_recompute", "zero_bubble_h1"]
    ranks = pool.run(gradients_without_graphs, 2, schedules, tmp_path)
    compare([found for found, _ in ranks], schedules)
    assert all(refused for _, refused in ranks)


@pytest.mark.slow
def test_a_single_sample_runs_whole_and_says_so(pool, tmp_path):
    ranks = pool.run(gradients, 2, "llama", ["1f1b"], (2, 1), 1, tmp_path)
    compare(ranks, ["1f1b"])
    assert not any(rank["1f1b", True][2] for rank in ranks)


class KnownTimes:
    """A machine on which a matrix product takes 1 ms and an all-reduce a known time.

    Its clock goes on with its work alone, so that what is measured on it is the same anywhere.
    """

    def __init__(self, sum_s: float) -> None:
        self.now_s = 0.0
        self.sum_s = sum_s
        self.end_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def product(self, *matrices: torch.Tensor) -> None:
        self.now_s += 1e-3

    def start(self, tensor: torch.Tensor, axis: str) -> KnownTimes:
        self.end_s = self.now_s + self.sum_s
        return self

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.end_s)


def choices(sum_s: float, wish: str, ranks_per_node: int, samples: int) -> bool:
    """What a job of blocks that compute for 0.1 s decides, where sums take a known time."""
    machine = KnownTimes(sum_s)
    hosts = tuple(f"host-{rank // ranks_per_node}" for rank in range(2))
    mesh = dataclasses.replace(init(tp=2), hosts=hosts)
    columns = dict(signature(draw(samples)).columns)
    graph = build_graph(GraphSource(blocks(0.1)), columns, training=True)
    layout = Layout(graph, Partition(len(graph.segments), ()), StepPlans("1f1b", 1, 4))
    times = [SegmentTimes(s.name, 0.1, 0.2) for s in graph.segments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "start_all_reduce", machine.start)
        patch.setattr(overlap, "time", machine)
        patch.setattr(torch, "mm", machine.product)
        return overlap.choose_sub_pipelining(wish, layout, mesh, lambda: times)


CASES = {
    "sums take as long as computation": ((0.05, "auto", 1, 4), True),
    "sums are short": ((1e-4, "auto", 1, 4), False),
    "one machine": ((0.05, "auto", 2, 4), False),
    "one sample": ((0.05, "auto", 1, 1), False),
}


def all_choices() -> dict[str, bool]:
    """What jobs decide, by case."""
    return {name: choices(*given) for name, (given, _) in CASES.items()}


def test_auto_sub_pipelines_where_all_reduces_take_as_long_as_computation(pool):
    expected = {name: decided for name, (_, decided) in CASES.items()}
    assert pool.run(all_choices, 2) == [expected, expected]
