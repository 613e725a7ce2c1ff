"""Optimizers whose states are in host memory: the same training, to the last bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from merak.data import signature
from merak.engine import forecast_of
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.plan.optimizer import home
from tests.multirank.memory_jobs import MODELS, MemoryJob, batch_of, measure
from tests.multirank.ranks import RankPool
from tests.multirank.test_memory import assert_close
from tests.multirank.training import Layout
from tests.tiers import slow

Setting = tuple[dict[str, Any], str, str]
"""Options of a job, the type of its parameters, and its optimizer."""

AWAY = {"offload_optimizer": "cpu"}

EARLY = {"max_grad_norm": None}
"""Nothing looks at all gradients, so that tensors are stepped while the backward runs."""


class Normed(torch.optim.Optimizer):
    """An optimizer that needs whole parameters, of which ranks have shards."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-6), alpha=-group["lr"])


OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "whole": partial(Normed, lr=1e-2),
    "foreach": partial(torch.optim.RMSprop, lr=1e-3, foreach=True),
}


def make(setting: Setting, extra: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The job of a setting, and its batch; without an optimizer for one of another name."""
    options, name, optimizer = setting
    options = {"max_grad_norm": 0.5} | options
    is_asynchronous = options.get("schedule") == "pipedream"
    family = "llama" if is_asynchronous else "gpt2"
    torch.manual_seed(0)
    model = MODELS[family](0.1, layers=2).to(getattr(torch, name))
    batch = {n: torch.cat([c] * 2) for n, c in batch_of(family).items()}
    parallel = merak.parallelize(
        model,
        batch,
        optimizer=OPTIMIZERS.get(optimizer),
        num_microbatches=2,
        **options,
        **extra,
    )
    return parallel, batch


def trained(setting: Setting, extra: dict[str, Any], num_steps: int = 3) -> list[torch.Tensor]:
    """Losses of some steps, and the parameters behind them."""
    parallel, batch = make(setting, extra)
    return [parallel.step(batch) for _ in range(num_steps)] + parameters(parallel)


def parameters(parallel: Any) -> list[torch.Tensor]:
    """The parameters of this rank, as its stages compute with them."""
    with parallel.engine.whole_model():
        found = dict(parallel.model.named_parameters())
        return [found[name].detach().clone() for name in parallel.engine.parameters]


def same(layout: Layout, settings: list[Setting], folder: Path) -> list[list[bool]]:
    """Per setting, whether a job trains the same with its optimizer in host memory, and files."""
    home.PART_BYTES = 2**12  # so that there are several
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    found = []
    for setting in settings:
        extras: list[dict[str, Any]] = [{}, AWAY, {"offload_optimizer": str(folder)}]
        extras = extras[:2] if setting[2] == "whole" else extras
        expected, *others = (trained(setting, extra) for extra in extras)
        assert len(expected) > 3
        found.append([all(map(torch.equal, expected, other)) for other in others])
    return found


MASTERS = {"master_weights": True}


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (
            (2, 1, 1),
            [
                ({}, "float32", "fused"),
                ({"zero": 1} | MASTERS, "bfloat16", "fused"),
                ({"zero": 3} | MASTERS, "bfloat16", "fused"),
                ({"zero": 2}, "float32", "foreach"),
                ({"zero": 3}, "float32", "fused"),
                (EARLY, "float32", "fused"),
                ({"zero": 2} | MASTERS | EARLY, "bfloat16", "fused"),
            ],
        ),
        ((1, 2, 1), [({}, "float32", "fused"), (MASTERS | EARLY, "bfloat16", "foreach")]),
        (
            (1, 1, 2),
            [(EARLY, "bfloat16", "fused"), ({"schedule": "chimera"} | EARLY, "float32", "fused")],
        ),
        slow((1, 1, 2), [({"schedule": "pipedream"} | EARLY, "float32", "fused")]),
        slow((1, 2, 1), [({}, "float32", "whole")]),
        slow((2, 1, 1), [({"zero": stage}, "float32", "whole") for stage in (1, 3)]),
    ],
)
def test_optimizers_in_host_memory_step_the_same(
    pool: RankPool, layout: Layout, settings: list[Setting], tmp_path: Path
) -> None:
    for rank in pool.run(same, 2, layout, settings, tmp_path / "states"):
        assert rank == [[True] * (1 if own[2] == "whole" else 2) for own in settings]
    left = list((tmp_path / "states").glob("*"))
    assert not left  # nor would a killed job leave a file


def resumed(layout: Layout, settings: list[Setting], folder: Path) -> list[list[bool]]:
    """Per setting, whether a job goes on the same from a checkpoint, with and without host."""
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    file = {"offload_optimizer": str(folder / "states")}
    late = file | {"delay_optimizer_update": True}
    ways = (({}, {}), ({}, AWAY), (AWAY, AWAY), (AWAY, {}), (AWAY, file), (file, file), (late, {}))
    found = []
    for number, setting in enumerate(settings):
        seen, saved = [], {}
        for saving, loading in ways:
            own = f"{folder}/{number}-{len(saved)}"
            if (known := str(saving)) not in saved:
                parallel, batch = make(setting, saving)
                parallel.step(batch)
                parallel.save_checkpoint(saved.setdefault(known, own))
            again, batch = make(setting, loading)
            again.load_checkpoint(saved[known])
            seen.append([again.step(batch), again.step(batch), *parameters(again)])
        first, *others = seen
        found.append([all(map(torch.equal, first, other)) for other in others])
    return found


def test_checkpoints_go_on_in_host_memory_and_on_the_device(pool: RankPool, tmp_path: Path) -> None:
    settings: list[Setting] = [({"zero": 1}, "float32", "fused")]
    settings += [({"zero": stage} | MASTERS, "bfloat16", "fused") for stage in (1, 3)]
    for rank in pool.run(resumed, 2, (2, 1, 1), settings, tmp_path):
        assert rank == [[True] * 6] * len(settings)


def host_bytes(settings: list[Setting]) -> list[tuple[int, int]]:
    """Per setting, bytes in host memory: as forecast, and of the tensors that are there."""
    mesh = merak.init(dp=2, tp=1, pp=1, device="cpu")
    found = []
    for setting in settings:
        parallel, batch = make(setting, AWAY)
        parallel.step(batch)
        engine = parallel.engine
        options = EngineOptions(
            num_microbatches=2, optimizer=OPTIMIZERS[setting[2]], **setting[0], **AWAY
        )
        model = MODELS["gpt2"](0.1, layers=2).to(getattr(torch, setting[1]))
        sample = signature({n: c.chunk(2)[0] for n, c in batch.items()}).columns
        forecast = forecast_of(GraphSource(model), sample, mesh, options)
        (rank,) = forecast.ranks(forecast.layout.schedule)
        engine.complete_updates()
        tensors = list(engine.optimizer_params.named.values())
        states = [v for own in parallel.optimizer.state.values() for v in own.values()]
        held = [*tensors, *engine.optimizer_params.host.held(), *states]
        found.append((rank.host.total, sum(one.nbytes for one in held)))
    return found


def test_host_memory_is_what_was_foreseen(pool: RankPool) -> None:
    settings: list[Setting] = [({}, "float32", "fused"), (MASTERS, "bfloat16", "fused")]
    settings += [({"zero": stage} | MASTERS, "bfloat16", "fused") for stage in (2, 3)]
    settings += [({"zero": 2, "ema_decay": 0.9}, "bfloat16", "fused")]
    late = {"delay_optimizer_update": True}
    settings += [({"zero": stage} | MASTERS | late, "bfloat16", "fused") for stage in (0, 3)]
    ranks = pool.run(host_bytes, 2, settings)
    for setting, *found in zip(settings, *ranks, strict=True):
        assert max(rank[1] for rank in found) == found[0][0], setting


@pytest.mark.slow
def test_the_device_holds_what_was_foreseen(pool: RankPool, tmp_path: Path) -> None:
    jobs = [
        MemoryJob("gpt2", 0.1, options={"zero": stage, **away})
        for away in (AWAY, {})
        for stage in (1, 2)
    ]
    jobs.append(MemoryJob("gpt2", dtype=torch.bfloat16, options=MASTERS | AWAY))
    ranks = pool.run(measure, 2, (2, 1, 1), jobs, tmp_path)
    assert_close(ranks)
