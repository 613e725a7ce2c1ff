"""Signals that this process receives, seen at once by a thread while the main thread waits.

Python runs a signal's handler in the main thread, which may wait inside a communication library for
minutes. Its wakeup descriptor gets the signal's number at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_receivers: dict[int, Callable[[], None]] = {}


def receive(number: int, receiver: Callable[[], None]) -> bool:
    """Register a function that a thread calls each time that a signal arrives.

    Args:
        number: of the signal, which must have a handler of Python's.
        receiver: the function; one for each signal.

    Returns:
        Whether that is possible: not beside an event loop, or outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(os, "fork"):
        return False
    if not _receivers:
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:  # an event loop has it
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return False
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=_read, args=(read,), daemon=True, name="merak signals").start()
    _receivers[number] = receiver
    return True


def _read(read: int) -> None:
    while sent := os.read(read, 1):
        receiver = _receivers.get(sent[0])
        if receiver is not None:
            receiver()


def _forget() -> None:
    """Stop listening in a forked process, such as a data loader's."""
    if _receivers:
        signal.set_wakeup_fd(-1)
        _receivers.clear()
