"""Copy queues: copies between a device and host memory that overlap with computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where to copy to, and from."""


class CopyQueue(Protocol):
    """A queue of copies, in order; a mark tells when some of them are complete."""

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any] = (), is_ahead: bool = False) -> Any:
        """Begin copies, behind all that has been computed so far.

        Args:
            pairs: targets and sources.
            after: marks of copies that have to be complete before.
            is_ahead: whether they need not wait for what the device has still to compute.

        Returns:
            The mark of these copies.
        """

    def wait(self, mark: Any) -> None:
        """Make later computation wait for the copies of a mark."""

    def drain(self) -> None:
        """Make later computation wait for all copies that have begun."""

    def finish(self, mark: Any = None) -> None:
        """Make the host wait for the copies of a mark; without one, for all."""


class SyncCopies:
    """A queue for devices without streams, whose copies are complete when they have begun."""

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any] = (), is_ahead: bool = False) -> Any:
        """Copy; there is nothing to wait for."""
        for target, source in pairs:
            target.copy_(source)

    def wait(self, mark: Any) -> None:
        """Nothing to wait for."""

    def drain(self) -> None:
        """Nothing to wait for."""

    def finish(self, mark: Any = None) -> None:
        """Nothing to wait for."""


class StreamCopies:
    """A queue on a stream of a GPU of its own; host memory is pinned.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[Pair], after: Sequence[Any] = (), is_ahead: bool = False) -> Any:
        """Begin copies on the stream, behind all that has been computed so far."""
        if not is_ahead:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for mark in after:
            self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Make the computing stream wait for the copies of a mark."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def drain(self) -> None:
        """Make the computing stream wait for all copies."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def finish(self, mark: Any = None) -> None:
        """Make the host wait for the copies of a mark; without one, for all."""
        (self._stream if mark is None else mark).synchronize()
