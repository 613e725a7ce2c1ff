"""`tensor.data`, which autograd does not see and a trace does not either, is `tensor.detach()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from merak.core.errors import TraceError
from merak.core.source_lines import model_line

_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DetachedData(TorchFunctionMode):
    """While active, what models read as `.data` is recorded as the detached tensor.

    Both share the tensor's memory and take no part in its gradient. Autograd finds writes into the
    one and not into the other, but a trace follows memory, so here they are found in both.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Detach in place of giving the bare data; anything else goes its way.

        Raises:
            TraceError: the model gives a tensor other data, which no trace sees.
        """
        if func == _GET_DATA:
            return args[0].detach()
        if func == _SET_DATA:
            raise TraceError(
                f"{model_line()} assigns to the `.data` of a tensor while the model "
                "runs, which a trace would lose; write with copy_() under torch.no_grad()."
            )
        return func(*args, **(kwargs or {}))
