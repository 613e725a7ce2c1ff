"""A study of optuna in a job of several ranks: rank 0 has it, and all ranks train its trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from accelerate.utils.memory import release_memory  # type: ignore[import-untyped]
from transformers import Trainer
from transformers.hyperparameter_search import OptunaBackend

from merak.core.errors import ArgumentsError
from merak.graph.weights.rank_agreement import gather_objects
from merak.trainer.search.trial import SharedTrial

_WAITS = "the next trial of the search on"


@contextmanager
def shared_study(rank: int) -> Iterator[None]:
    """Context in which transformers' study runs on rank 0, and other ranks follow its trials.

    Args:
        rank: of the job, which has several.
    """
    original = OptunaBackend.run

    def run(
        backend: OptunaBackend, trainer: Trainer, n_trials: int, direction: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("n_jobs", 1) != 1:
            raise ArgumentsError(
                f"n_jobs={kwargs['n_jobs']} would train trials beside each other, but all ranks "
                "train one trial together; leave it out."
            )
        if rank > 0:
            return _follow(trainer, kwargs.get("catch", ()))
        return _lead(
            trainer, lambda leader: original(backend, leader, n_trials, direction, **kwargs)
        )

    with mock.patch.object(OptunaBackend, "run", run):
        yield


class _Leader:
    """Rank 0's trainer as transformers' search sees it: the trainer of one process.

    Args:
        trainer: of this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        vars(self)["_trainer"] = trainer
        vars(self)["args"] = SimpleNamespace(process_index=0, world_size=1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)

    def train(self, resume_from_checkpoint: Any, trial: Any) -> None:
        """Train a trial, on all ranks."""
        several = bool(trial.study._is_multi_objective())
        gather_objects(("trial", trial.number, several), _WAITS)
        shared = SharedTrial(trial, trial.number, several)
        _as_optunas(shared)
        self._trainer.train(resume_from_checkpoint=resume_from_checkpoint, trial=shared)


def _lead(trainer: Trainer, search: Callable[[Any], Any]) -> Any:
    best = search(_Leader(trainer))
    gather_objects(("end", best), _WAITS)
    return best


def _follow(trainer: Any, catch: Any) -> Any:
    """Train the trials that rank 0 announces; returns the best one, as rank 0 does."""
    import optuna  # type: ignore[import-not-found]

    passed_over = (optuna.TrialPruned, *(catch if isinstance(catch, tuple) else (catch,)))
    while True:
        kind, *what = gather_objects(None, _WAITS)[0]
        if kind == "end":
            return what[0]
        shared = SharedTrial(None, *what)
        _as_optunas(shared)
        trainer.objective = None
        try:
            trainer.train(resume_from_checkpoint=None, trial=shared)
            if trainer.objective is None:
                trainer.objective = trainer.compute_objective(trainer.evaluate())
            trainer.model_wrapped, trainer.model = release_memory(
                trainer.model_wrapped, trainer.model
            )
        except passed_over:
            continue


def _as_optunas(trial: SharedTrial) -> None:
    """Let transformers take a shared trial for one of optuna."""
    import optuna

    optuna.trial.BaseTrial.register(type(trial))
