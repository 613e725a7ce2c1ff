"""Backward hooks, which no trace sees: the module around them is opaque, or they are refused.

A module with backward hooks is opaque, and so is the innermost module around code that hooks the
gradient of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from merak.core.errors import TraceError
from merak.core.source_lines import model_line
from merak.graph.trace.explain import UntraceableError
from merak.graph.trace.opaque.selection import OpaqueSelection

_REGISTER = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
)
WHY = "its backward hooks, which no trace sees"


def select_hooked_modules(model: nn.Module, opaque: OpaqueSelection) -> None:
    """Make modules with backward hooks opaque.

    Args:
        model: the model that is to be traced.
        opaque: gains these modules.

    Raises:
        TraceError: the model itself has such hooks, or a module has deprecated ones.
    """
    for path, module in _hooked(model):
        kind = type(module).__name__
        if not path:
            raise TraceError(
                f"{kind} has backward hooks itself, and no module around it could be opaque "
                "for them; register them on its parts."
            )
        if module._is_full_backward_hook is False:
            raise TraceError(
                f"{path} ({kind}) has a hook of register_backward_hook, which torch has "
                "deprecated; use register_full_backward_hook."
            )
        if not any(path == outer or path.startswith(f"{outer}.") for outer in opaque.modules):
            opaque.modules[path] = WHY


def _hooked(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        own = vars(module)
        if own.get("_backward_hooks") or own.get("_backward_pre_hooks"):
            yield path, module


class TensorHooks(TorchFunctionMode):
    """Function mode that refuses hooks on the gradients of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a hook; pass any other call on.

        Raises:
            UntraceableError: a tensor of the model is hooked.
        """
        if func in _REGISTER and isinstance(args[0], FakeTensor):
            where = model_line()
            raise UntraceableError(
                f"{where} hooks the gradient of a tensor in the forward of the model itself, "
                "which no trace sees; do it in the forward of a module of its own, which is then "
                "opaque.",
                f"it hooks the gradient of a tensor ({where})",
            )
        return func(*args, **(kwargs or {}))
