"""Optimizer tensors in host memory: copies of parameters, and the gradients that step them.

Reduced gradients are copied to pinned memory beside the rest of the backward. No tensor is stepped
before all are there: clipping, and leaving out a step that is not finite, rest on all of them. Then
the processor steps some tensors at a time, and sends these back while it steps the next. Copies run
on streams of their own on a GPU; on a CPU they are made at once. With a folder, all of it is in a
file, `state_files`.

Source: arXiv 2101.06840 (ZeRO-Offload), section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from merak.engine.segments.copy_streams import CopyQueue, Pair, StreamCopies, SyncCopies
from merak.engine.zero.state_files import FileStates, FileTensor, StateFile
from merak.plan.optimizer.home import MOST_SENT, in_parts


class HostTensors:
    """The tensors of a rank's optimizer in host memory.

    Args:
        device: where the parameters are.
        folder: of the file that has them; None for memory.
    """

    def __init__(self, device: torch.device, folder: str | None = None) -> None:
        self.file = None if folder is None else StateFile(folder)
        self._places: dict[torch.Tensor, FileTensor] = {}
        on_gpu = device.type == "cuda"
        self._is_pinned = on_gpu
        self._to_host: CopyQueue = StreamCopies(device) if on_gpu else SyncCopies()
        self._to_device: CopyQueue = StreamCopies(device) if on_gpu else SyncCopies()
        # By id of a tensor, where its gradients arrive.
        self._gradients: dict[int, torch.Tensor] = {}
        self._leaving: list[torch.Tensor] = []
        self._open: deque[Any] = deque()

    def copy_of(self, source: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        """A copy of a tensor in host memory, with memory for its gradient.

        Args:
            source: on the device.
            dtype: of the copy.
        """
        like = torch.empty(source.shape, dtype=dtype, device="meta")
        if self.file is None:
            made = nn.Parameter(source.detach().to("cpu", dtype, copy=True))
            gradient = torch.empty(source.shape, dtype=dtype, pin_memory=self._is_pinned)
        else:
            place, gradient = self.file.new(like), self.file.new(like).mapped
            made = nn.Parameter(place.mapped.copy_(source.detach()))
            self._places[made] = place
        self._gradients[id(made)] = gradient
        return made

    def file_states(self) -> FileStates | None:
        """The states of an optimizer in the file; None where they are in memory."""
        return None if self.file is None else FileStates(self.file, self._places)

    def held(self) -> list[torch.Tensor]:
        """Where gradients arrive in host memory."""
        return list(self._gradients.values())

    def take_gradients(self, found: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Begin to copy gradients to host memory.

        Args:
            found: a tensor in host memory, and its gradient in its type, on the device.
        """
        pairs: list[Pair] = []
        for tensor, gradient in found:
            tensor.grad_dtype = tensor.dtype
            if gradient.is_sparse:
                tensor.grad = gradient.cpu()
                continue
            tensor.grad = self._gradients[id(tensor)]
            pairs.append((tensor.grad, gradient))
        self._leaving += [gradient for _, gradient in pairs]  # until they have been copied
        if pairs:
            self._to_host.copy(pairs)

    def wait(self) -> None:
        """Let the host wait until the gradients are there."""
        self._to_host.finish()
        self._leaving.clear()

    @torch.no_grad()
    def send(self, found: Sequence[Pair]) -> None:
        """Begin to copy stepped tensors to the device, which computes on once they are there.

        Args:
            found: where to, and a tensor in host memory, of any type.
        """
        pairs = [(target, self._staged(source.detach(), target.dtype)) for target, source in found]
        self._open.append(self._to_device.copy(pairs))
        while len(self._open) > MOST_SENT:
            self._to_device.finish(self._open.popleft())

    def arrive(self) -> None:
        """Let the device's computation wait for all that was sent."""
        self._to_device.drain()
        self._open.clear()

    def _staged(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory that the device can read, in the type that is sent."""
        if not self._is_pinned:
            return source
        return torch.empty(source.shape, dtype=dtype, pin_memory=True).copy_(source)


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
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        send: Callable[[Sequence[nn.Parameter]], None],
        files: FileStates | None,
    ) -> None:
        self._step: Callable[..., Any] = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        self._send, self._files = send, files
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._last: list[nn.Parameter] = []
        optimizer.register_step_pre_hook(lambda own, *_: self._before(own))
        optimizer.register_step_post_hook(lambda own, *_: self._after(own))

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        """Step all parts but the last, which the step itself finds with gradients alone."""
        own = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._gradients = {t: t.grad for t in own if t.grad is not None}
        for tensor in self._gradients:
            tensor.grad = None
        parts = _parts(list(self._gradients)) or [[]]
        if self._files is not None:
            self._files.prefetch(optimizer, parts[0])
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if self._files is not None:
                self._files.enter(optimizer, part)
                if following is not None:
                    self._files.prefetch(optimizer, following)
            self._give(part)
            if following is not None:
                self._step(optimizer)
                self._end(optimizer, part)
        self._last = parts[-1]

    def _give(self, part: Sequence[nn.Parameter]) -> None:
        for tensor in part:
            tensor.grad = self._gradients[tensor]

    def _end(self, optimizer: torch.optim.Optimizer, part: Sequence[nn.Parameter]) -> None:
        for tensor in part:
            tensor.grad = None
        self._send(part)
        if self._files is not None:
            self._files.leave(optimizer, part)

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        """Give all tensors their gradients back, which the loop may read."""
        self._end(optimizer, self._last)
        self._give(list(self._gradients))
        self._gradients, self._last = {}, []
        if self._files is not None:
            self._files.finish()


def _parts(tensors: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Tensors that are stepped at a time, in order."""
    return [[tensors[n] for n in part] for part in in_parts([own.nbytes for own in tensors])]
