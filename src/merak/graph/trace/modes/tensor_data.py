"""`tensor.data`, which neither autograd nor a trace sees, recorded as `tensor.detach()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from merak.core.errors import TraceError
from merak.core.source_lines import model_line

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DetachedData(TorchFunctionMode):
    """Function mode that records reads of `.data` as `detach()`.

    Both share the tensor's storage, without its gradient. Autograd notices writes into the detached
    tensor alone; a trace follows storages, so it notices them in both. A parameter whose `.data` is
    assigned gets the same numbers by a write in place.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Detach a tensor whose `.data` is read, write into a parameter; pass any other call on.

        Raises:
            TraceError: the model assigns to the `.data` of anything else, or another shape or
                dtype, which no trace sees.
        """
        if func == _GET_DATA:
            return args[0].detach()
        if func == _SET_DATA:
            tensor, data = args
            if isinstance(tensor, nn.Parameter) and _has_place_for(tensor, data):
                with torch.no_grad():
                    tensor.copy_(data)
                return None
            raise TraceError(
                f"{model_line()} assigns to the `.data` of a tensor while the model "
                "runs, which a trace would lose; write with copy_() under torch.no_grad()."
            )
        return func(*args, **(kwargs or {}))


def _has_place_for(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    own, new = ((t.shape, t.dtype, t.device, t.layout) for t in (tensor, data))
    return own == new
