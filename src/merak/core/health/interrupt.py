"""Interrupts (Ctrl-C) of a job of many ranks: all ranks end, one prints a line, a second one kills.

A terminal sends the interrupt to all ranks, and torchrun sends it on to them again. A rank that
waits for its peers inside a communication library does not see it until they are gone, and then
fails with a lost connection; so failures after an interrupt are taken for a part of it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

INTERRUPTED = 130
"""Exit code of an interrupted process, as of shells."""

SENTENCE = "merak: interrupted."

_SAME_S = 1.0
"""Seconds within which a second interrupt is the first one, sent on by the launcher."""


class _Interrupts:
    """Interrupts of this process so far. The listening thread writes, others read."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.is_listening = False


_interrupts = _Interrupts()


def listen() -> None:
    """Start to record interrupts, also while this process waits; further calls change nothing.

    Where the script handles interrupts itself, or this is not the main thread, it is left so.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if _interrupts.is_listening or not (is_default and is_main and hasattr(os, "fork")):
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if before != -1:  # an event loop has it
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)
        return
    _interrupts.is_listening = True
    os.register_at_fork(after_in_child=_forget)
    threading.Thread(target=_record, args=(read,), daemon=True, name="merak interrupts").start()


def was_interrupted() -> bool:
    """Tell whether this process has received an interrupt."""
    return _interrupts.first_s is not None


def _record(read: int) -> None:
    """Read the numbers of signals as they come; at the second interrupt, end the process."""
    while sent := os.read(read, 1):
        if sent[0] != signal.SIGINT:
            continue
        now = time.monotonic()
        if _interrupts.first_s is None:
            _interrupts.first_s = now
        elif now - _interrupts.first_s > _SAME_S:
            os._exit(INTERRUPTED)


def _forget() -> None:
    """Stop listening in a forked process, such as a data loader's."""
    if _interrupts.is_listening:
        signal.set_wakeup_fd(-1)
        _interrupts.is_listening = False
        _interrupts.first_s = None
