"""Random streams apart from the global ones, for code that uses the global generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class RandomStream:
    """A stream of torch, numpy and Python random numbers that leaves the global ones untouched.

    Datasets, collators and samplers draw from the global generators; inside `active()` these
    continue this stream, and outside they are as if nothing had been drawn.

    Args:
        seed: where the stream starts, 0 … 2⁶³ − 1.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: tuple[Any, ...] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the global generators (torch's on the CPU) draw from this stream."""
        outside = _state()
        if self._state is None:
            _seed(self._seed)
        else:
            _restore(self._state)
        try:
            yield
        finally:
            self._state = _state()
            _restore(outside)


def _state() -> tuple[Any, ...]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _restore(state: tuple[Any, ...]) -> None:
    torch.default_generator.set_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
