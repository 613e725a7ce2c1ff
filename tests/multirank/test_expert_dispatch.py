"""Experts over replicas on real ranks: training is that of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import merak
from merak.core.errors import ScheduleError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, join
from merak.ops import expert_dispatch
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.expert_models import GroupedProducts, PlainTokens, build

Parameters = dict[str, torch.Tensor]


class Dropping(GroupedProducts):
    """Such experts, each of which computes the first rows of its tokens alone, written plainly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        is_of = nn.functional.one_hot(chosen.flatten(), len(self.up))
        place = ((is_of.cumsum(0) - 1) * is_of).sum(1)
        weights = weights.flatten() * (place < math.ceil(CAPACITY * len(place) / len(self.up)))
        out = x
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            own = weights * is_of[:, expert]
            rows = (x.repeat_interleave(2, 0) @ up).relu() @ down
            out = out + (rows * own[:, None]).view(len(x), 2, -1).sum(1)
        return out


CAPACITY = 1.0
"""A factor with which rows are dropped, as experts are never chosen evenly."""

UNCHOSEN = {"unused": "deepseek_v3", "idle": "separate"}
"""Models of which no token chooses the second half of the experts."""

NO_DRAWS = {"dropout_rate": 0.0, "router_jitter_noise": 0.0}
"""Of Switch Transformers, as replicas draw for themselves."""


def trained(
    kind: str, degrees: dict[str, int], options: dict[str, Any]
) -> tuple[list[float], Parameters]:
    """Losses of three steps, whose gradients are clipped, and the parameters behind them."""
    mesh = merak.init(**degrees, device="cpu")
    num_samples = 16 // mesh.dp

    def own(step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(2, cases.VOCABULARY, (16, 8), generator=generator)
        part = ids.narrow(0, mesh.dp_rank * num_samples, num_samples)
        return {"input_ids": part, "labels": part.clone()}

    model = _model(kind)
    with torch.no_grad():
        for name, value in (*model.named_buffers(), *model.named_parameters()):
            if kind in UNCHOSEN and name.endswith(("e_score_correction_bias", "gate.bias")):
                value[: len(value) // 2] = 100.0  # no token comes to the experts of the last rank
    decay = 0.01 if kind == "idle" else 0.0  # moves what has a gradient of zeros
    parallel = merak.parallelize(
        model,
        example_batch=own(0),
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, weight_decay=decay
        ),
        num_microbatches=4 // mesh.dp,
        max_grad_norm=0.5,
        **options,
    )
    losses = [float(parallel.step(own(step))) for step in range(3)]
    with parallel.engine.whole_model():
        own_parameters = {n: p for n, p in parallel.model.named_parameters() if not p.is_meta}
        shards = parallel.engine.shards
        return losses, {
            n: _whole(p.detach(), shards.get(n), mesh) for n, p in own_parameters.items()
        }


def _model(kind: str) -> nn.Module:
    if kind == "dropping":
        torch.manual_seed(0)
        return PlainTokens(Dropping())
    return build(UNCHOSEN.get(kind, kind), **(NO_DRAWS if kind == "switch" else {}))


def _whole(own: torch.Tensor, shard: ParameterShard | None, mesh: Mesh) -> torch.Tensor:
    """A parameter whose shards the ranks of a group hold."""
    if shard is None:
        return own.clone()
    shards: list[Any] = [None] * shard.degree
    dist.all_gather_object(shards, own, group=mesh.group(mesh.shard_axis))
    return join(shards, shard)


@pytest.mark.parametrize(
    ("kind", "degrees", "options"),
    [
        ("mixtral", {"dp": 4, "ep": 2}, {"zero": 2}),
        slow("unused", {"dp": 2, "ep": 2}, {}),
        slow("gpt_oss", {"cp": 2, "ep": 2}, {}),
        slow("idle", {"dp": 4, "ep": 2}, {"zero": 2}),
        ("sorted", {"dp": 2, "ep": 2}, {}),
        slow("sorted", {"dp": 2, "tp": 2, "ep": 2}, {"zero": 2}),
        slow("separate", {"dp": 4, "ep": 4}, {"zero": 1}),
        slow("gated", {"dp": 2, "ep": 2}, {}),
        slow("grouped", {"dp": 2, "ep": 2}, {"zero": 1}),
        slow("all_called", {"dp": 4, "ep": 2}, {"zero": 3}),
        slow("deepseek_v3", {"dp": 2, "ep": 2}, {"recompute": "selective"}),
        slow("jetmoe", {"dp": 2, "ep": 2}, {"recompute": "full"}),
        slow("llama4", {"dp": 2, "ep": 2}, {}),
        slow("gshard", {"dp": 2, "ep": 2}, {}),
        slow("looped", {"dp": 2, "ep": 2}, {"zero": 1}),
        slow("mixtral", {"dp": 2, "cp": 2, "ep": 4}, {}),
        slow("mixtral", {"dp": 4, "ep": 2}, {"zero": 3}),
        slow("mixtral", {"dp": 2, "cp": 2, "pp": 2, "ep": 4}, {"zero": 2}),
        slow("mixtral", {"dp": 2, "pp": 2, "ep": 2}, {"schedule": "zero_bubble_h1"}),
        slow("mixtral", {"dp": 4, "pp": 2, "ep": 2}, {"schedule": "chimera"}),
    ],
)
def test_training_equals_one_process(
    pool: RankPool, kind: str, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    ((losses, expected),) = pool.run(trained, 1, kind, {}, {})
    num_ranks = math.prod(degrees.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    ranks = pool.run(trained, num_ranks, kind, degrees, options)
    for own_losses, final in ranks:
        assert own_losses == pytest.approx(losses, rel=1e-5)
        cases.assert_gradients_equal(final, {name: expected[name] for name in final})
    assert {name for _, final in ranks for name in final} == expected.keys()
    before = dict(_model(kind).named_parameters())
    for name, parameter in expected.items():
        if kind == "idle" and ".experts." in name:
            is_chosen = int(name.partition(".experts.")[2][0]) < 2
            assert torch.equal(parameter, before[name]) is not is_chosen
        elif kind == "unused" and "mlp.experts." in name:
            assert torch.equal(parameter[4:], before[name][4:])
            assert not torch.equal(parameter[:4], before[name][:4])


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("kind", "degrees", "options"),
    [
        ("mixtral", {"dp": 2, "ep": 2}, {}),
        slow("gpt_oss", {"cp": 2, "ep": 2}, {}),
        slow("separate", {"dp": 4, "ep": 4}, {"zero": 1}),
        slow("gshard", {"dp": 2, "ep": 2}, {}),
        slow("switch", {"dp": 2, "ep": 2}, {}),
        slow("all_called", {"dp": 4, "ep": 2}, {"zero": 3}),
        slow("mixtral", {"dp": 2, "pp": 2, "ep": 2}, {"schedule": "zero_bubble_h1"}),
        slow("deepseek_v3", {"dp": 2}, {"recompute": "selective"}),
    ],
)
def test_a_capacity_that_drops_nothing_changes_nothing(
    pool: RankPool, kind: str, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    ((losses, expected),) = pool.run(trained, 1, kind, {}, {})
    num_ranks = math.prod(degrees.get(axis, 1) for axis in ("dp", "pp", "cp"))
    enough = {"expert_capacity": 8.0} | options
    for own_losses, final in pool.run(trained, num_ranks, kind, degrees, enough):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        cases.assert_gradients_equal(final, {name: expected[name] for name in final})


def test_the_last_rows_of_an_expert_are_dropped(pool: RankPool) -> None:
    ((losses, expected),) = pool.run(trained, 1, "dropping", {}, {})
    ((exact, _),) = pool.run(trained, 1, "grouped", {}, {})
    assert exact != pytest.approx(losses, rel=1e-4)
    for degrees in ({}, {"dp": 2, "ep": 2}):
        options = {"expert_capacity": CAPACITY}
        ranks = pool.run(trained, degrees.get("dp", 1), "grouped", degrees, options)
        for own_losses, final in ranks:
            assert own_losses == pytest.approx(losses, rel=1e-5)
            cases.assert_gradients_equal(final, {name: expected[name] for name in final})


def refused_lengths() -> str:
    """The sentence for replicas whose microbatches have other lengths, where places follow them."""
    mesh = merak.init(dp=2, ep=2, device="cpu")

    def own(length: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(2 * length).reshape(2, length) % cases.VOCABULARY
        return {"input_ids": ids, "labels": ids}

    parallel = merak.parallelize(
        build("grouped"), own(8), optimizer=torch.optim.SGD, expert_capacity=1.0
    )
    parallel.step(own(6))
    with pytest.raises(ScheduleError) as refusal:
        parallel.step(own(8 - mesh.dp_rank))
    return str(refusal.value)


@pytest.mark.slow
def test_replicas_of_other_lengths_have_no_common_places(pool: RankPool) -> None:
    for sentence in pool.run(refused_lengths, 2):
        assert "each of ep=2 replicas, but their microbatches differ in shape" in sentence


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens; every sample has labels of its own."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(2, cases.VOCABULARY, (size, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def evaluated(
    degrees: dict[str, int], sizes: Sequence[int], folder: str
) -> list[tuple[float, torch.Tensor]]:
    """The loss and the logits of datasets of some sizes, in batches of two."""
    merak.init(**degrees, device="cpu")
    args = merak.MerakArguments(
        output_dir=folder, per_device_eval_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, log_level="error",
    )  # fmt: skip
    trainer = merak.MerakTrainer(model=build("mixtral"), args=args)
    found = []
    for size in sizes:
        loss = trainer.evaluate(Tokens(size))["eval_loss"]
        found.append((loss, torch.as_tensor(trainer.predict(Tokens(size)).predictions)))
    return found


@pytest.mark.slow
def test_replicas_without_samples_compute_the_others_rows(pool: RankPool, tmp_path: Path) -> None:
    sizes = (1, 5, 8)  # batches of two: one replica has none, one has fewer, both have as many
    (expected,) = pool.run(evaluated, 1, {}, sizes, str(tmp_path))
    for found in pool.run(evaluated, 2, {"dp": 2, "ep": 2}, sizes, str(tmp_path)):
        for (loss, logits), (own_loss, own_logits) in zip(expected, found, strict=True):
            assert own_loss == pytest.approx(loss, rel=1e-5)
            torch.testing.assert_close(own_logits, logits, rtol=1e-5, atol=1e-5)


def exchanged_bytes(num_samples: int) -> int:
    """Bytes that a rank puts into all-to-alls in one step."""
    mesh = merak.init(dp=2, ep=2, device="cpu")
    sent: list[int] = []
    exchange = expert_dispatch.dist.all_to_all_single

    def recorded(output: torch.Tensor, own: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sent.append(own.nbytes)
        return exchange(output, own, *rest, **named)

    generator = torch.Generator().manual_seed(mesh.dp_rank)
    ids = torch.randint(2, cases.VOCABULARY, (num_samples, 8), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    parallel = merak.parallelize(
        build("mixtral"), batch, optimizer=lambda own: torch.optim.SGD(own, lr=0.1)
    )
    with patch.object(expert_dispatch.dist, "all_to_all_single", recorded):
        parallel.step(batch)
    assert len(sent) == 2 * 4  # of each layer: there and back, forward and backward
    return sum(sent)


def test_exchanges_send_every_row_four_times(pool: RankPool) -> None:
    num_samples, tokens, hidden, experts_per_token, num_layers = 4, 8, 32, 2, 2
    rows = 2 * num_samples * tokens * experts_per_token  # of both ranks
    assert sum(pool.run(exchanged_bytes, 2, num_samples)) == 4 * num_layers * rows * hidden * 4
