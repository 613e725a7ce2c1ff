"""The step of an optimizer in host memory, delayed by one: beside all of the next training step.

A step of the optimizer takes the gradients and its options as they are, and lets a thread step
while the device runs the next forward and backward, with the parameters of the update before. The
optimizer's next step waits for the thread, sends what it has stepped to the device, and takes the
next gradients. So step n computes its gradients at the parameters that updates up to n - 2 make.

Whatever reads all updates (`Engine.complete_updates`: a checkpoint, an evaluation) ends the delay:
the step behind it computes with all of them, as after a start from the checkpoint.

The thread has parameters, states and options of its own, which share their memory with the
optimizer's: a loop may clear gradients and change learning rates meanwhile.

Source: arXiv 2101.06840 (ZeRO-Offload), section 5.2.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from merak.engine.zero.host_steps import Average
from merak.engine.zero.host_tensors import HostTensors
from merak.plan.optimizer.home import in_parts

Land = Callable[[Sequence[nn.Parameter]], None]
"""Brings tensors that were stepped to the device."""


class DelayedStep:
    """The step of an optimizer, which ends with its next one.

    Args:
        optimizer: of tensors in host memory, which `steps_in_parts`.
        host: has the tensors, two gradients of each, and what was last sent of them.
        land: is called with tensors whose update is complete; a script may have written meanwhile.
        show: shows a script the states that the optimizer has by then.
        average: averages a part that was stepped, while it is in memory; None for no averages.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        host: HostTensors,
        land: Land,
        show: Callable[[], None],
        average: Average | None = None,
    ) -> None:
        self._average = average
        self._optimizer, self._host, self._land, self._show = optimizer, host, land, show
        self._step: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            self._aliases = {t: nn.Parameter(t.detach()) for t in host.tensors}
        self._files = host.file_states(self._aliases)
        self._worker = ThreadPoolExecutor(1)
        self._running: list[tuple[Future[None], Sequence[nn.Parameter]]] = []
        self._shadow: torch.optim.Optimizer | None = None
        # Of the shadow's states, those that the optimizer has.
        self._given: dict[nn.Parameter, dict[str, Any]] = {}
        self.pending: set[nn.Parameter] = set()
        """Tensors with an update that the device does not have yet."""
        self._landed: set[nn.Parameter] = set()
        self._failure: Exception | None = None
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._hand_over())
        optimizer.register_state_dict_pre_hook(lambda *_: self._join())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self._join())

    def come_last(self) -> None:
        """Take gradients behind the hooks that a script has registered, which may change them."""
        hooks = self._optimizer._optimizer_step_pre_hooks
        hooks[self._hook.id] = hooks.pop(self._hook.id)

    def land_complete(self, tensors: Sequence[nn.Parameter]) -> None:
        """Bring those of some tensors to the device whose update is complete by now."""
        ran = [part for own, part in self._running if own.done() and own.exception() is None]
        complete = {t for part in ran for t in part}
        landing = [t for t in tensors if t in self.pending and t in complete]
        if landing:
            self._land(landing)
            self.pending.difference_update(landing)
            self._landed.update(landing)

    def finish(self) -> set[nn.Parameter]:
        """Wait for the update that is open, and bring the tensors to the device that lack it.

        Returns:
            All tensors of that update.
        """
        self._join()
        if self.pending:
            self._land([t for _, part in self._running for t in part if t in self.pending])
        landed, self._landed = self._landed | self.pending, set()
        self.pending.clear()
        self._running.clear()
        return landed

    def _hand_over(self) -> None:
        """Finish the step before, and begin this one; the optimizer's own finds no gradient."""
        landed = self.finish()
        with torch._C.DisableTorchFunctionSubclass():
            groups = self._optimizer.param_groups
            stepped = [t for group in groups for t in group["params"] if t in self._aliases]
            gradients = {t: t.grad for t in stepped if t.grad is not None}
            for tensor in gradients:
                tensor.grad = None
            self._shadow = self._shadow_of(list(gradients))
        self._host.note_sent([tensor for tensor in gradients if tensor not in landed])
        self._host.swap_gradients(list(gradients))
        self.pending.update(gradients)
        own = list(gradients)
        parts = [[own[n] for n in part] for part in in_parts([t.nbytes for t in own])]
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            step = (self._shadow, {t: gradients[t] for t in part}, following, part is parts[0])
            self._running.append((self._worker.submit(self._step_part, *step), part))

    def _shadow_of(self, tensors: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer as it is now, of aliases of its tensors and states."""
        made: torch.optim.Optimizer = object.__new__(type(self._optimizer))
        vars(made).update(vars(self._optimizer))
        made.param_groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            | {"params": [self._aliases[t] for t in group["params"] if t in self._aliases]}
            for group in self._optimizer.param_groups
        ]
        states = self._optimizer.state
        self._given = {
            t: {name: _alias(value) for name, value in states[t].items()}
            for t in tensors
            if t in states
        }
        made.state = defaultdict(
            dict, {self._aliases[t]: dict(state) for t, state in self._given.items()}
        )
        return made

    def _step_part(
        self,
        shadow: torch.optim.Optimizer,
        gradients: dict[nn.Parameter, torch.Tensor],
        following: Sequence[nn.Parameter],
        is_first: bool,
    ) -> None:
        """Step some tensors in the thread, and begin to read those that follow."""
        part = [self._aliases[tensor] for tensor in gradients]
        if self._files is not None:
            if is_first:
                self._files.prefetch(shadow, part)
            self._files.enter(shadow, part)
            if following:
                self._files.prefetch(shadow, [self._aliases[tensor] for tensor in following])
        for alias, gradient in zip(part, gradients.values(), strict=True):
            alias.grad = gradient
        self._step(shadow)
        if self._average is not None:
            self._average(shadow, part)
        for tensor, alias in zip(gradients, part, strict=True):
            self._host.stage(tensor, alias)
            alias.grad = None
        if self._files is not None:
            self._files.leave(shadow, part)

    def _join(self) -> None:
        """Wait for the thread, and give the optimizer the states that it has made."""
        if self._failure is not None:
            raise self._failure
        try:
            for future, _ in self._running:
                future.result()
            if self._files is not None:
                self._files.finish()
        except Exception as failure:  # some tensors have been stepped, and must not be saved
            self._failure = failure
            raise
        if self._shadow is None:
            return
        states, self._shadow = self._shadow.state, None
        for tensor, alias in self._aliases.items():
            given = self._given.get(tensor, {})
            for name, value in states.get(alias, {}).items():
                if value is not given.get(name):
                    self._optimizer.state[tensor][name] = value
        self._given = {}
        self._show()


def _alias(value: Any) -> Any:
    """A state of an optimizer that shares its memory; a number as it is."""
    return value.detach() if isinstance(value, torch.Tensor) else value
