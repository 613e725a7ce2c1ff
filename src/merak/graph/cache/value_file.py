"""Value files: nested values in the safetensors format, as JSON beside the tensors they hold.

Reading one runs nothing that it brings; see `merak.graph.cache.json_values`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from torch import nn

from merak.graph.cache.json_values import NotStorable, Reader, Writer

_TEXT = "values"
"""The entry that holds the JSON, in bytes."""


def write_values(values: Mapping[str, Any]) -> bytes:
    """Content of a value file.

    Args:
        values: of tensors, plain values, and data classes and containers of such.

    Raises:
        NotStorable: one of them holds an object that is no data.
    """
    writer = Writer()
    written = {name: writer.write(value) for name, value in values.items()}
    content = {
        "values": written,
        "metas": writer.metas,
        "tensors": [_description(tensor, writer) for tensor in writer.tensors],
    }
    # Bytes instead of tensors: what types and sizes they have is in the JSON.
    entries = {f"tensor {i}": _bytes(tensor) for i, tensor in enumerate(writer.tensors)}
    text = json.dumps(content, separators=(",", ":")).encode()
    entries[_TEXT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(entries)


class ValueFile:
    """Values of a file, each read when it is asked for.

    Args:
        content: of the file.

    Raises:
        Exception: of many types, here or when a value is read: the content is damaged.
    """

    def __init__(self, content: bytes) -> None:
        entries = safetensors.torch.load(content)
        text = json.loads(entries[_TEXT].numpy().tobytes())
        plain = Reader((), ())
        tensors = [
            _tensor(entries[f"tensor {i}"], *plain.read(description))
            for i, description in enumerate(text["tensors"])
        ]
        self._reader = Reader(tensors, text["metas"])
        self._values = text["values"]

    def __getitem__(self, name: str) -> Any:
        return self._reader.read(self._values[name])


def _description(tensor: torch.Tensor, writer: Writer) -> Any:
    """Dtype, shape, strides, device and kind of a tensor.

    Raises:
        NotStorable: it is of a type of its own.
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise NotStorable(f"{type(tensor).__module__}.{type(tensor).__qualname__}")
    is_parameter = isinstance(tensor, nn.Parameter)
    parts = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    return writer.write((*parts, tensor.requires_grad, is_parameter))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return torch.empty(0, dtype=torch.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _tensor(
    numbers: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    device: torch.device,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    # Where a dim is expanded, its one row is filled.
    sizes = [min(n, 1) if step == 0 else n for n, step in zip(shape, stride)]
    made = torch.empty_strided(sizes, stride, dtype=dtype, device=device)
    if not made.is_meta:
        rows = tuple(slice(0, n) for n in sizes)
        made.copy_(numbers.view(dtype).reshape(shape)[rows])
    made = made.expand(shape)
    if is_parameter:
        return nn.Parameter(made, requires_grad=requires_grad)
    return made.requires_grad_() if requires_grad else made
