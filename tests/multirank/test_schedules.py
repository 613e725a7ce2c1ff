"""Every schedule that the engine runs gives one process's gradients, tied weights included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature as signature_of
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from merak.core.shards import join
from merak.core.start.init import init
from merak.data import signature
from merak.engine import build_engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.plan.recompute_spec import Recompute
from merak.schedule.catalog import FORMULAS
from merak.schedule.registry import build, names
from merak.schedule.serialize import to_json
from tests.multirank.test_asynchronous import OTHER_OPTIONS as ASYNCHRONOUS_OPTIONS
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

SYNCHRONOUS = tuple(name for name in names() if build(name, 4, 8).is_synchronous)
SEVERAL_PIPES = tuple(name for name in SYNCHRONOUS if len(build(name, 4, 8).pipes) > 1)


def tiny_gpt2() -> GPT2LMHeadModel:
    """A GPT-2 of uneven segments, with tied weights and dropout, the same on every rank."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3,
        n_embd=32,
        n_head=4,
        vocab_size=48,
        n_positions=16,
        use_cache=False,
        attn_pdrop=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Microbatches with their labels."""
    draws = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 48, (2, 16), generator=draws) for _ in range(count)]
    return [{"input_ids": i, "labels": i} for i in ids]


def gradients(
    schedules: list[str],
    degrees: tuple[int, int, int],
    counts: list[int],
    cache: Path,
    recompute: Recompute = None,
    cp: int = 1,
    chosen: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Losses, gradients and their shards of one step, per schedule and number of microbatches.

    Args:
        schedules: names, or paths of files.
        degrees: dp, tp and pp.
        counts: microbatches of a replica's step.
        cache: of the trace, which is the same for all schedules.
        recompute: what recomputes.
        cp: ranks that share the tokens of a sample.
        chosen: options of each schedule; its defaults where left out.
    """
    dp, tp, pp = degrees
    mesh = init(dp=dp, tp=tp, pp=pp, cp=cp)
    found = {}
    for schedule, own in zip_longest(schedules, chosen):
        options = EngineOptions(
            schedule=schedule,
            schedule_options=own,
            num_microbatches=max(counts),
            recompute=recompute,
        )
        sample = signature(batches(1)[0]).columns
        engine = build_engine(GraphSource(tiny_gpt2(), cache_dir=cache), sample, mesh, options)
        key = schedule if own is None else f"{schedule} {dict(own)}"
        found[key] = []
        for count in counts:
            drawn = batches(count * dp)[mesh.dp_rank :: dp]
            losses = engine.train_step(0, [sample] * count, drawn, 1.0 / (count * dp))
            norm = float(engine.gradient_norm())
            grads = {name: p.grad.clone() for name, p in engine.parameters.items()}
            place = (mesh.pp_rank, mesh.tp_rank)
            found[key].append((losses, norm, grads, engine.shards, place))
            for parameter in engine.parameters.values():
                parameter.grad = None
    return found


def whole(ranks: list[tuple[dict, dict, tuple[int, int]]]) -> dict[str, torch.Tensor]:
    """The gradients of all ranks; copies on several ranks must be equal to the last bit."""
    found: dict[str, torch.Tensor] = {}
    for gradients, shards, (pp_rank, _) in ranks:
        for name in gradients:
            beside = [g for g, _, (pp, _) in ranks if pp == pp_rank and name in g]
            shares = [share[name] for share in beside]
            value = join(shares, shards[name]) if name in shards else gradients[name]
            assert torch.equal(found.setdefault(name, value), value), name
    return found


@pytest.fixture(scope="module")
def own_schedule(tmp_path_factory):
    """A user's own file for two ranks and four microbatches."""
    path = tmp_path_factory.mktemp("schedules") / "own.json"
    path.write_text(to_json(build("gpipe", 2, 4)))
    return str(path)


@pytest.mark.nccl_rules
@pytest.mark.parametrize(("pp", "counts"), [(2, [4, 1, 3]), slow(4, [8, 3])])
def test_all_schedules_give_the_gradients_of_one_process(pool, own_schedule, tmp_path, pp, counts):
    # The same dropout patterns come from the same engine on one rank; parity of that engine with
    # eager PyTorch is tested elsewhere.
    schedules = [*SYNCHRONOUS, *([own_schedule] if pp == 2 else [])]
    (reference,) = pool.run(gradients, 1, ["1f1b"], (1, 1, 1), counts, tmp_path)
    by_rank = pool.run(gradients, pp, schedules, (1, 1, pp), counts, tmp_path)
    for schedule in schedules:
        for step, (losses, norm, expected, _, _) in enumerate(reference["1f1b"]):
            ranks = [rank[schedule][step] for rank in by_rank]
            found = whole([rank[2:] for rank in ranks])
            assert found.keys() == expected.keys()
            assert all(torch.equal(rank[0], losses) for rank in ranks), schedule
            assert [rank[1] for rank in ranks] == pytest.approx([norm] * pp, rel=1e-6), schedule
            if schedule in SEVERAL_PIPES:  # each sums its own microbatches first
                assert_gradients_equal(found, expected)
                continue
            for name, gradient in expected.items():
                assert torch.equal(found[name], gradient), (schedule, name)


OTHER_OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "gpipe": ({"recompute": False},),
    "1f1b": ({"recompute": False},),
    "shifted_critical_path": ({"early_everywhere": True},),
    "interleaved_1f1b": ({"chunks": 3}, {"recompute": False}),
    "looped_bfs": ({"chunks": 3}, {"recompute": False}),
    "interleaved_zero_bubble": ({"chunks": 3},),
    "chimera": (
        {"pairs": 2},
        {"pairs": 2, "method": "forward_doubling"},
        {"method": "forward_doubling"},
        {"method": "backward_halving"},
        {"eager_middle": True},
        {"recompute": True},
    ),
    "gems": ({"recompute": True},),
}
"""Options of synchronous schedules besides their defaults."""


def test_no_option_of_a_schedule_is_left_out():
    for name, builder in FORMULAS.items():
        parameters = signature_of(builder.build).parameters.values()
        options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        trained = OTHER_OPTIONS.get(name, ()) or ASYNCHRONOUS_OPTIONS.get(name, ())
        assert options == {key for own in trained for key in own}, name


@pytest.mark.parametrize("pp", [2, 4])
def test_every_option_gives_the_gradients_of_one_process(pool, tmp_path, pp):
    """Three chunks a rank on two ranks, as the model has few segments; all others on four."""
    counts = [8, 3]
    cases = [(name, own) for name, every in OTHER_OPTIONS.items() for own in every]
    cases = [(name, own) for name, own in cases if ("chunks" in own) == (pp == 2)]
    (reference,) = pool.run(gradients, 1, ["1f1b"], (1, 1, 1), counts, tmp_path)
    schedules, chosen = [name for name, _ in cases], [own for _, own in cases]
    by_rank = pool.run(gradients, pp, schedules, (1, 1, pp), counts, tmp_path, None, 1, chosen)
    for name, own in cases:
        for step, (losses, norm, expected, _, _) in enumerate(reference["1f1b"]):
            ranks = [rank[f"{name} {dict(own)}"][step] for rank in by_rank]
            assert all(torch.equal(rank[0], losses) for rank in ranks), (name, own)
            assert [rank[1] for rank in ranks] == pytest.approx([norm] * pp, rel=1e-6), (name, own)
            assert_gradients_equal(whole([rank[2:] for rank in ranks]), expected)


@pytest.mark.parametrize("recompute", ["full", slow("1,2,5")])
def test_recomputation_gives_the_gradients_of_one_process(pool, tmp_path, recompute):
    schedules, counts = ["1f1b", "shifted_critical_path", "chimera", "zero_bubble_v"], [4, 1]
    (reference,) = pool.run(gradients, 1, ["1f1b"], (1, 1, 1), counts, tmp_path)
    kept = pool.run(gradients, 2, schedules, (1, 1, 2), counts, tmp_path, "off")
    by_rank = pool.run(gradients, 2, schedules, (1, 1, 2), counts, tmp_path, recompute)
    for schedule in schedules:
        for step, (losses, norm, expected, _, _) in enumerate(reference["1f1b"]):
            assert all(torch.equal(rank[schedule][step][0], losses) for rank in by_rank)
            norms = [rank[schedule][step][1] for rank in by_rank]
            assert norms == pytest.approx([norm] * 2, rel=1e-6), schedule
            found = whole([rank[schedule][step][2:] for rank in by_rank])
            assert_gradients_equal(found, expected)
            for name, gradient in whole([rank[schedule][step][2:] for rank in kept]).items():
                assert torch.equal(found[name], gradient), (schedule, name)


@pytest.mark.parametrize("degrees", [slow((2, 1, 2)), slow((1, 2, 2))])
def test_all_schedules_run_beside_data_and_tensor_parallelism(pool, tmp_path, degrees):
    dp, tp, pp = degrees
    counts = [4, 1]
    everything = [count * dp for count in counts]
    (reference,) = pool.run(gradients, 1, ["1f1b"], (1, 1, 1), everything, tmp_path)
    by_rank = pool.run(gradients, dp * tp * pp, list(SYNCHRONOUS), degrees, counts, tmp_path)
    for schedule in SYNCHRONOUS:
        for step, (losses, norm, expected, _, _) in enumerate(reference["1f1b"]):
            ranks = [rank[schedule][step] for rank in by_rank]
            assert [rank[1] for rank in ranks] == pytest.approx([norm] * len(ranks), rel=1e-5)
            total = sum(ranks[replica * tp][0].sum() for replica in range(dp))
            assert float(total) == pytest.approx(float(losses.sum()), rel=1e-6)
            for replica in range(dp):
                own = [r[2:] for i, r in enumerate(ranks) if i // tp % dp == replica]
                assert_gradients_equal(whole(own), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "recompute"), [(1, "full"), (2, None)])
def test_all_schedules_run_where_ranks_share_tokens(pool, tmp_path, tp, recompute):
    """On 4 ranks, and on 8 with tensor parallelism."""
    counts, cp = [4, 1], 2
    (reference,) = pool.run(gradients, 1, ["1f1b"], (1, 1, 1), counts, tmp_path)
    arguments = (list(SYNCHRONOUS), (1, tp, 2), counts, tmp_path, recompute, cp)
    by_rank = pool.run(gradients, 2 * tp * cp, *arguments)
    for schedule in SYNCHRONOUS:
        for step, (losses, norm, expected, _, _) in enumerate(reference["1f1b"]):
            ranks = [rank[schedule][step] for rank in by_rank]
            assert [rank[1] for rank in ranks] == pytest.approx([norm] * len(ranks), rel=1e-5)
            for rank in ranks:
                assert torch.allclose(rank[0], losses, rtol=1e-5), schedule
            for share in range(cp):
                own = [r[2:] for i, r in enumerate(ranks) if i // tp % cp == share]
                assert_gradients_equal(whole(own), expected)
