"""Asynchronous schedules against a single process that delays its updates by the papers' rules."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from merak import MerakArguments, MerakTrainer, empty_weights, parallelize
from merak.core.errors import ScheduleError
from merak.core.start.init import init
from merak.graph.program.program import SubPipelinedRun
from tests.multirank.training import SEQUENCE, VOCABULARY, Texts, Uneven, gpt2, loss_of_logits
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import assert_gradients_equal

SAMPLES = 2


def loss_fn(outputs: Any, batch: Any) -> torch.Tensor:
    return loss_of_logits(outputs, batch["labels"])


def batch_of(count: int, step: int) -> dict[str, torch.Tensor]:
    """So many microbatches; each step's have a length of their own."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCABULARY, (count * SAMPLES, SEQUENCE - 3 * step), generator=draws)
    return {"input_ids": ids, "labels": ids}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-2, weight_decay=0.1)


def uneven() -> Uneven:
    torch.manual_seed(3)
    return Uneven()


def run_merak(
    schedule: str,
    degrees: tuple[int, int, int],
    counts: list[int],
    dtype: torch.dtype = torch.float32,
    sub_pipelining: str = "off",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Losses per step, what is stepped after each, and the stage of each."""
    dp, tp, pp = degrees
    mesh = init(dp=dp, tp=tp, pp=pp)
    model = uneven().to(dtype)
    parallel = parallelize(
        model,
        {name: c[: max(counts) * SAMPLES] for name, c in batch_of(max(counts), 0).items()},
        loss_fn=loss_fn,
        optimizer=make_optimizer,
        num_microbatches=max(counts),
        schedule=schedule,
        schedule_options=options,
        master_weights=True,
        sub_pipelining=sub_pipelining,
    )
    runs = [run for s in parallel.engine._state.base.stages.values() for run in s.runs]
    assert any(isinstance(run, SubPipelinedRun) for run in runs) == (sub_pipelining == "on")
    losses, after = [], []
    for step, count in enumerate(counts):
        parallel.num_microbatches = count
        batch = batch_of(count * dp, step)
        # As one process would deal microbatches out: in turn over the replicas.
        own = {
            name: torch.cat(column.split(SAMPLES)[mesh.dp_rank :: dp])
            for name, column in batch.items()
        }
        losses.append(float(parallel.step(own)))
        engine = parallel.engine
        after.append({n: p.detach().clone() for n, p in engine.optimizer_params.named.items()})
        for name, parameter in engine.parameters.items():
            assert parameter.dtype == dtype
            assert torch.equal(parameter, after[-1][name].to(dtype))
    assert all(p.grad is None for p in engine.parameters.values())
    stages = {name: mesh.pp_rank for name in engine.parameters}
    return losses, after, stages


def reference(
    versions: Any,
    per_update: int,
    stage_of: dict[str, int],
    counts: list[int],
    dp: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Train in one process with weights that are as old as the schedule says.

    Args:
        versions: `versions(stage, microbatch)`: the updates that a stage's weights have had.
        per_update: microbatches of an update; those of all replicas count as one.
        stage_of: the stage that holds each parameter.
        counts: microbatches of each step.
        dp: replicas.
        dtype: what forward and backward compute in, from float32 masters.
    """
    model = uneven().to(dtype).float()
    names = dict(model.named_parameters())
    optimizers = [
        make_optimizer(p for n, p in names.items() if stage_of[n] == stage)
        for stage in sorted(set(stage_of.values()))
    ]
    losses, after = [], []
    for step, count in enumerate(counts):
        history = [copy.deepcopy(dict(names))]
        microbatches = [
            {name: column.split(SAMPLES)[m * dp + r] for name, column in batch.items()}
            for batch in [batch_of(count * dp, step)]
            for m in range(count)
            for r in range(dp)
        ]
        step_losses = []
        for first in range(0, count, per_update):
            members = range(first, min(first + per_update, count))
            gradients = {name: torch.zeros_like(p) for name, p in names.items()}
            for m in members:
                known = {n: history[versions(stage_of[n], m)][n] for n in names}
                old = {n: p.detach().to(dtype).requires_grad_() for n, p in known.items()}
                for batch in microbatches[m * dp : (m + 1) * dp]:
                    outputs = torch.func.functional_call(model, old, (batch["input_ids"],))
                    loss = loss_fn(outputs, batch) / (len(members) * dp)
                    step_losses.append(loss.item() * len(members) / count)
                    for name, gradient in zip(
                        old, torch.autograd.grad(loss, list(old.values())), strict=True
                    ):
                        gradients[name] += gradient
            for name, parameter in names.items():
                parameter.grad = gradients[name]
            for optimizer in optimizers:
                optimizer.step()
            history.append(copy.deepcopy(dict(names)))
        losses.append(sum(step_losses))
        after.append({n: p.detach().clone() for n, p in names.items()})
    return losses, after


def delays(schedule: str, pp: int, per_update: int) -> Any:
    """The papers' rules: PipeDream's staleness falls with the stage, 2BW's is one everywhere."""
    if schedule == "pipedream":
        return lambda stage, m: max(0, m - (pp - 1 - stage))
    return lambda stage, m: max(0, m // per_update - 1)


OTHER_OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "pipedream": ({"recompute": True},),
    "pipedream_2bw": ({"microbatches_per_update": 3}, {"recompute": True}),
}
"""Options of asynchronous schedules besides their defaults."""


@pytest.mark.nccl_rules
@pytest.mark.parametrize(
    ("schedule", "degrees", "counts", "per_update", "options"),
    [
        slow("pipedream", (1, 1, 3), [6, 1, 4], 1, None),
        ("pipedream_2bw", (2, 1, 2), [6, 4], 2, None),
        *(
            (name, (1, 1, 2), [6], own.get("microbatches_per_update", per_update), own)
            for name, per_update in (("pipedream", 1), ("pipedream_2bw", 2))
            for own in OTHER_OPTIONS[name]
        ),
    ],
)
def test_every_update_is_that_of_one_process_with_delayed_weights(
    pool, schedule, degrees, counts, per_update, options
):
    dp, tp, pp = degrees
    arguments = (schedule, degrees, counts, torch.float32, "off", options)
    ranks = pool.run(run_merak, dp * tp * pp, *arguments)
    stage_of = {name: stage for _, _, stages in ranks for name, stage in stages.items()}
    versions = delays(schedule, pp, per_update)
    losses, after = reference(versions, per_update, stage_of, counts, dp)
    for found, _, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-5)
    for step, expected in enumerate(after):
        found = {name: p for _, steps, _ in ranks for name, p in steps[step].items()}
        assert_gradients_equal(found, expected)  # the parameters, to the same tolerance
    # The delay matters: without it the same updates give other parameters.
    _, undelayed = reference(lambda stage, m: m // per_update, per_update, stage_of, counts, dp)
    worst = max(float((undelayed[-1][n] - p).abs().max()) for n, p in after[-1].items())
    assert worst > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream_2bw"])
def test_halves_use_the_weights_of_their_microbatch(pool, schedule):
    job = (schedule, (1, 2, 2), [5, 4], torch.float32)
    whole, halves = (pool.run(run_merak, 4, *job, choice) for choice in ("off", "on"))
    for (losses, after, _), (found, others, _) in zip(whole, halves, strict=True):
        assert found == pytest.approx(losses, rel=1e-5)
        for expected, parameters in zip(after, others, strict=True):
            assert_gradients_equal(parameters, expected)  # the parameters, to its tolerance


def test_masters_are_stepped_inside_a_schedule(pool):
    (counts, half), per_update = ([6, 4], torch.bfloat16), 2
    ranks = pool.run(run_merak, 2, "pipedream_2bw", (1, 1, 2), counts, half)
    stage_of = {name: stage for _, _, stages in ranks for name, stage in stages.items()}
    versions = delays("pipedream_2bw", 2, per_update)
    losses, after = reference(versions, per_update, stage_of, counts, 1, half)
    for found, _, _ in ranks:
        assert found == pytest.approx(losses, rel=2**-7)  # a loss is a number of 8 bits here
    for step, expected in enumerate(after):
        found = {name: p for _, steps, _ in ranks for name, p in steps[step].items()}
        assert_gradients_equal(found, expected)  # the masters, to the same tolerance
        assert all(p.dtype == torch.float32 for p in found.values())
    assert any(not torch.equal(p, p.to(half).float()) for p in found.values())


def train(schedule: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    init(pp=2)
    with empty_weights():
        model = uneven()
    args = MerakArguments(
        output_dir=folder, schedule=schedule, gradient_accumulation_steps=4, max_steps=3,
        per_device_train_batch_size=SAMPLES, max_grad_norm=0, learning_rate=1e-2, report_to=[],
        logging_steps=1, save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
        remove_unused_columns=False, label_names=["labels"],
    )  # fmt: skip
    trainer = MerakTrainer(
        model=model,
        args=args,
        train_dataset=Texts(24, padded=False),
        compute_loss_func=loss_of_logits,
    )
    trainer.train()
    logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    has_norm = any("grad_norm" in log for log in trainer.state.log_history)
    assert has_norm == (schedule == "1f1b")  # updates at different times have no norm in common
    return logs, {n: p.detach() for n, p in trainer.engine.parameters.items()}


@pytest.mark.slow
def test_the_trainer_runs_asynchronous_schedules(pool, tmp_path):
    delayed = pool.run(train, 2, "pipedream_2bw", str(tmp_path))
    again = pool.run(train, 2, "pipedream_2bw", str(tmp_path))
    plain = pool.run(train, 2, "1f1b", str(tmp_path))
    assert delayed[0][0] == delayed[1][0] == again[0][0]
    assert len(delayed[0][0]) == 3
    # The first step's losses come from the same initial weights but for its last updates.
    assert delayed[0][0][0] == pytest.approx(plain[0][0][0], rel=0.05)
    moved = [not torch.equal(p, plain[0][1][name]) for name, p in delayed[0][1].items()]
    assert all(moved)


def refused(problem: str) -> str:
    """The sentence with which a job of two ranks is refused."""
    mesh = init(pp=2)
    options: dict[str, Any] = {"schedule": "pipedream", "num_microbatches": 4}
    model: nn.Module = uneven()
    if problem == "tied":
        model, batch, loss = gpt2(), batch_of(4, 0), None
    else:
        batch, loss = batch_of(4, 0), loss_fn
    if problem == "clip":
        options["max_grad_norm"] = 1.0
    if problem != "no optimizer":
        options["optimizer"] = make_optimizer
    try:
        parallel = parallelize(model, batch, loss_fn=loss, **options)
        parallel.step(batch)
    except ScheduleError as error:
        return str(error)
    raise AssertionError(f"rank {mesh.rank} was not refused")


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("tied", "stages 0, 1 share the parameter 'transformer.wte.weight'; use a synchronous"),
        ("clip", "there is no norm of all gradients to clip; leave max_grad_norm=1.0 out"),
        ("no optimizer", "updates the weights inside a step; give the engine an optimizer"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(pool, problem, sentence):
    for said in pool.run(refused, 2, problem):
        assert sentence in said
