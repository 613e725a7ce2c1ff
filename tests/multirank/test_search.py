"""Searches for hyperparameters on several ranks: the trials of one process, trained together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import merak
from merak.core.errors import MerakError, TrainingError
from merak.trainer.search.trial import SharedTrial
from tests.multirank.ranks import RankPool
from tests.multirank.training import Layout, Setup, Texts, alone, gpt2, make_merak, make_reference
from tests.tiers import slow


class Suggesting:
    """A trial as of optuna."""

    def __init__(self) -> None:
        self.reported: list[tuple[float, int]] = []

    def suggest_int(self, name: str, low: int, high: int) -> int:
        if low > high:
            raise ValueError("low is above high")
        return low + len(name)

    def report(self, value: float, step: int) -> None:
        self.reported.append((value, step))

    def should_prune(self) -> bool:
        return bool(self.reported)


def share(_: str = "") -> list[Any]:
    """What a rank sees of a trial that all ranks share."""
    rank = torch.distributed.get_rank()
    own = Suggesting() if rank == 0 else None
    trial = SharedTrial(own, 7, False)
    found: list[Any] = [trial.suggest_int("ab", 1, 9), dict(trial.params), trial.should_prune()]
    trial.report(0.5, 1)
    found += [trial.should_prune(), trial.number, trial.study._is_multi_objective()]
    for name, low in ((f"rank {rank}", 1), ("wrong", 10)):
        try:
            trial.suggest_int(name, low, 9)
        except (ValueError, MerakError) as error:
            found.append(type(error))
    return found


def test_ranks_share_a_trial(pool: RankPool) -> None:
    expected = [3, {"ab": 3}, False, True, 7, False, TrainingError, ValueError]
    assert pool.run(share, 2) == [expected, expected]


def searching(folder: str) -> Setup:
    arguments = {
        "output_dir": folder, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1,
        "per_device_eval_batch_size": 4, "lr_scheduler_type": "constant", "optim": "sgd",
    }  # fmt: skip
    return Setup("gpt2", num_microbatches=2, num_samples=32, arguments=arguments)


def model_init(trial: Any) -> nn.Module:
    torch.manual_seed(trial.suggest_int("seed", 0, 3) if trial is not None else 5)
    return gpt2()


def space(trial: Any) -> dict[str, float]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.5, log=True)}


def search(trainer: Any) -> tuple[Any, list[Any]]:
    """The best run, and the objective of every trial on the rank that has the study."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study: list[Any] = []
    create = optuna.create_study

    def keeping(*args: Any, **kwargs: Any) -> Any:
        study.append(create(*args, **kwargs))
        return study[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna, "create_study", keeping)
        best = trainer.hyperparameter_search(
            hp_space=space, n_trials=5, direction="minimize", backend="optuna",
            sampler=optuna.samplers.TPESampler(seed=3),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
        )  # fmt: skip
    trials = study[0].trials if study else []
    return best, [(one.state.name, one.value, one.params) for one in trials]


def search_on_ranks(layout: Layout, folder: str, cache: str) -> tuple[Any, list[Any]]:
    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    made = make_merak(searching(folder), dp, cache, model_init=model_init, eval_dataset=Texts(8))
    return search(made)


@pytest.mark.parametrize("layout", [slow((1, 1, 2)), slow((2, 1, 1))])
def test_a_search_is_that_of_one_process(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    pytest.importorskip("optuna")
    with alone():
        setup = searching(str(tmp_path / "theirs"))
        reference = make_reference(setup, model_init=model_init, eval_dataset=Texts(8))
        best, trials = search(reference)
    assert {state for state, _, _ in trials} == {"COMPLETE", "PRUNED"}
    ranks = pool.run(search_on_ranks, 2, layout, str(tmp_path / "ours"), str(tmp_path / "cache"))
    for found, own in ranks:
        assert found.hyperparameters == best.hyperparameters
        assert found.objective == pytest.approx(best.objective, rel=1e-4)
        for ours, theirs in zip(own, trials):
            assert ours[0] == theirs[0] and ours[2] == theirs[2]
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert len(ranks[0][1]) == len(trials)
