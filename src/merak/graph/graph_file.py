"""Graph files: a model graph in the safetensors format, as JSON beside the tensors it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import nn

from merak.graph.ir import ModelGraph
from merak.graph.json_values import NotStorable, Reader, Writer
from merak.graph.pack import pack_model, unpack_model

_TEXT = "graph"
"""The entry that holds the JSON, in bytes."""


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The content of a graph file, before its graph is put together.

    Args:
        sources: source files that the trace ran through → hashes of them.
        graph: as JSON.
        metas: of tensors, as JSON.
        tensors: constants of the trace.
    """

    sources: dict[str, str]
    graph: Any
    metas: Sequence[Any]
    tensors: Sequence[torch.Tensor]


def write_graph_file(graph: ModelGraph, sources: Mapping[str, str]) -> bytes:
    """A model graph as a file has it.

    Args:
        graph: the model graph.
        sources: source files that the trace ran through → hashes of them.

    Raises:
        NotStorable: it holds an object that is no data.
    """
    writer = Writer()
    packed = writer.write(pack_model(graph))
    content = {
        "sources": dict(sources),
        "graph": packed,
        "metas": writer.metas,
        "tensors": [_description(tensor, writer) for tensor in writer.tensors],
    }
    # Bytes instead of tensors: what types and sizes they have is in the JSON.
    entries = {f"tensor {i}": _bytes(tensor) for i, tensor in enumerate(writer.tensors)}
    text = json.dumps(content, separators=(",", ":")).encode()
    entries[_TEXT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return safetensors.torch.save(entries)


def read_graph_file(content: bytes) -> GraphFile:
    """What a graph file holds.

    Raises:
        Exception: of many types: it is no such file.
    """
    entries = safetensors.torch.load(content)
    text = json.loads(entries[_TEXT].numpy().tobytes())
    reader = Reader((), ())
    tensors = [
        _tensor(entries[f"tensor {i}"], *reader.read(description))
        for i, description in enumerate(text["tensors"])
    ]
    return GraphFile(text["sources"], text["graph"], text["metas"], tensors)


def graph_of(file: GraphFile) -> ModelGraph:
    """The model graph of a file; the modules it calls are yet to be connected.

    Raises:
        Exception: of many types: the file is damaged, or of another version.
    """
    return unpack_model(Reader(file.tensors, file.metas).read(file.graph))


def _description(tensor: torch.Tensor, writer: Writer) -> Any:
    """Everything about a tensor but its numbers.

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
