"""Queries of tensors' metadata, most of a trace's calls: they skip all other modes.

`torch.export` makes a hundred such queries of every parameter. Each would pass all modes of a
trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from merak.graph.trace.modes.packed_sequences import PackedSequences

_T: Any = torch.Tensor
QUERIES = frozenset(
    [
        *(getattr(_T, name) for name in "dim numel size storage_offset stride".split()),
        *(getattr(_T, name) for name in "is_conj is_inference is_neg untyped_storage".split()),
        _T._is_view,
    ]
) | frozenset(
    getattr(_T, name).__get__
    for name in (
        "device dtype grad_dtype is_leaf is_mkldnn is_nested is_quantized is_sparse layout ndim "
        "requires_grad shape _version"
    ).split()
    if hasattr(_T, name)
)
"""Functions that ask for no values."""


class MetadataQueries(TorchFunctionMode):
    """Function mode that answers metadata queries before any other mode sees them.

    Args:
        packed: the mode of packed sequences, which must see queries of their sizes.
    """

    def __init__(self, packed: PackedSequences) -> None:
        super().__init__()
        self._packed = packed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a metadata query; pass any other call on."""
        if func in QUERIES and not self._packed.is_used:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
