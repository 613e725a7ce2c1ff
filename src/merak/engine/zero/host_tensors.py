"""Optimizer tensors in host memory: copies of parameters, and the gradients that step them.

Reduced gradients are copied to pinned memory beside the rest of the backward. The processor steps
some tensors at a time, as `host_steps` has it, and sends these back while it steps the next. Copies
run on streams of their own on a GPU; on a CPU they are made at once. With a folder, all of it is in
a file, `state_files`.

Source: arXiv 2101.06840 (ZeRO-Offload), section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from merak.engine.segments.copy_streams import CopyQueue, Pair, StreamCopies, SyncCopies
from merak.engine.zero.host_steps import Arrived
from merak.engine.zero.state_files import FileStates, FileTensor, StateFile
from merak.plan.optimizer.home import MOST_SENT


class HostTensors:
    """The tensors of a rank's optimizer in host memory.

    Args:
        device: where the parameters are.
        folder: of the file that has them; None for memory.
        delays: whether their steps are delayed by one, as `delayed_step` has it.
    """

    def __init__(
        self, device: torch.device, folder: str | None = None, delays: bool = False
    ) -> None:
        self.delays = delays
        self.file = None if folder is None else StateFile(folder)
        self._places: dict[nn.Parameter, FileTensor] = {}
        on_gpu = device.type == "cuda"
        self._is_pinned = on_gpu
        self._to_host: CopyQueue = StreamCopies(device) if on_gpu else SyncCopies()
        self._to_device: CopyQueue = StreamCopies(device) if on_gpu else SyncCopies()
        self.tensors: list[nn.Parameter] = []
        # By id of a tensor, where its gradients arrive.
        self._gradients: dict[int, torch.Tensor] = {}
        # Of delayed steps, also where those of the next step arrive; what the device has, and what
        # it gets.
        self._second: dict[int, torch.Tensor] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._leaving: list[torch.Tensor] = []
        self._open: deque[Any] = deque()

    def copy_of(self, source: torch.Tensor, dtype: torch.dtype) -> nn.Parameter:
        """A copy of a tensor in host memory, with memory for its gradient.

        Args:
            source: on the device.
            dtype: of the copy.
        """
        if self.file is None:
            made = nn.Parameter(source.detach().to("cpu", dtype, copy=True))
        else:
            place = self.file.new(torch.empty(source.shape, dtype=dtype, device="meta"))
            made = nn.Parameter(place.mapped.copy_(source.detach()))
            self._places[made] = place
        self.tensors.append(made)
        self._gradients[id(made)] = self._buffer(source.shape, dtype)
        if self.delays:
            self._second[id(made)] = self._buffer(source.shape, dtype)
            self._sent[id(made)] = self._buffer(source.shape, source.dtype)
            self._staged[id(made)] = self._buffer(source.shape, source.dtype)
        return made

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the device copies from or to."""
        if self.file is not None:
            return self.file.new(torch.empty(shape, dtype=dtype, device="meta")).mapped
        return torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)

    def file_states(
        self, aliases: Mapping[nn.Parameter, nn.Parameter] | None = None
    ) -> FileStates | None:
        """The states of an optimizer in the file; None where they are in memory.

        Args:
            aliases: that the optimizer has in the place of the tensors; None for these.
        """
        if self.file is None:
            return None
        own = self._places.items()
        return FileStates(self.file, {t if aliases is None else aliases[t]: p for t, p in own})

    def held(self) -> list[torch.Tensor]:
        """Where gradients arrive in host memory, and what else delayed steps have there."""
        of_delayed = (self._second, self._sent, self._staged)
        return [t for own in (self._gradients, *of_delayed) for t in own.values()]

    def swap_gradients(self, tensors: Sequence[nn.Parameter]) -> None:
        """Let the next gradients of some tensors arrive beside those that are there."""
        for key in map(id, tensors):
            pair = self._gradients[key], self._second[key]
            self._second[key], self._gradients[key] = pair

    def sent(self, tensor: nn.Parameter) -> torch.Tensor:
        """What the device has of a tensor whose steps are delayed, but for a script's writes."""
        return self._sent[id(tensor)]

    def note_sent(self, tensors: Sequence[nn.Parameter]) -> None:
        """Note that the device has some tensors as they are here."""
        for tensor in tensors:
            self.sent(tensor).copy_(tensor.detach())

    def stage(self, tensor: nn.Parameter, value: torch.Tensor) -> None:
        """Round what a delayed step has made of a tensor to what the device gets of it."""
        self._staged[id(tensor)].copy_(value.detach())

    @torch.no_grad()
    def send_staged(self, found: Sequence[Pair]) -> None:
        """Begin to copy tensors that are staged to the device, behind what it computes by now.

        Args:
            found: where to, and a tensor in host memory.
        """
        keys = [id(tensor) for _, tensor in found]
        for key in keys:
            self._sent[key], self._staged[key] = self._staged[key], self._sent[key]
        targets = [target for target, _ in found]
        self._to_device.copy([(t, self._sent[key]) for t, key in zip(targets, keys, strict=True)])

    def take_gradients(self, found: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Begin to copy gradients to host memory.

        Args:
            found: a tensor in host memory, and its gradient in its type, on the device.
        """
        self.copy_gradients([one for one in found if not one[1].is_sparse])
        for tensor, gradient in found:
            own = gradient.cpu() if gradient.is_sparse else self._gradients[id(tensor)]
            tensor.grad = own

    def copy_gradients(
        self, found: Sequence[tuple[nn.Parameter, torch.Tensor]]
    ) -> tuple[list[Arrived], Callable[[], None]]:
        """Begin to copy dense gradients to host memory, without giving them to their tensors.

        Args:
            found: as of `take_gradients`.

        Returns:
            Where they arrive, and what waits until they have.
        """
        arriving: list[Arrived] = []
        for tensor, _ in found:
            tensor.grad_dtype = tensor.dtype
            arriving.append((tensor, self._gradients[id(tensor)]))
        pairs = [(own, gradient) for (_, own), (_, gradient) in zip(arriving, found, strict=True)]
        self._leaving += [gradient for _, gradient in found]  # until they have been copied
        mark = self._to_host.copy(pairs) if pairs else None
        return arriving, partial(self._to_host.finish, mark)

    def wait(self) -> None:
        """Let the host wait until the gradients are there."""
        self._to_host.finish()
        self._leaving.clear()

    @torch.no_grad()
    def send(self, found: Sequence[Pair], is_early: bool = False) -> None:
        """Begin to copy stepped tensors to the device, which computes on once they are there.

        Args:
            found: where to, and a tensor in host memory, of any type.
            is_early: whether what the device has still to compute does not read them.
        """
        pairs = [(target, self._pinned(source.detach(), target.dtype)) for target, source in found]
        self._open.append(self._to_device.copy(pairs, is_ahead=is_early))
        while len(self._open) > MOST_SENT:
            self._to_device.finish(self._open.popleft())

    def arrive(self) -> None:
        """Let the device's computation wait for all that was sent."""
        self._to_device.drain()
        self._open.clear()

    def _pinned(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory that the device can read, in the type that is sent."""
        if not self._is_pinned:
            return source
        return torch.empty(source.shape, dtype=dtype, pin_memory=True).copy_(source)
