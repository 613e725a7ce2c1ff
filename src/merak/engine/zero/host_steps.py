"""Steps of an optimizer in host memory, one part of its tensors after another.

Where nothing looks at all gradients of a step first (`merak.plan.optimizer.home` says when), parts
are stepped in a thread while the backward runs: each once its gradients have arrived in host
memory. The optimizer's own step then has the parts that are left.

Source: arXiv 2101.06840 (ZeRO-Offload), sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import nn

from merak.core.errors import TrainingError
from merak.engine.zero.state_files import FileStates
from merak.plan.optimizer.home import in_parts

Average = Callable[[torch.optim.Optimizer, Sequence[torch.Tensor]], None]
"""Averages what an optimizer has stepped of its tensors."""

Arrived = tuple[nn.Parameter, torch.Tensor]
"""A tensor in host memory, and its gradient there."""


class Send(Protocol):
    """Begins to copy stepped tensors to the device."""

    def __call__(self, stepped: Sequence[nn.Parameter], is_early: bool) -> None:
        """Begin it.

        Args:
            stepped: the tensors.
            is_early: whether the device still computes, with other parameters than theirs.
        """


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of some tensors, and then of the others, is the step of all.

    torch's own optimizers step each tensor by its own state; another class may count its steps, or
    look across tensors.

    Args:
        optimizer: of any class.
    """
    own = type(optimizer)
    return own.__module__.startswith("torch.optim.") and own is not torch.optim.LBFGS


class StepInParts:
    """The step of an optimizer, one part of its tensors after another.

    Args:
        optimizer: of tensors in host memory, which `steps_in_parts`.
        send: is called with each part that was stepped, while it is in memory.
        files: have the states; None where they are in memory.
        prepare: is called before the first part that is stepped beside the backward.
        average: averages a part that was stepped, while it is in memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        send: Send,
        files: FileStates | None,
        prepare: Callable[[], None] = lambda: None,
        average: Average | None = None,
    ) -> None:
        self._optimizer, self._prepare, self._average = optimizer, prepare, average
        self._step: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        self._send, self._files = send, files
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._last: list[nn.Parameter] = []
        self._worker = ThreadPoolExecutor(1)
        # Beside the backward: what has arrived and is not enough for a part, parts in the thread,
        # and gradients that have been stepped, with their versions, by the options of the groups.
        self._arrived: list[Arrived] = []
        self._running: list[tuple[Future[None], list[Arrived]]] = []
        self._stepped: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        self._options = ""
        self._num_hooks = -1
        optimizer.register_step_pre_hook(lambda *_: self._before())
        optimizer.register_step_post_hook(lambda *_: self._after())

    # ---- beside the backward ----

    def note_hooks(self) -> None:
        """Note that all hooks that are registered by now are this job's own."""
        self._num_hooks = self._count_hooks()

    def begin(self) -> bool:
        """Begin a step, of which parts may be stepped early; tells whether they may.

        A script's own hooks belong before the first part, or behind the last; and gradients that
        are there already are added to those of the step.
        """
        self.forget()
        self._options = _options(self._optimizer)
        has_gradients = any(own.grad is not None for own in self._tensors())
        return self._count_hooks() == self._num_hooks and not has_gradients

    def add(self, found: Sequence[Arrived], arrive: Callable[[], None]) -> None:
        """Step tensors in the thread, as soon as they are enough for a part.

        Args:
            found: tensors, some of which may be another optimizer's.
            arrive: waits until the gradients are in host memory.
        """
        own = set(self._tensors())
        self._arrived += [one for one in found if one[0] in own]
        *parts, rest = in_parts([tensor.nbytes for tensor, _ in self._arrived], is_open=True)
        for part in parts:
            taken = [self._arrived[n] for n in part]
            if not self._running and not self._stepped:
                self._prepare()
            self._running.append((self._worker.submit(self._step_early, taken, arrive), taken))
        self._arrived = [self._arrived[n] for n in rest]

    def join(self) -> None:
        """Wait for the part that is being stepped, and leave those behind it to the optimizer."""
        for future, part in self._running:
            if not future.cancel():
                future.result()
                self._stepped |= {tensor: (own, own._version) for tensor, own in part}
        self._running.clear()
        self._arrived.clear()

    def forget(self) -> None:
        """Forget the parts of a step, which was left out or has failed."""
        self.join()
        self._stepped.clear()

    def _step_early(self, part: Sequence[Arrived], arrive: Callable[[], None]) -> None:
        arrive()
        tensors = [tensor for tensor, _ in part]
        if self._files is not None:
            self._files.prefetch(self._optimizer, tensors)
            self._files.enter(self._optimizer, tensors)
        for tensor, gradient in part:
            tensor.grad = gradient
        self._step(self._optimizer)
        self._end(tensors, is_early=True)

    def _tensors(self) -> list[nn.Parameter]:
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    def _refuse_changes(self) -> None:
        """Refuse a step by other gradients, or other options, than some tensors had already.

        Raises:
            TrainingError: a script has changed them.
        """
        if self._options != _options(self._optimizer):
            what = "the optimizer's options"
        elif any(t.grad is not own or own._version != v for t, (own, v) in self._stepped.items()):
            what = "gradients"
        else:
            return
        raise TrainingError(
            f"{what} have been changed between the backward and the optimizer's step, but "
            "offload_optimizer steps while the backward runs where gradients are not clipped; "
            "change them behind the step, clip (max_grad_norm), or use offload_optimizer='off'."
        )

    def _count_hooks(self) -> int:
        own = self._optimizer
        return len(own._optimizer_step_pre_hooks) + len(own._optimizer_step_post_hooks)

    # ---- the optimizer's own step ----

    def _before(self) -> None:
        """Step all parts but the last, which the step itself finds with gradients alone."""
        optimizer, files = self._optimizer, self._files
        if self._stepped:
            self._refuse_changes()
        self._gradients = {t: t.grad for t in self._tensors() if t.grad is not None}
        for tensor in self._gradients:
            tensor.grad = None
        left = [tensor for tensor in self._gradients if tensor not in self._stepped]
        parts = [[left[n] for n in part] for part in in_parts([t.nbytes for t in left])] or [[]]
        if files is not None:
            files.prefetch(optimizer, parts[0])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if files is not None:
                files.enter(optimizer, part)
                if following is not None:
                    files.prefetch(optimizer, following)
            self._give(part)
            if following is not None:
                self._step(optimizer)
                self._end(part, is_early=False)
        self._last = parts[-1]

    def _give(self, part: Sequence[nn.Parameter]) -> None:
        for tensor in part:
            tensor.grad = self._gradients[tensor]

    def _end(self, part: Sequence[nn.Parameter], is_early: bool) -> None:
        if self._average is not None:
            self._average(self._optimizer, part)
        for tensor in part:
            tensor.grad = None
        self._send(part, is_early)
        if self._files is not None:
            self._files.leave(self._optimizer, part)

    def _after(self) -> None:
        """Give all tensors their gradients back, which the loop may read."""
        self._end(self._last, is_early=False)
        self._give(list(self._gradients))
        self._gradients, self._last = {}, []
        self._stepped.clear()
        if self._files is not None:
            self._files.finish()


def _options(optimizer: torch.optim.Optimizer) -> str:
    """The options of its groups, such as learning rates, as text to compare."""
    groups = optimizer.param_groups
    return str([{n: v for n, v in own.items() if n != "params"} for own in groups])
