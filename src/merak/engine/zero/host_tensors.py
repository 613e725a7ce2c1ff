"""Optimizer tensors in host memory: copies of parameters, and the gradients that step them.

Reduced gradients are copied to pinned memory beside the rest of the backward. The processor steps
some tensors at a time, as `host_steps` has it, and sends these back while it steps the next. Copies
run on streams of their own on a GPU; on a CPU they are made at once. With a folder, all of it is in
a file, `state_files`.

Source: arXiv 2101.06840 (ZeRO-Offload), section 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
        pairs = [(target, self._staged(source.detach(), target.dtype)) for target, source in found]
        self._open.append(self._to_device.copy(pairs, is_ahead=is_early))
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
