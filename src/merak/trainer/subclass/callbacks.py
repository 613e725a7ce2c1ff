"""The callbacks of a trainer: loggers get the job's layout, and requests are those of all ranks.

A callback of a script's own that stops by the clock, or on the main process alone, asks the
training loop on some ranks only. The loop of the others would go on, and wait for them for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerControl

from merak.core.health.status import waiting_for_all
from merak.graph.weights.laid_out import engine_of
from merak.trainer.live.display import JobBoard
from merak.trainer.subclass.agreed_metrics import metrics_of_rank0
from merak.trainer.subclass.logged_layout import logged_layout
from merak.trainer.subclass.methods import overriding
from merak.trainer.subclass.model_uploads import refuse_model_uploads
from merak.trainer.subclass.parts_seen import (
    check_gradient_readers,
    gathering_methods,
    reporting_parts,
)

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate",
             "should_log")  # fmt: skip
_WITHIN = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end",
           "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_epoch_end",
           "on_evaluate", "on_save")  # fmt: skip
"""Events that every rank comes to, and behind which the loop looks at requests."""
_DURING = (*_WITHIN, "on_log")
"""Events of training that may read what the model holds."""
_EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))


class AgreedCallbacks(CallbackHandler):
    """The callbacks of a trainer, whose requests are those of all ranks.

    Ranks send each other nothing where all callbacks are transformers' own, which ask for the same
    on every rank.

    Args:
        trainer: whose callbacks they are.
        board: of the job, whose layout loggers write to a run's config when training begins.
        leave_weights: called by all ranks when training ends, before callbacks that may save.
    """

    def __init__(
        self, trainer: Trainer, board: JobBoard, leave_weights: Callable[[], None]
    ) -> None:
        vars(self).update(vars(trainer.callback_handler))
        self._board = board
        self._leave_weights = leave_weights
        self._is_own = not type(trainer).__module__.startswith("merak.")
        self._events: frozenset[str] = frozenset()
        self._group: dist.ProcessGroup | None = None

    def show(self, display: TrainerCallback) -> None:
        """Replace transformers' progress bar or printer by a display.

        These stay among the callbacks, where scripts look for their classes, and remove them.
        """
        for callback in self.callbacks:
            if type(callback) in (PrinterCallback, ProgressCallback):
                vars(callback).update({event: getattr(display, event) for event in _EVENTS})

    def call_event(
        self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Call an event of every callback, and agree on what they ask for."""
        begins = event == "on_train_begin"
        if begins:
            refuse_model_uploads(self.model, self.callbacks)
        if event == "on_train_end":
            self._leave_weights()
        engine = engine_of(self.model) if isinstance(self.model, nn.Module) else None
        if engine is not None and event in _DURING and _have_own(self.callbacks, event):
            engine.optimizer_params.wait()  # for what they read of lists that they have kept
        if event == "on_evaluate" and isinstance(kwargs.get("metrics"), dict):
            metrics_of_rank0(kwargs["metrics"])
        job = self._board.job if begins else None
        layout = nullcontext() if job is None else args.with_layout(logged_layout(job))
        with layout, reporting_parts(self.model), gathering_methods(self.model):
            changed: TrainerControl = super().call_event(event, args, state, control, **kwargs)  # type: ignore[no-untyped-call]
        if begins:
            check_gradient_readers(self.model, args, self.callbacks)
            self._find_events()
        return self.agree(event, changed) if event in _WITHIN else changed

    def agree(self, event: str, control: TrainerControl) -> TrainerControl:
        """Merge the ranks' requests of a control: one's is all's; all ranks call it together.

        Args:
            event: after which the requests are looked at; nothing is sent where no callback of a
                script's own has it.
            control: of this rank, which is changed.
        """
        if event not in self._events:
            return control
        requested = torch.tensor([int(getattr(control, name)) for name in _REQUESTS])
        with waiting_for_all("what callbacks ask for on"):
            dist.all_reduce(requested, dist.ReduceOp.MAX, group=self._group)
        for name, value in zip(_REQUESTS, requested.tolist(), strict=True):
            setattr(control, name, bool(value))
        return control

    def _find_events(self) -> None:
        """Find the events that callbacks of a script's own have on any rank; a collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        own = {event for event in _DURING if _have_own(self.callbacks, event)}
        own |= {"on_step_end"} if self._is_own else set()
        every: list[set[str]] = [set()] * dist.get_world_size()
        with waiting_for_all("the callbacks of"):
            dist.all_gather_object(every, own)
        self._events = frozenset().union(*every)
        if self._events and self._group is None:
            # Always gloo: these are small tensors in host memory.
            self._group = dist.new_group(backend="gloo")


def _have_own(callbacks: Iterable[TrainerCallback], event: str) -> bool:
    """Whether one of some callbacks has an event that is a script's own."""
    return any(overriding(callback, event) is not None for callback in callbacks)
