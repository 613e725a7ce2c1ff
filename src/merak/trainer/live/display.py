"""Display of a job on rank 0: a panel in a terminal, one line for each log elsewhere.

Both are callbacks that take the place of transformers' own bar and printer, and are removed from a
trainer by the names of those.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.live import Live
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import has_length

from merak.core.health.stderr import write_line
from merak.engine.health.figures import Figures
from merak.record.run import JobRecord
from merak.trainer.live.lines import duration, line
from merak.trainer.live.panel import JobPanel, Progress
from merak.trainer.live.streams import handlers_moved, is_terminal, standard_streams

_REFRESH_S = 0.1
"""Seconds between two drawings."""

_RECENT = 0.1
"""Weight of the last step in the smoothed time of a step."""


class JobBoard:
    """Progress and figures of a job for its display, which the trainer keeps up to date.

    Attributes:
        job: as it was laid out; None until then.
        figures: at the last training log.
    """

    def __init__(self) -> None:
        self.job: JobRecord | None = None
        self.figures = Figures()


class StepClock:
    """Clock of the steps of a run, for the time that is left."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._step_s: float | None = None

    def begin(self) -> None:
        """Begin the run's first step; later ones begin where the one before has ended."""
        if self._since_s is None:
            self._since_s = time.perf_counter()

    def leave_out(self) -> None:
        """Leave out the time since the last step, such as an evaluation's."""
        self._since_s = time.perf_counter()

    def end(self) -> None:
        """End a step; the first steps are slower than those that follow, and soon forgotten."""
        now = time.perf_counter()
        taken = now - (self._since_s or now)
        is_early = self._step_s is None or taken < self._step_s / 2
        known = taken if is_early or self._step_s is None else self._step_s
        self._step_s = (1 - _RECENT) * known + _RECENT * taken
        self._since_s = now

    def left_s(self, state: TrainerState) -> float | None:
        """Seconds of the steps that are left; None where nothing is known of them."""
        if self._step_s is None or state.max_steps <= 0:
            return None
        return float((state.max_steps - state.global_step) * self._step_s)


class LineDisplay(TrainerCallback):
    """A line for each log, for output that is no terminal.

    Args:
        board: of the job.
    """

    def __init__(self, board: JobBoard) -> None:
        self.board = board
        self._clock = StepClock()

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Begin a step."""
        self._clock.begin()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """End a step."""
        self._clock.end()

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Leave the evaluation out of the time of steps."""
        self._clock.leave_out()

    def on_save(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Leave the checkpoint out of the time of steps."""
        self._clock.leave_out()

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        """Write a line."""
        if logs is None or not state.is_world_process_zero:
            return
        write_line(f"[merak] {described(state, logs, self._clock.left_s(state))}")


def described(state: TrainerState, logs: dict[str, Any], left_s: float | None) -> str:
    """Describe a log in a line: where training is, what was logged, and the time that is left."""
    total = f"/{state.max_steps}" if state.max_steps > 0 else ""
    if "train_runtime" in logs and "loss" not in logs:
        mean = f": mean loss {logs['train_loss']:.4g}" if "train_loss" in logs else ""
        return f"trained to step {state.global_step} in {duration(logs['train_runtime'])}{mean}"
    is_training = "loss" in logs
    left = f", {duration(left_s)} left" if is_training and left_s else ""
    return f"step {state.global_step}{total}: {line(logs)}{left}"


class LiveDisplay(ProgressCallback):
    """A panel in the terminal, which is drawn over as training goes on.

    It is drawn by the training loop itself: a thread of its own could hold a lock that a process
    forked by a data loader would wait for.

    Args:
        board: of the job.
    """

    def __init__(self, board: JobBoard) -> None:
        super().__init__()
        self.board = board
        self._clock = StepClock()
        self._progress = Progress()
        self._logs: dict[str, Any] = {}
        self._live: Live | None = None
        self._stack = ExitStack()
        self._drawn_s = 0.0
        self._next_log = ""
        self._evaluated = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Begin to draw."""
        self.current_step = 0
        if not state.is_world_process_zero:
            return
        self._progress = Progress(state.global_step, max(state.max_steps, 0))
        self._logs, self._clock = {}, StepClock()
        steps = state.logging_steps
        follows = str(getattr(args.logging_strategy, "value", args.logging_strategy)) == "steps"
        self._next_log = f"the first figures come at step {steps:,}" if follows and steps else ""
        stdout, stderr = standard_streams()
        live = Live(
            console=Console(file=stderr),
            auto_refresh=False,
            redirect_stdout=stdout.isatty(),
            get_renderable=self._panel,
        )
        self._stack = ExitStack()
        self._stack.callback(self._end, live)
        live.start(refresh=True)
        self._live = live
        for old, new in zip((stdout, stderr), standard_streams(), strict=True):
            if new is not old:
                self._stack.enter_context(handlers_moved(old, new))

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Begin a step."""
        self._clock.begin()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Draw the step's end."""
        self._clock.end()
        self._show(
            replace(
                self._progress,
                step=state.global_step,
                left_s=self._clock.left_s(state),
                evaluation="",
            )
        )

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        """Draw a log of training; others are lines above the panel."""
        if logs is None or not state.is_world_process_zero:
            return
        if "loss" in logs:
            self._logs = dict(logs)
            self._show(self._progress, at_once=True)
        elif self._live is not None:
            self._live.console.print(described(state, logs, None), highlight=False)
        else:
            bar: Any = self.prediction_bar
            if bar is not None:  # which would share its line
                bar.close()
                self.prediction_bar = None
            write_line(f"[merak] {described(state, logs, None)}")

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: Any, eval_dataloader: Any = None, **rest: Any
    ) -> None:
        """Draw the progress of an evaluation inside training; outside it, transformers' bar."""
        if self._live is None:
            super().on_prediction_step(args, state, control, eval_dataloader, **rest)  # type: ignore[no-untyped-call]
            return
        self._evaluated += 1
        total = f" of {len(eval_dataloader):,}" if has_length(eval_dataloader) else ""
        text = f"evaluating, batch {self._evaluated:,}{total}"
        self._show(replace(self._progress, evaluation=text))

    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """End the progress of an evaluation."""
        self._evaluated = 0
        self._clock.leave_out()
        super().on_evaluate(args, state, control, **rest)  # type: ignore[no-untyped-call]

    def on_save(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Leave the checkpoint out of the time of steps."""
        self._clock.leave_out()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **rest: Any) -> None:
        """Draw the end, and leave it there."""
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was, below the panel; also where training ends by an error."""
        self._stack.close()

    def _end(self, live: Live) -> None:
        self._live = None
        live.stop()

    def _panel(self) -> JobPanel:
        board = self.board
        return JobPanel(board.job, self._progress, self._logs, board.figures, self._next_log)

    def _show(self, progress: Progress, at_once: bool = False) -> None:
        """Draw, if the last time is not a moment ago."""
        self._progress = progress
        now = time.perf_counter()
        if self._live is not None and (at_once or now - self._drawn_s > _REFRESH_S):
            self._drawn_s = now
            self._live.refresh()


def display_for(board: JobBoard, *, lines_only: bool) -> LiveDisplay | LineDisplay:
    """Make the display that fits standard error.

    Args:
        board: of the job.
        lines_only: whether lines are wanted in a terminal, too.
    """
    _, stderr = standard_streams()
    return LineDisplay(board) if lines_only or not is_terminal(stderr) else LiveDisplay(board)
