"""Segments rewritten for tensor parallelism on real ranks: gradients equal those of one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

import merak
from merak.check import CheckOptions, Job
from merak.core.errors import PlanError
from merak.core.shards import ParameterShard, join, take
from merak.engine import EngineOptions, build_engine
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.search.search import Search
from merak.ops import collectives
from merak.ops.sharded_statistics import (
    sharded_layer_norm,
    sharded_rms_norm,
    sharded_std,
    sharded_var,
)
from tests import shared_cache
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.zoo.plain.models import BY_NAME, case_of

Gradients = dict[str, torch.Tensor]


def loss_and_gradients(
    family: str, attention: str, dropout: float, tp: int
) -> tuple[float, Gradients, dict[str, ParameterShard]]:
    """What one rank computes on its shares."""
    rank = merak.init(tp=tp, device="cpu").tp_rank if tp > 1 else 0
    model, columns = cases.build(family, attention, dropout), cases.batch()
    graph = cases.traced(model, columns)
    graph, shards = cases.shard_model(graph, tensor_parallel(graph, None, tp).weights, tp)
    shares = cases.local(cases.weights(model), shards, rank)
    loss = cases.run_model(graph, shares, {**cases.buffers(model, graph), **columns})
    loss.backward()
    gradients = {name: share.grad for name, share in shares.items() if share.grad is not None}
    return loss.item(), gradients, shards


@pytest.mark.nccl_rules
@pytest.mark.parametrize(  # any two values, but tp=4 without dropout, in one of the rows
    ("tp", "dropout", "family", "attention"),
    [
        (2, 0.0, "gpt2", "sdpa"), slow(2, 0.0, "llama", "sdpa"), slow(2, 0.0, "bert", "eager"),
        slow(2, 0.2, "gpt2", "eager"), (2, 0.2, "llama", "eager"), slow(2, 0.2, "bert", "sdpa"),
        slow(4, 0.2, "gpt2", "sdpa"), slow(4, 0.2, "llama", "sdpa"), slow(4, 0.2, "bert", "eager"),
    ],
)  # fmt: skip
def test_ranks_equal_one_process(
    pool: RankPool, family: str, attention: str, dropout: float, tp: int
) -> None:
    expected_loss, expected, _ = loss_and_gradients(family, attention, dropout, 1)
    ranks = pool.run(loss_and_gradients, tp, family, attention, dropout, tp)
    shards = ranks[0][2]
    for loss, gradients, _ in ranks:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        found = {
            name: join([own[name] for _, own, _ in ranks], shards[name])
            if name in shards
            else gradients[name]
            for name in expected
        }
        cases.assert_gradients_equal(found, expected)


def build_with_another_search(folder: Path) -> str:
    """The error of a rank of two, of which one finds no group of weights to split."""
    ranks = merak.init(tp=2, device="cpu")
    job = Job(case_of(BY_NAME["UNet"]), options=CheckOptions(microbatch=4))
    source = job.source(ranks.device, folder)
    none = patch.object(Search, "_groups", lambda search, seeds: iter(()))
    as_if_first = patch.dict(shared_cache.SPLITS, clear=True)
    with as_if_first, none if ranks.rank == 1 else nullcontext(), pytest.raises(PlanError) as error:
        build_engine(source, tuple(job.sample().items()), ranks, EngineOptions())
    return str(error.value)


def test_ranks_with_different_programs_end(pool: RankPool, tmp_path: Path) -> None:
    for message in pool.run(build_with_another_search, 2, tmp_path):
        assert message.startswith("Ranks 0 and 1 have derived different programs for segment ")


def apply_all(degree: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Result and gradient of every collective on rank r of an input of r + 1 times a pattern."""
    rank = merak.init(tp=degree, device="cpu").tp_rank
    pattern = torch.arange(12.0).reshape(2, 6)
    layout = (1, (2 * degree, 4 * degree), "tp")
    whole = torch.arange(12.0 * degree).reshape(2, 6 * degree)
    cases_by_name = {
        "copy_to": (collectives.copy_to, pattern, ("tp",)),
        "reduce_from": (collectives.reduce_from, pattern * (rank + 1), ("tp",)),
        "gather_from": (collectives.gather_from, pattern * (rank + 1), layout),
        "slice_to": (collectives.slice_to, whole, layout),
    }
    found = {}
    for name, (function, x, args) in cases_by_name.items():
        x = x.t().contiguous().t().requires_grad_()  # another memory layout
        result = function(x, *args)
        result.backward(torch.ones_like(result).cumsum(1) * (rank + 1))
        assert x.grad is not None
        found[name] = (result.detach(), x.grad)
    return found


@pytest.mark.parametrize("degree", [2, slow(4)])
def test_collectives_and_their_gradients(pool: RankPool, degree: int) -> None:
    pattern = torch.arange(12.0).reshape(2, 6)
    shard = ParameterShard(1, (2 * degree, 4 * degree), degree)
    whole = torch.arange(12.0 * degree).reshape(2, 6 * degree)
    counts, wide = torch.ones(2, 6).cumsum(1), torch.ones(2, 6 * degree).cumsum(1)
    total = degree * (degree + 1) / 2
    ranks = pool.run(apply_all, degree, degree)
    gathered = join([pattern * (r + 1) for r in range(degree)], shard)
    slices = join([counts * (r + 1) for r in range(degree)], shard)
    for rank, found in enumerate(ranks):
        expected = {
            "copy_to": (pattern, counts * total),
            "reduce_from": (pattern * total, counts * (rank + 1)),
            "gather_from": (gathered, take(wide * (rank + 1), shard, rank)),
            "slice_to": (take(whole, shard, rank), slices),
        }
        for name, (result, gradient) in expected.items():
            assert torch.equal(found[name][0], result), name
            assert torch.equal(found[name][1], gradient), name


def apply_shared(degree: int, copies: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Result and gradient of collectives of shards that so many ranks hold each."""
    rank = merak.init(tp=degree, device="cpu").tp_rank
    groups = degree // copies
    own = torch.arange(6.0 * copies).reshape(2, 3 * copies) + rank // copies
    layout = (1, (groups * copies, 2 * groups * copies), copies)
    cases_by_name = {
        "copy_shared_to": (collectives.copy_shared_to, torch.arange(5.0), (copies, "tp")),
        "gather_shared": (collectives.gather_shared, own, (*layout, "tp")),
        "own_share": (collectives.own_share, own, (*layout, 1, "tp")),
    }
    found = {}
    for name, (function, x, args) in cases_by_name.items():
        x = x.clone().requires_grad_()
        result = function(x, *args)
        result.backward(torch.ones_like(result).cumsum(-1) * (rank + 1))
        assert x.grad is not None
        found[name] = (result.detach(), x.grad)
    return found


@pytest.mark.parametrize(("degree", "copies"), [(2, 2), slow(4, 2), slow(4, 4)])
def test_collectives_of_shards_on_several_ranks(pool: RankPool, degree: int, copies: int) -> None:
    groups, counts = degree // copies, torch.arange(5.0) + 1
    shard = ParameterShard(1, (groups * copies, 2 * groups * copies), degree, copies=copies)
    own = [torch.arange(6.0 * copies).reshape(2, -1) + r // copies for r in range(degree)]
    whole, among = join(own, shard), ParameterShard(1, (copies, 2 * copies), copies)
    wide = torch.ones_like(whole).cumsum(-1)
    for rank, found in enumerate(pool.run(apply_shared, degree, degree, copies)):
        partners = range(rank // copies * copies, (rank // copies + 1) * copies)
        held = own[rank].requires_grad_()
        share = take(held, among, rank % copies)
        share.backward(torch.ones_like(share).cumsum(-1) * (rank + 1))
        expected = {
            "copy_shared_to": (counts - 1, counts * sum(other + 1 for other in partners)),
            "gather_shared": (whole, take(wide * (rank + 1), shard, rank) / copies),
            "own_share": (share, held.grad),
        }
        for name, (result, gradient) in expected.items():
            assert torch.equal(found[name][0], result), name
            assert torch.equal(found[name][1], gradient), name


Results = list[tuple[torch.Tensor, ...]]


def statistics_of(degree: int) -> Results:
    """Results and gradients of statistics over the last dim: a rank's slices, or of the whole."""
    rank = merak.init(tp=degree, device="cpu").tp_rank if degree > 1 else 0
    torch.manual_seed(0)
    width = 8
    shard = ParameterShard(0, (width,), degree)
    # Each rank's mean is another: what they have of the variance is not its mean over them.
    values = torch.randn(2, 3, width, dtype=torch.float64) + torch.arange(float(width))
    upstream, weight, bias = torch.randn_like(values), *torch.randn(2, width).double()
    inputs = [
        take(tensor, replace(shard, dim=tensor.ndim - 1), rank).clone().requires_grad_()
        for tensor in (values, weight, bias)
    ]
    x, own_weight, own_bias = inputs
    local = take(upstream, replace(shard, dim=2), rank)
    found: Results = []
    if degree > 1:
        normed = sharded_layer_norm(x, own_weight, own_bias, 1e-5, 1, "tp")
        scaled = sharded_rms_norm(x, own_weight, None, 1, "tp")
        spread = sharded_var(x, (2,), 1.0, True, "tp"), sharded_std(x, (2,), 0.0, True, "tp")
    else:
        normed = functional.layer_norm(x, (width,), own_weight, own_bias)
        scaled = functional.rms_norm(x, (width,), own_weight)
        spread = x.var(2, keepdim=True), x.std(2, correction=0, keepdim=True)
    found.append((normed.detach(), *torch.autograd.grad(normed, inputs, local)))
    found.append((scaled.detach(), *torch.autograd.grad(scaled, inputs[:2], local)))
    for one in spread:
        found.append((one.detach(), *torch.autograd.grad(one, x, upstream[..., :1])))
    return found


@pytest.mark.parametrize("degree", [2, slow(4)])
def test_statistics_over_a_split_dim(pool: RankPool, degree: int) -> None:
    expected = statistics_of(1)
    ranks: list[Results] = pool.run(statistics_of, degree, degree)
    for number, tensors in enumerate(expected):
        for place, whole in enumerate(tensors):
            own = [found[number][place] for found in ranks]
            joined = own[-1] if whole.shape[-1] == 1 else torch.cat(own, -1)
            torch.testing.assert_close(joined, whole)
