"""plan="auto" and per_device_train_batch_size="auto" train as the layout that they choose does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import merak
from merak.core.mesh import current_mesh
from tests.multirank.ranks import RankError
from tests.multirank.training import Outcome, Setup, Texts, Watch, arguments_of, gpt2, model_of
from tests.tiers import slow

SETUP = Setup("gpt2", arguments={"max_steps": 2})
CHOSEN = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "schedule",
    "schedule_options",
    "partition",
    "recompute",
    "offload_activations",
    "zero",
    "sequence_parallel",
    "sub_pipelining",
)


def train(
    degrees: dict[str, Any], given: dict[str, Any]
) -> tuple[Any, dict[str, Any], list[float]]:
    """Degrees of the mesh, the chosen arguments, and the losses."""
    merak.init(device="cpu", **degrees)
    usual = arguments_of(SETUP, tempfile.mkdtemp())
    del usual["per_device_train_batch_size"]
    args = merak.MerakArguments(**usual | {"trace_cache": ""} | given)
    trainer = merak.MerakTrainer(model=model_of(SETUP), args=args, train_dataset=Texts(64))
    outcome = Outcome()
    trainer.add_callback(Watch(outcome, dict))
    trainer.train()
    mesh = current_mesh()
    assert trainer.mesh == mesh and mesh.given is None
    layout = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp}
    return layout, {name: getattr(args, name) for name in CHOSEN}, outcome.losses


@pytest.mark.parametrize(
    ("degrees", "given", "samples"),
    [
        slow({"plan": "auto", "pp": 2}, {"schedule": "zero_bubble_h1"}, 16, id="pinned"),
        ({"dp": 2}, {"per_device_train_batch_size": "auto", "global_batch": 8}, 8),
    ],
)
def test_the_loss_is_that_of_the_same_layout(
    pool, degrees: dict[str, Any], given: dict[str, Any], samples: int
) -> None:
    given = {"cluster": "a100:2"} | given
    chosen = pool.run(train, 2, degrees, given)
    layout, arguments, losses = chosen[0]
    assert [own[:2] for own in chosen] == [(layout, arguments)] * 2  # on all ranks
    microbatches = layout["dp"] * arguments["gradient_accumulation_steps"]
    assert microbatches * arguments["per_device_train_batch_size"] == samples
    assert all(layout[axis] == degree for axis, degree in degrees.items() if axis != "plan")
    again = pool.run(train, 2, layout, arguments)
    assert again[0][2] == pytest.approx(losses, rel=1e-6)
    assert len(losses) == 2


def refuse(given: dict[str, Any]) -> None:
    merak.init(plan="auto", device="cpu")
    args = merak.MerakArguments(output_dir=tempfile.mkdtemp(), trace_cache="", **given)
    merak.MerakTrainer(model=gpt2(), args=args, train_dataset=Texts(16))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cluster": "h100:4"}, "has 4 devices, but the job has 2 ranks"),
        slow(
            {"cluster": "h100:2", "memory_budget": 400_000, "offload_optimizer": "off"},
            r"fits nowhere on the 2 devices of this job .*has \d+ devices, with dp=",
        ),
    ],
)
def test_what_does_not_fit_is_said_on_all_ranks(pool, given: dict[str, Any], said: str) -> None:
    with pytest.raises(RankError, match=said):
        pool.run(refuse, 2, given)


def measure(cache: str) -> list[str]:
    """What rank 0 plans with: twice in one cache."""
    import logging

    merak.init(plan="auto", device="cpu")
    given = {"output_dir": tempfile.mkdtemp(), "trace_cache": cache, "report_to": []}
    args = merak.MerakArguments(schedule="1f1b", recompute="off", max_steps=1, **given)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("merak.core.announce").addHandler(handler)
    merak.MerakTrainer(model=gpt2(), args=args, train_dataset=Texts(16))
    logging.getLogger("merak.core.announce").removeHandler(handler)
    return lines


@pytest.mark.slow
def test_the_devices_are_measured_once(pool, tmp_path: Path) -> None:
    first, _ = pool.run(measure, 2, str(tmp_path))
    assert any(line.startswith("devices: measured now") for line in first)
    assert any(line.startswith("plan: dp=") for line in first)
    second, _ = pool.run(measure, 2, str(tmp_path))
    assert any("by the profile saved in" in line for line in second)
    assert not any("measured now" in line for line in second)


def own_loop(degrees: dict[str, int], options: dict[str, Any]) -> tuple[Any, int, list[float]]:
    """Degrees, microbatches and losses of a loop of one's own: 16 samples a step."""
    merak.init(**(degrees or {"plan": "auto"}), device="cpu")
    torch.manual_seed(5)
    texts = Texts(16, padded=False)
    batch = {name: torch.stack([own[name] for own in texts]) for name in texts[0]}
    share = 8 if not degrees else 16 // degrees["dp"]
    model = merak.parallelize(
        gpt2(),
        {name: column[:share] for name, column in batch.items()},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **options,
    )
    mesh = current_mesh()
    rows = slice(mesh.dp_rank * 16 // mesh.dp, (mesh.dp_rank + 1) * 16 // mesh.dp)
    own = {name: column[rows] for name, column in batch.items()}
    losses = [float(model.step(own)) for _ in range(2)]
    return {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp}, model.num_microbatches, losses


@pytest.mark.slow
def test_a_loop_of_ones_own_follows_the_plan_that_is_searched(pool) -> None:
    options = {"recompute": "full", "schedule": "1f1b", "zero": 0}
    searched = {"cluster": "a100:2"} | options
    degrees, microbatches, losses = pool.run(own_loop, 2, {}, searched)[0]
    again = pool.run(own_loop, 2, degrees, options | {"num_microbatches": microbatches})[0]
    assert again[:2] == (degrees, microbatches)
    assert again[2] == pytest.approx(losses, rel=1e-5)


def compress(kind: str, bytes_per_s: float) -> tuple[str, bool, float]:
    """The compression of a job over a network, whether the engine has it, and a loss."""
    cluster = Path(tempfile.mkdtemp(), "cluster.yaml")
    cluster.write_text(
        "nodes:\n  - {device: a100, count: 2, devices_per_node: 1, adapters: 1,\n"
        f"     network: {{latency_s: 1.0e-5, gigabytes_per_s: {bytes_per_s / 1e9}}}}}\n",
        encoding="utf-8",
    )
    merak.init(plan="auto", dp=2, tp=1, pp=1, device="cpu")
    args = merak.MerakArguments(
        output_dir=tempfile.mkdtemp(), trace_cache="", cluster=str(cluster), max_steps=1,
        gradient_compression=kind, report_to=[], save_strategy="no",
    )  # fmt: skip
    trainer = merak.MerakTrainer(model=gpt2(), args=args, train_dataset=Texts(16))
    loss = float(trainer.train().training_loss)
    assert trainer.engine is not None
    return args.gradient_compression, trainer.engine.compression is not None, loss


@pytest.mark.slow
def test_a_compression_is_chosen_with_the_plan(pool) -> None:
    slow = pool.run(compress, 2, "auto", 1e4)
    assert slow[0] == slow[1] and slow[0][0] == "powersgd" and slow[0][1]
    fast = pool.run(compress, 2, "auto", 1e15)
    assert fast[0] == fast[1] and fast[0][0] == "off" and not fast[0][1]
