"""A callback that averages a teacher inside the model after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from merak.engine.parameters.teacher import average_teacher


class TeacherAverage(TrainerCallback):
    """Averages a teacher's parameters with its student's after every step, in every layout.

    Every parameter of the teacher becomes `decay * teacher + (1 - decay) * student`, as of
    `merak.average_teacher`. transformers' own Trainer can have it, too.

    Args:
        teacher: name of the submodule that follows, whose parameters are frozen.
        student: name of the submodule that is trained; it may have further parameters.
        decay: the teacher's part of the average, from 0 to 1; or a function that gives it of the
            number of steps that have been made.
    """

    def __init__(
        self, teacher: str, student: str, decay: float | Callable[[int], float] = 0.996
    ) -> None:
        self.teacher, self.student, self.decay = teacher, student, decay

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Average the teacher."""
        assert model is not None
        decay = self.decay(state.global_step) if callable(self.decay) else self.decay
        average_teacher(model, self.teacher, self.student, decay)
