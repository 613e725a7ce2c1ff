"""Functions that a script has put in the place of torch's own, and that call torch's own.

Torch's functions hand themselves to each mode that follows calls, by the name that they have in
their module. Where `nn.functional.cross_entropy = f` has taken that name and f calls torch's own,
each mode would call f once more: with three modes a loss that f doubles is 16 times as large.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, FunctionType
from typing import Any
from unittest.mock import patch

import torch

from merak.core.source_lines import is_library

_OWNERS = (torch.nn.functional, torch.functional, torch.Tensor)


@contextmanager
def replaced_once() -> Iterator[None]:
    """Context in which what has taken the place of a function of torch is called once a call."""
    with ExitStack() as patches:
        for owner in _OWNERS:
            for name, value in list(vars(owner).items()):
                if type(value) is FunctionType and not is_library(value.__code__.co_filename):
                    patches.enter_context(patch.object(owner, name, _once(value)))
        yield


def _once(function: FunctionType) -> Callable[..., Any]:
    """A function that is torch's own where that hands itself to a mode, and a given one else."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = _handed_on(sys._getframe(1), call)
        return function(*args, **kwargs) if own is None else own(*args, **kwargs)

    return call


def _handed_on(frame: FrameType | None, name_has: Callable[..., Any]) -> FunctionType | None:
    """The function of torch that is handing itself to a mode, if code of torch and Merak calls."""
    while frame is not None and is_library(frame.f_code.co_filename):
        if frame.f_code is torch.overrides.handle_torch_function.__code__:
            caller = frame.f_back
            assert caller is not None
            if frame.f_locals["public_api"] is name_has and not caller.f_code.co_freevars:
                return FunctionType(caller.f_code, caller.f_globals)
            return None
        frame = frame.f_back
    return None
