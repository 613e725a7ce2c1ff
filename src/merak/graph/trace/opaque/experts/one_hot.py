"""Masks of choices: which tensors of a trace have at most one expert in each row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SAME_ROWS = frozenset((
    torch.reshape, torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.contiguous,
    torch.Tensor.clone, torch.Tensor.to, torch.Tensor.int, torch.Tensor.long,
))  # fmt: skip
_PRODUCTS = frozenset((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__))


class OneHotMasks(TorchFunctionMode):
    """Function mode that remembers results of `one_hot`, and what is made of them row by row."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a mask; pass the call on."""
        result = func(*args, **(kwargs or {}))
        if self._is_mask(func, args, result):
            self._known[id(result)] = result
        return result

    def _is_mask(self, func: Any, args: Any, result: Any) -> bool:
        if func is functional.one_hot:
            return True
        tensors = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        if func in _SAME_ROWS and tensors:
            return id(args[0]) in self._known and result.shape[-1:] == args[0].shape[-1:]
        if func not in _PRODUCTS or len(tensors) < 2:
            return False
        for mask, factor in (tensors, tensors[::-1]):
            is_factor = factor.dtype is torch.bool or id(factor) in self._known
            if id(mask) in self._known and is_factor and result.shape == mask.shape:
                return True
        return False
