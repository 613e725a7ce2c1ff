"""The connection of optimizers to the model, so that their steps reach it.

An optimizer that a loop makes by itself is met at its first step, by torch's hook for all
optimizers; it then steps what it means, this rank's tensors.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from merak.checkpoint.optimizer_state import AVERAGE
from merak.core.announce import announce
from merak.core.errors import ArgumentsError, RefusedBatchError, TrainingError
from merak.core.rank0 import warn_on_rank0
from merak.engine.comm.local_steps import LocalSteps
from merak.engine.comm.sparse_gradients import refuse_sparse_optimizer
from merak.engine.health.oom import OPTIMIZER_FIX, explain_oom
from merak.engine.optimizer.judge import judge, refuse_closure
from merak.engine.optimizer.own_tensors import (
    Found,
    Originals,
    is_known,
    tensors_by_id,
    use_optimizer_tensors,
)
from merak.engine.optimizer.reduced_steps import ReducedSteps
from merak.engine.optimizer.states import hide_states, show_states
from merak.engine.optimizer.whole_tensors import WholeTensors
from merak.engine.state import EngineState
from merak.engine.step.optimizer_step import runs_behind
from merak.engine.zero.delayed_step import DelayedStep
from merak.engine.zero.host_steps import StepInParts, steps_in_parts
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.weights.sharded import ShardWatch
from merak.plan.optimizer.average import forget_averages, keep_averages, update_averages
from merak.plan.optimizer.needs import Needs

logger = logging.getLogger(__name__)

_ANNOUNCED = {
    Needs.WHOLE: "%s gets whole parameters: each is stepped by one rank",
    Needs.REDUCTIONS: "%s gets norms of whole parameters: ranks reduce those of their shards",
}


class OptimizerConnections:
    """The optimizers that step an engine's tensors.

    Args:
        state: of the engine.
        watch: of its shards, which optimizers step as they are.
    """

    def __init__(self, state: EngineState, watch: ShardWatch) -> None:
        self._state = state
        self._watch = watch
        self._found: Found = {}
        self.note_originals({})
        self._connected: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_stepping = False
        self.is_averaged = False
        """Whether parameters are their averages by now."""
        self.can_mask = False
        """Whether every optimizer of this job's ranks can leave a step out on the device."""
        self._wholes: list[tuple[WholeTensors, ReducedSteps]] = []
        own = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (connections := own()) is not None:
                connections._meet(optimizer)

        self._hook = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._hook.remove)

    def note_originals(self, originals: Originals) -> None:
        """Record the parameters that the model had before it was laid out.

        Those of today are noted with them, once: who reads them waits for those of other replicas.
        """
        state = self._state
        self._found = tensors_by_id(state.model, state.optimizer_params, originals)

    def close(self) -> None:
        """Ignore optimizers that step from now on: another engine trains the model."""
        self._hook.remove()

    def connect(self, optimizer: torch.optim.Optimizer | None, is_met: bool = False) -> None:
        """Connect an optimizer to the model, which its steps then update; all ranks call it.

        Args:
            optimizer: of this rank; None for none.
            is_met: whether a loop has made it, perhaps of further tensors of its own.

        Raises:
            ScheduleError, ArgumentsError: it cannot step this rank's tensors, or would train
                something else than in one process.
        """
        state = self._state
        refuse_sparse_optimizer(optimizer, state.densified)
        if optimizer is not None:
            refuse_closure(optimizer)
            _refuse_whole_steps(optimizer, state.optimizer_params)
            use_optimizer_tensors(optimizer, self._found, takes_others=is_met)
        if runs_behind(state.mesh.device):
            ranks = state.gather(
                _masks(optimizer), "whether optimizers skip steps by themselves on"
            )
            known = [masks for masks in ranks if masks is not None]
            was_able = self.can_mask or not self._connected
            self.can_mask = was_able and bool(known) and all(known)
            self.can_mask &= state.optimizer_params.host is None  # the host reads gradients
        judgement, whole, reduced = judge(state, optimizer), None, None
        if judgement is not None and (sentence := judgement.refusal()):
            raise ArgumentsError(sentence)
        needs = Needs.SHARDS if judgement is None else judgement.needs
        _refuse_momenta(state, optimizer, needs is Needs.WHOLE)
        if judgement is not None:
            _refuse_delayed_whole(state, judgement.name, needs)
            if needs is not Needs.SHARDS:
                whole = WholeTensors(state, optimizer, by_reductions=needs is Needs.REDUCTIONS)
                reduced = ReducedSteps(state, whole.reduced)
                self._wholes.append((whole, reduced))
                state.optimizer_params.whole_tensors |= whole.tensors
                self._watch.add(whole.for_others())
                announce(_ANNOUNCED[needs], judgement.name)
            if remark := judgement.remark():
                warn_on_rank0(logger, "%s.", remark)
        if optimizer is not None:
            self._connected.add(optimizer)
            self._attach(optimizer, whole, reduced)

    def _attach(
        self,
        optimizer: torch.optim.Optimizer,
        whole: WholeTensors | None,
        reduced: ReducedSteps | None,
    ) -> None:
        """Register what is to happen before and after each step."""

        def stepped(parameter: torch.Tensor) -> torch.Tensor | None:
            if not is_known(parameter, self._found):
                return parameter
            tensor = self._found[id(parameter)][1]
            return tensor if whole is None or tensor is None else whole.stepped(tensor)

        # Some that wrap another do not call torch's __init__: what it makes is made here.
        torch.optim.Optimizer.__setstate__(optimizer, {})
        decay, average = self._state.ema_decay, None
        if decay is None:
            optimizer.register_load_state_dict_post_hook(forget_averages)
        else:
            average = partial(update_averages, decay=decay)
        optimizer.register_load_state_dict_post_hook(lambda own: show_states(own, stepped))
        optimizer.register_step_pre_hook(lambda *_: self._refuse_averaged())
        optimizer.register_step_pre_hook(lambda own, *_: hide_states(own))
        optimizer.register_step_pre_hook(lambda *_: self._note(True))
        optimizer.register_step_pre_hook(lambda *_: self._state.optimizer_params.take_written())
        if (compression := self._state.reducer.compression) is not None:
            items = self._state.optimizer_params.items.values()
            compression.momenta.follow(optimizer, {id(i.parameter): i.tensor for i in items})
        if reduced is not None:  # before anything else looks at what it has stepped
            optimizer.register_step_post_hook(lambda *_: reduced.end())
        params, parts = self._state.optimizer_params, None
        is_in_parts = params.host is not None and steps_in_parts(optimizer)
        if decay is not None and not is_in_parts:  # before whole tensors lose their gradients
            keep_averages(optimizer, decay)
        if whole is not None:
            optimizer.register_step_pre_hook(lambda *_: whole.collect())
            optimizer.register_step_post_hook(lambda *_: whole.distribute())
        if params.host is not None and params.host.delays:
            show = partial(show_states, optimizer, stepped)
            params.delayed.append(DelayedStep(optimizer, params.host, params.land, show, average))
        elif params.host is not None and is_in_parts:
            hide, files = partial(hide_states, optimizer), params.host.file_states()
            parts = StepInParts(optimizer, params.send, files, hide, average)
        # Between what ranks exchange before and behind it.
        records = self._state.progress.records
        optimizer.register_step_pre_hook(lambda *_: records.begin_update())
        optimizer.register_step_post_hook(lambda *_: records.end_update())
        leave = None if reduced is None else reduced.leave
        connect_optimizer(optimizer, params.sync_model_params, self._state.local_steps, leave)
        if reduced is not None:
            optimizer.register_step_pre_hook(lambda own, *_: reduced.begin(own))
        optimizer.register_step_post_hook(lambda own, *_: show_states(own, stepped))
        optimizer.register_step_post_hook(lambda *_: self._note(False))
        optimizer.register_step_post_hook(_unmask)
        if parts is not None and whole is None:
            parts.note_hooks()
            params.in_parts.append(parts)

    def mask(self, non_finite: torch.Tensor) -> None:
        """Mask the next optimizer step: it changes nothing where the device found it not finite.

        Args:
            non_finite: 1 for a step that changes nothing, 0 for any other; a scalar on the device.
        """
        for optimizer in self._connected:
            # As torch's own GradScaler hands it to them.
            optimizer.grad_scale, optimizer.found_inf = None, non_finite  # type: ignore[attr-defined]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which parameters are their averages; all ranks enter and leave it together.

        Averages and what the optimizers step change places, so it takes no memory, but where an
        average is more precise. Behind another error than of a batch, averages stay.
        """
        if self.is_averaged:
            yield
            return
        with self._watch.paused():
            self._state.optimizer_params.take_written()
            for whole, _ in self._wholes:
                whole.collect()
            kept = self._swap_averages({})
        self.is_averaged = True

        def end() -> None:
            with self._watch.paused():
                self._swap_averages(kept)
            self.is_averaged = False

        try:
            yield
        except RefusedBatchError:  # on all ranks, which may save their training now
            end()
            raise
        end()

    @torch.no_grad()
    def _swap_averages(self, kept: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Let what is stepped and its averages change places, and update the parameters.

        Args:
            kept: of tensors that are less precise than their averages, what they were, by id.

        Returns:
            Those tensors as they are before.
        """
        found: dict[int, torch.Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for optimizer in self._connected:
                for tensor, state in optimizer.state.items():
                    average = state.get(AVERAGE) if isinstance(state, dict) else None
                    if average is None:
                        continue
                    before = tensor.detach().clone()
                    tensor.copy_(kept.get(id(tensor), average))
                    if average.dtype == before.dtype:
                        average.copy_(before)
                    else:
                        found[id(tensor)] = before
            for whole, _ in self._wholes:
                whole.distribute()
        self._state.optimizer_params.sync_model_params()
        return found

    def _refuse_averaged(self) -> None:
        """Refuse a step while parameters are averages.

        Raises:
            TrainingError: they are.
        """
        if self.is_averaged:
            raise TrainingError(
                "an optimizer stepped inside merak.averaged_parameters, where parameters are their "
                "averages; train behind the context."
            )

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has tensors of this model."""
        given = (tensor for group in optimizer.param_groups for tensor in group["params"])
        return any(is_known(tensor, self._found) for tensor in given)

    def step_none(self) -> None:
        """Join the collectives of an optimizer step, on a rank without an optimizer of its own."""
        self._state.optimizer_params.take_written()
        for whole, reduced in self._wholes:
            whole.collect()
            reduced.begin(None)
            whole.distribute()
        self._state.optimizer_params.sync_model_params()

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Connect an optimizer that a loop has made of this model's parameters, before it steps."""
        if self._is_stepping or optimizer in self._connected:
            return
        if self.steps(optimizer):
            self.connect(optimizer, is_met=True)

    def _note(self, is_stepping: bool) -> None:
        """Note a step of a connected optimizer, inside which one of its own parts may step."""
        self._is_stepping = is_stepping
        (self._watch.pause if is_stepping else self._watch.resume)()


def _refuse_delayed_whole(state: EngineState, name: str, needs: Needs) -> None:
    """Refuse to delay steps inside which ranks exchange what they have of parameters.

    Raises:
        ArgumentsError: they would be.
    """
    host = state.optimizer_params.host
    if needs is not Needs.SHARDS and host is not None and host.delays:
        raise ArgumentsError(
            f"ranks exchange shards of parameters inside a step of {name}, which cannot run beside "
            "their next forward and backward; use delay_optimizer_update=False, or an optimizer "
            "that steps each element by itself, such as AdamW."
        )


def _refuse_whole_steps(optimizer: torch.optim.Optimizer, params: OptimizerParams) -> None:
    """Refuse states in files, or delayed steps, of a class that is none of torch's own.

    Raises:
        ArgumentsError: it is none.
    """
    if params.host is None or steps_in_parts(optimizer):
        return
    if params.host.delays:
        raise ArgumentsError(
            f"delay_optimizer_update=True steps copies of tensors, states and options in a thread, "
            f"as torch's own optimizers step them, and {type(optimizer).__name__} is none of them; "
            "use one, such as AdamW, or delay_optimizer_update=False."
        )
    if params.host.file is not None:
        raise ArgumentsError(
            f"offload_optimizer with a folder reads and writes the states of some tensors at a "
            f"time, as torch's own optimizers step them, and {type(optimizer).__name__} is none of "
            "them; use one, such as AdamW, or offload_optimizer='cpu'."
        )


def _refuse_momenta(
    state: EngineState, optimizer: torch.optim.Optimizer | None, is_whole: bool
) -> None:
    """Refuse compressed momenta that are not where replicas reduce.

    Raises:
        ArgumentsError: ranks have shards of them, or they are in host memory.
    """
    compression = state.reducer.compression
    if compression is None or not compression.momenta.reduces(optimizer):
        return
    named = type(optimizer).__name__
    if is_whole:
        raise ArgumentsError(
            f"{named} steps whole parameters, of which tensor parallel ranks have shards, and so "
            "no momenta that replicas could reduce; use tp=1, merak.OneBitAdam, or "
            "gradient_compression='off'."
        )
    if state.optimizer_params.host is not None:
        raise ArgumentsError(
            f"replicas reduce the momenta of {named}, which offload_optimizer has in host memory; "
            "use offload_optimizer=None, or gradient_compression='off'."
        )


def _masks(optimizer: torch.optim.Optimizer | None) -> bool | None:
    """Whether an optimizer's kernels can skip a step; None for none."""
    can_skip = getattr(optimizer, "_step_supports_amp_scaling", False)
    return None if optimizer is None else bool(can_skip)


def _unmask(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for name in ("grad_scale", "found_inf"):
        if name in vars(optimizer):
            delattr(optimizer, name)


def connect_optimizer(
    optimizer: torch.optim.Optimizer,
    sync_model_params: Callable[[], None],
    local_steps: LocalSteps | None = None,
    leave: Callable[[], None] | None = None,
) -> None:
    """Connect an optimizer's step to the model, and explain when it runs out of memory.

    Args:
        optimizer: of an engine's optimizer tensors.
        sync_model_params: copies them into the model's parameters.
        local_steps: the rounds of Local SGD that its steps make up; None for none.
        leave: leaves what a step has begun that an error ends; None for nothing.
    """
    step: Callable[..., Any] = type(optimizer).step

    @wraps(step)
    def explained_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            with explain_oom("the optimizer's step", OPTIMIZER_FIX):
                return step(self, *args, **kwargs)
        finally:
            if leave is not None:
                leave()

    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # which counts the steps in its wrapper
        # A method, as learning rate schedulers, which wrap it as well, expect it to be.
        optimizer.step = MethodType(explained_step, optimizer)  # type: ignore[method-assign]
    if local_steps is not None:
        optimizer.register_step_pre_hook(lambda *_: local_steps.start_step())
        optimizer.register_step_post_hook(lambda *_: local_steps.end_step())
    optimizer.register_step_post_hook(lambda *_: sync_model_params())
