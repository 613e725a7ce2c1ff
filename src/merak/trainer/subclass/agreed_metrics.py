"""Metrics of an evaluation are those of rank 0: scripts compute them where a job logs and saves.

What follows from a metric (the best model, early stopping, a schedule that waits for a plateau, a
trial of a study) all ranks do together, so that all of them need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from merak.core.mesh import current_mesh
from merak.core.rank0 import decide_on_rank0, is_rank0


def metrics_of_rank0(metrics: Any) -> Any:
    """The metrics of rank 0, of which a dict of this rank then has all; a collective of all ranks.

    Args:
        metrics: of this rank.
    """
    found = decide_on_rank0(current_mesh(), "the metrics of an evaluation", lambda: metrics)
    if not (isinstance(metrics, dict) and isinstance(found, dict)):
        return found
    if not is_rank0():
        metrics.clear()
        metrics.update(found)
    return metrics


@contextmanager
def evaluations_agreed(trainer: Any) -> Iterator[None]:
    """Context in which evaluations of a trainer give the metrics of rank 0 on every rank.

    Args:
        trainer: whose loop evaluates; also one with an `evaluate` of the script's own.
    """
    with _replaced(trainer, "evaluate", metrics_of_rank0):
        yield


@contextmanager
def metrics_on_rank0_alone(trainer: Any) -> Iterator[None]:
    """Context in which `compute_metrics` may give nothing on other ranks than rank 0.

    Args:
        trainer: that evaluates.
    """
    if trainer.compute_metrics is None or is_rank0():
        yield
        return
    with _replaced(trainer, "compute_metrics", lambda found: {} if found is None else found):
        yield


@contextmanager
def _replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which what a method gives goes through a function."""
    own, is_own = getattr(owner, name), name in vars(owner)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(own(*args, **kwargs))

    vars(owner)[name] = call
    try:
        yield
    finally:
        del vars(owner)[name]
        if is_own:
            vars(owner)[name] = own
