"""Interrupts (Ctrl-C) of a job of many ranks: all ranks end, one prints a line, a second one kills.

A terminal sends the interrupt to all ranks, and torchrun sends it on to them again. A rank that
waits for its peers inside a communication library does not see it until they are gone, and then
fails with a lost connection; so failures after an interrupt are taken for a part of it.
"""

from __future__ import annotations

import os
import signal
import time

from merak.core.health.signals import receive

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
    if _interrupts.is_listening or not is_default:
        return
    _interrupts.is_listening = receive(signal.SIGINT, _record)
    if _interrupts.is_listening:
        os.register_at_fork(after_in_child=_forget)


def was_interrupted() -> bool:
    """Whether this process has received an interrupt."""
    return _interrupts.first_s is not None


def _record() -> None:
    """Record an interrupt; at the second one, end the process."""
    now = time.monotonic()
    if _interrupts.first_s is None:
        _interrupts.first_s = now
    elif now - _interrupts.first_s > _SAME_S:
        os._exit(INTERRUPTED)


def _forget() -> None:
    """Forget interrupts in a forked process, such as a data loader's."""
    _interrupts.is_listening = False
    _interrupts.first_s = None
