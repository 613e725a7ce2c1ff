"""What tells about a tensor and makes none: most of what a trace calls, and nothing to record.

`torch.export` asks every parameter for a hundred such things. Each would go through all the modes
that follow what a model does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from merak.graph.trace.modes.packed_sequences import PackedSequences

_T: Any = torch.Tensor
_TELL = frozenset(
    [
        *(getattr(_T, name) for name in "dim numel size storage_offset stride".split()),
        *(getattr(_T, name) for name in "is_conj is_inference is_neg untyped_storage".split()),
        _T._is_view,
    ]
) | frozenset(
    getattr(_T, name).__get__
    for name in (
        "device dtype grad_dtype is_leaf is_mkldnn is_nested is_quantized is_sparse layout ndim "
        "requires_grad shape"
    ).split()
    if hasattr(_T, name)
)


class MetadataQueries(TorchFunctionMode):
    """The outermost of the modes of a trace: what only tells about a tensor does not go further.

    Args:
        packed: the one that follows packed sequences, whose sizes it must see.
    """

    def __init__(self, packed: PackedSequences) -> None:
        super().__init__()
        self._packed = packed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what only tells; anything else goes its way."""
        if func in _TELL and not self._packed.is_used:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
