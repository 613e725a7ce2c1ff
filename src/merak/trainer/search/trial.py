"""A trial of optuna that all ranks share: rank 0 has it, and the others get what it suggests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from merak.core.errors import TrainingError
from merak.graph.weights.rank_agreement import gather_objects


class SharedTrial:
    """Trial of a study, on every rank; what it suggests is the same on all of them.

    Ranks call its `suggest_…` methods and `should_prune` in the same order, as one script does.

    Args:
        trial: of rank 0's study; None on other ranks.
        number: of the trial.
        is_multi_objective: whether its study has several objectives.
    """

    def __init__(self, trial: Any, number: int, is_multi_objective: bool) -> None:
        self._trial = trial
        self.number = number
        self.study = SimpleNamespace(_is_multi_objective=lambda: is_multi_objective)
        self.params: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """One of the methods that suggest a value, of any kind."""
        if not name.startswith("suggest_"):
            raise AttributeError(f"a trial that several ranks share has no {name}.")

        def suggest(parameter: str, *args: Any, **kwargs: Any) -> Any:
            value = self._on_rank0(name, parameter, *args, **kwargs)
            self.params[parameter] = value
            return value

        return suggest

    def report(self, value: float, step: int) -> None:
        """Report an objective to rank 0's study."""
        if self._trial is not None:
            self._trial.report(value, step)

    def should_prune(self) -> bool:
        """Whether the trial is to end, on all ranks."""
        return bool(self._on_rank0("should_prune"))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Set an attribute of rank 0's trial."""
        if self._trial is not None:
            self._trial.set_user_attr(key, value)

    def _on_rank0(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What a method of rank 0's trial returns; its error is raised on every rank."""
        found: tuple[Any, Exception | None] = (None, None)
        if self._trial is not None:
            try:
                found = (getattr(self._trial, method)(*args, **kwargs), None)
            except Exception as error:
                found = (None, error)
        called = (method, *args[:1])
        answers = gather_objects((called, *found), "what the trial suggests to")
        other = next((one[0] for one in answers if one[0] != called), called)
        if other != called:
            raise TrainingError(
                f"ranks ask the trial for different things: {called} here and {other} elsewhere; "
                "let every rank call the same methods of it in the same order."
            )
        _, value, failure = answers[0]
        if failure is not None:
            raise failure
        return value
