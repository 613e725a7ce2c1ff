"""One direction between a device and host memory: copies that run beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where to copy to, and from."""


class CopyQueue(Protocol):
    """Copies one after another; a mark tells when some of them are complete."""

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any] = ()) -> Any:
        """Begin copies, behind all that has been computed so far.

        Args:
            pairs: what to copy.
            after: marks of copies that have to be complete before.

        Returns:
            The mark of these copies.
        """

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on wait for copies."""

    def drain(self) -> None:
        """Let it wait for all copies that have begun."""


class SyncCopies:
    """Copies that are complete when they have begun, for devices without streams."""

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any] = ()) -> Any:
        """Copy; there is nothing to wait for."""
        for target, source in pairs:
            target.copy_(source)

    def wait(self, mark: Any) -> None:
        """Nothing to wait for."""

    def drain(self) -> None:
        """Likewise."""


class StreamCopies:
    """Copies on a stream of a GPU; host memory is pinned.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any] = ()) -> Any:
        """Begin copies on the stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for mark in after:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let the computing stream wait for copies."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def drain(self) -> None:
        """Let it wait for all of them."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
