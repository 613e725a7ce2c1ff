"""Computation in float64 of a model that requests float32, for a check without rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Doubled(TorchFunctionMode):
    """Mode that turns every request for float32 into one for float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {name: _doubled(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_doubled, args), **given)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            return result.double()  # made of no tensor, or of integers
        return result


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Context in which models that request float32 get float64, for a check in float64.

    Many compute norms, softmax or routing in float32, whatever the type of their weights.

    Args:
        dtype: floating point type of the weights.
    """
    if dtype != torch.float64:
        yield
        return
    with _Doubled():
        yield
