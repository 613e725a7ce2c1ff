"""Shared optimizers and masters through `MerakTrainer`, with any optimizer, saved and resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import merak
from merak.core.errors import MerakError
from tests.multirank import training
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, make_merak
from tests.tiers import slow

STEPS, SAVED = 5, 3


class Signs(torch.optim.Optimizer):
    """Somebody's own optimizer: steps by the sign of a running mean of the gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.3)
                # A smooth sign, which rounding does not turn round.
                parameter.sub_(group["lr"] * torch.tanh(mean / 1e-2))


@dataclass(frozen=True)
class Job:
    """What a trainer is given; `own` is the optimizer's class and keywords."""

    arguments: Mapping[str, Any]
    shared: Mapping[str, Any]
    own: tuple[Any, Mapping[str, Any]] | None = None
    dtype: torch.dtype = torch.float32
    rounding: float = field(default=2.0**-8)


FUSED = Job({"bf16": True, "optim": "adamw_torch_fused", "learning_rate": 1e-3}, {"zero": 1})
OWN = Job({"fp16": True}, {"zero": 2}, (Signs, {"lr": 1e-3}), rounding=2.0**-9)
PARAMETERS = Job({"learning_rate": 1e-3, "bf16": True}, {"zero": 3, "dataloader_drop_last": True})


def run(job: Job, layout: Layout, folder: str, resume: str | None, cache: str) -> dict[str, Any]:
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    arguments = {
        **job.arguments, "max_steps": STEPS, "max_grad_norm": 0.5, "output_dir": folder,
        "save_strategy": "steps", "save_steps": SAVED,
    }  # fmt: skip
    if dp > 1:
        arguments |= job.shared
    own = {} if job.own is None else {"optimizer_cls_and_kwargs": job.own}
    build = training.model_of
    with mock.patch.object(training, "model_of", lambda setup: build(setup).to(job.dtype)):
        trainer = make_merak(Setup("gpt2", arguments=arguments), dp, cache, **own)
    trainer.train(resume_from_checkpoint=resume)
    state = trainer._inner_optimizer().state
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "norms": [log["grad_norm"] for log in trainer.state.log_history if "loss" in log],
        "class": type(trainer._inner_optimizer()).__name__,
        "state": sum(t.nbytes for s in state.values() for t in s.values() if t.numel() > 1),
        "stepped": {p.dtype for p in trainer.engine.optimizer_params.named.values()},
    }


def evaluate(zero: int, cache: str) -> float:
    merak.init(dp=2, pp=2, device="cpu")
    setup = Setup("gpt2", arguments={"zero": zero, "max_steps": 1, "dataloader_drop_last": True})
    trainer = make_merak(setup, 2, cache, eval_dataset=training.Texts(10))
    trainer.train()
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.slow
def test_replicas_that_hold_shares_evaluate_unequal_numbers(pool: RankPool, cache: str) -> None:
    whole, shares = (pool.run(evaluate, 4, zero, cache) for zero in (0, 3))
    assert shares == pytest.approx(whole, rel=1e-4)  # after a step of Adam


@pytest.mark.parametrize(
    "job",
    [slow(FUSED), slow(OWN), slow(PARAMETERS)],
    ids=["fused", "own", "parameters"],
)
def test_replicas_share_steps_and_resume_elsewhere(
    pool: RankPool, tmp_path: Path, job: Job
) -> None:
    cache = str(tmp_path / "traces")
    (alone,) = pool.run(run, 1, job, (1, 1, 1), str(tmp_path / "alone"), None, cache)
    ranks = pool.run(run, 4, job, (2, 1, 2), str(tmp_path / "shared"), None, cache)
    checkpoint = str(tmp_path / "shared" / f"checkpoint-{SAVED}")
    again = pool.run(run, 2, job, (1, 2, 1), str(tmp_path / "again"), checkpoint, cache)
    for found in ranks:
        assert found["losses"] == pytest.approx(alone["losses"], rel=job.rounding)
        assert found["norms"] == pytest.approx(alone["norms"], rel=16 * job.rounding)
        assert found["class"] == alone["class"]
        assert found["stepped"] == {torch.float32}
    assert len({loss for loss in alone["losses"]}) == STEPS
    assert again[0]["losses"][-2:] == pytest.approx(alone["losses"][-2:], rel=2 * job.rounding)
    # Both stages hold the tied table; each replica the state of half the rows.
    table = 4 * training.VOCABULARY * 32 * (1 if job.own and job.own[0] is Signs else 2)
    total = sum(found["state"] for found in ranks)
    assert total == pytest.approx(alone["state"] + table, rel=0.01)


def ragged(changes: Mapping[str, Any], degrees: Mapping[str, int], cache: str) -> Any:
    """An epoch of 3 microbatches for 2 replicas: what is said of it, or the steps it takes."""
    merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    arguments = {"max_steps": -1, "num_train_epochs": 1, **changes}
    trainer = make_merak(Setup("plain", 2, 12, arguments=arguments), 2, cache)
    try:
        trainer.train()
    except MerakError as error:
        return str(error), trainer.state.global_step
    return trainer.state.global_step


@pytest.mark.parametrize(
    "changes,degrees",
    [({"zero": 3}, {"dp": 2}), slow({"schedule": "pipedream"}, {"dp": 2, "pp": 2})],
    ids=["zero", "asynchronous"],
)
def test_a_ragged_last_step_is_refused_before_the_first(
    pool: RankPool, cache: str, changes: dict[str, Any], degrees: dict[str, int]
) -> None:
    num_ranks = 2 * degrees.get("pp", 1)
    for said, steps in pool.run(ragged, num_ranks, changes, degrees, cache):
        assert "the 3 batches of an epoch are no multiple of dp=2" in said
        assert steps == 0
    dropped = {**changes, "dataloader_drop_last": True}
    assert pool.run(ragged, num_ranks, dropped, degrees, cache) == [1] * num_ranks
