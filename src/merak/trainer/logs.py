"""Logs of training beside losses: tokens per second of the whole job, and memory of a device."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback
from transformers.training_args import trainer_log_levels

from merak.core.errors import TraceError
from merak.engine.health.figures import (
    Figures,
    Interval,
    OwnFigures,
    job_figures,
    memory_bytes,
    own_figures,
)
from merak.engine.recording.description import describe_job
from merak.engine.recording.recorder import RunRecorder
from merak.engine.recording.step_traces import StepTraces, parse_steps
from merak.graph.trace.calls.loss_recorder import note_effect
from merak.graph.trace.calls.replay import is_replayed
from merak.trainer.live.display import JobBoard, LiveDisplay, display_for
from merak.trainer.subclass.callbacks import AgreedCallbacks

if TYPE_CHECKING:
    from merak.arguments import MerakArguments
    from merak.core.mesh import Mesh
    from merak.core.tensor_meta import Signature
    from merak.engine import Engine
    from merak.plan.activations.forecast import Forecast
    from merak.trainer.batch_exchange import BatchExchange

logger = logging.getLogger(__name__)

_PASSIVE = "passive"


def announced_level(args: MerakArguments) -> int:
    """The lowest level of announcements that the user's `log_level` asks for; INFO by default."""
    if args.log_level == _PASSIVE:
        return logging.INFO
    return int(trainer_log_levels[args.log_level])


class Throughput:
    """Throughput of the whole job: steps and tokens between two logs, and their seconds.

    Args:
        counts_tokens: whether the elements of the model's main input are tokens at all.
    """

    def __init__(self, counts_tokens: bool = False) -> None:
        self.counts_tokens = counts_tokens
        self._tokens = self._steps = self._microbatches = 0
        self._since_s = time.perf_counter()

    def add(self, tokens: int, microbatches: int) -> None:
        """Count the input tokens of a step and its microbatches, over all replicas."""
        self._tokens += tokens
        self._microbatches += microbatches
        self._steps += 1

    def take(self) -> Interval:
        """Training since the last time."""
        now = time.perf_counter()
        tokens = self._tokens if self.counts_tokens else 0
        found = Interval(now - self._since_s, self._steps, self._microbatches, tokens)
        self._since_s = now
        self._tokens = self._steps = self._microbatches = 0
        return found

    def leave_out(self, begin_s: float) -> None:
        """Leave out the time from a moment until now, such as an evaluation's."""
        now = time.perf_counter()
        has_logged = self._since_s > begin_s
        self._since_s = now if has_logged else self._since_s + now - begin_s


class TracedSteps(TrainerCallback):
    """The steps of the argument `profile_steps`, which this rank traces.

    Args:
        args: of the trainer.
        mesh: the grid of ranks.
    """

    def __init__(self, args: MerakArguments, mesh: Mesh) -> None:
        folder = Path(str(args.output_dir))
        self.traces = StepTraces(parse_steps(str(args.profile_steps)), folder, mesh)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to trace a step, if it is one of them."""
        self.traces.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the traces behind the last of them."""
        self.traces.end_step(state.global_step)


class Logging(Trainer):
    """The part of `MerakTrainer` that logs, shows and records."""

    # What all parts of the trainer read; these stand here alone.
    args: MerakArguments
    mesh: Mesh
    engine: Engine | None = None
    _batch_exchange: BatchExchange | None = None
    throughput: Throughput
    # What is shown on rank 0, and the record of the run.
    board: JobBoard
    _recorder: RunRecorder | None = None
    # MFU of a job with one microbatch a second; None where no peak is known.
    _utilisation: float | None = None
    callback_handler: AgreedCallbacks
    _display: TrainerCallback
    _is_traced: bool = False  # while a trace or a replay runs compute_loss
    is_as_in_first_step: bool = False  # whether stand-ins are in the place of what trains
    # Figures of the ranks for the log that comes; None where there is none.
    _measured: Figures | None = None

    @property
    def _called_losses(self) -> Sequence[Any]:
        """Losses, as modules, that `compute_loss` calls."""
        return ()

    def _show_progress(self) -> None:
        """Put Merak's display in the place of transformers' bar or printer; rank 0 alone has it."""
        self._display = TrainerCallback()  # which shows nothing
        if self.args.should_log:
            self._display = display_for(self.board, lines_only=bool(self.args.disable_tqdm))
        self.callback_handler.show(self._display)

    def _describe_job(
        self, forecast: Forecast, sample: Signature, process_bytes: int | None
    ) -> None:
        """Describe the laid-out job on rank 0, for the display and the record; a collective.

        Args:
            forecast: of the job.
            sample: columns of a microbatch.
            process_bytes: of this process before it had its weights.
        """
        cache = Path(self.args.trace_cache) if self.args.trace_cache else None
        found = describe_job(forecast, sample, cache, self.args.autocast, process_bytes)
        self.board.job, self._utilisation = found.job, found.utilisation
        if self.args.run_record:
            folder = str(self.args.output_dir)
            self._recorder = RunRecorder(self.mesh, folder, self.board.job)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the terminal as it was however that ends."""
        traced = None if self.args.profile_steps is None else TracedSteps(self.args, self.mesh)
        if traced is not None:
            self.add_callback(traced)
        try:
            output = super().train(*args, **kwargs)
        finally:
            if traced is not None:
                self.remove_callback(traced)
                traced.traces.finish()
            if isinstance(self._display, LiveDisplay):
                self._display.close()
        if self._recorder is not None and self.engine is not None:
            self._recorder.add_steps(self.engine.recorded_steps, last=True)
        return output

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As transformers does it; what an evaluation or a checkpoint takes is no training."""
        begin_s = time.perf_counter()
        if self.control.should_log and self._batch_exchange is not None:
            self._measured = self._measure(self._batch_exchange)
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.throughput.leave_out(begin_s)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log some values; loggers and callbacks get those of training with measured figures.

        The history in the trainer's state has what transformers has there: figures that differ
        from run to run would make the states of equal trainings differ.

        Raises:
            TraceError: a loss of a subclass's own logs, while it is traced.
        """
        if self._is_traced and not is_replayed():
            if note_effect():
                return
            raise TraceError(
                f"compute_loss calls log with {', '.join(logs)}, but it is traced once, and has no "
                "values then; log from a callback or an override of log."
            )
        figures, self._measured = self._measured, None
        if "loss" not in logs or figures is None:
            super().log(logs, *args, **kwargs)
            return
        logs |= figures.values
        self.board.figures = figures
        if self._recorder is not None:
            self._recorder.add_log(self.state.global_step, logs, figures)
        super().log(logs, *args, **kwargs)
        for name in figures.values:
            self.state.log_history[-1].pop(name, None)

    def _measure(self, batch_exchange: BatchExchange) -> Figures:
        """Throughput, bubble and memory of the job; all ranks call it together."""
        assert self.engine is not None
        interval = self.throughput.take()
        name, memory = memory_bytes(self.args.device)
        own = own_figures(memory, self.engine.progress.records.own() if self.mesh.pp > 1 else ())
        everyone: list[OwnFigures] = batch_exchange.gather(own)
        if self._recorder is not None:
            self._recorder.add_steps(self.engine.recorded_steps)
        return job_figures(interval, everyone, self.mesh, name, self._utilisation)
