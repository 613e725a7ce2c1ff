"""Kernels that a GPU runs, for fake tensors on a machine without one.

Without torch's own part for GPUs, fake tensors are on the CPU, where attention and dropout choose
other kernels, which save other tensors for the backward. Here they choose as on a GPU. The choice
of attention is that of torch for GPUs from the Ampere generation on.

Source: `priority_order` and the constraints of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
in PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from merak.core.tensor_meta import TensorMeta
from merak.core.units import counted
from merak.graph.ir.operators import chooses_kernel, multiplies_groups, room_for_documents
from merak.graph.segment.cut import copy_graph
from merak.ops.attention.packed import attend_packed, packed_obstacle
from merak.ops.grouped_product import grouped_product
from merak.ops.sharded_dropout import (
    attend_by_kernel,
    attend_sharded,
    dropout_by_mask,
    dropout_sharded,
)

_aten = torch.ops.aten

_Operand = torch.Tensor | TensorMeta

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_MOST_FEATURES = 256
"""Of a head, in flash attention."""
_ALIGNED_BYTES = 16
"""Of a row of memory-efficient attention's operands, and of its mask's in elements."""


def kernels_of(device_type: str, fake: torch.device) -> AbstractContextManager[object]:
    """Context in which operators on fake tensors choose the kernels of a type of device.

    Args:
        device_type: "cpu" or "cuda".
        fake: the device of the fake tensors.
    """
    return _GpuKernels() if (device_type, fake.type) == ("cuda", "cpu") else nullcontext()


def graph_of(graph: fx.Graph, device_type: str, fake: torch.device) -> fx.Graph:
    """Graph whose own operators of Merak choose the kernels of a type of device, too.

    Args:
        graph: of a segment; left as it is.
        device_type: "cpu" or "cuda".
        fake: the device of the fake tensors.
    """
    is_other = (device_type, fake.type) == ("cuda", "cpu")
    if not is_other or not any(map(_on_gpu, graph.nodes)):
        return graph
    copy, _ = copy_graph(graph)
    for node in copy.nodes:
        if chooses_kernel(node):
            room = room_for_documents(node)
            node.kwargs = {**node.kwargs, "room": room, "device_type": device_type}
        node.target = _on_gpu(node) or node.target
    return copy


def _on_gpu(node: fx.Node) -> Callable[..., Any] | None:
    """What an operator runs on a GPU, where that is something else than on the CPU."""
    if chooses_kernel(node):
        return attend_packed
    return _product_on_gpu if multiplies_groups(node) else _ON_GPUS.get(node.target)


def _product_on_gpu(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    return grouped_product(rows, weight, offsets, device_type="cuda")


_ON_GPUS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {attend_sharded: attend_by_kernel, dropout_sharded: dropout_by_mask}
)
"""What operators of Merak do on a GPU, where they do something else on the CPU."""


class _GpuKernels(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _KERNELS.get(func, func)(*args, **(kwargs or {}))


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout that saves a boolean mask, where the CPU saves one of the input's element type."""
    if not train or not 0 < p < 1:
        return _aten.dropout.default(x, p, train)  # type: ignore[no-any-return]
    return _aten.native_dropout.default(x, p, True)[0]  # type: ignore[no-any-return]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by the first kernel that takes its operands: flash, memory-efficient, or none."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    kernel = attention_kernel(query, key, value, attn_mask, enable_gqa).name
    if kernel == FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel == EFFICIENT:
        given = (query, key, value, attn_mask)
        needs_grad = any(x is not None and x.requires_grad for x in given)
        found = _aten._scaled_dot_product_efficient_attention.default(
            query,
            key,
            value,
            _bias(query, key, attn_mask),
            needs_grad and torch.is_grad_enabled(),
            dropout_p,
            is_causal,
            scale=scale,
        )
        return found[0]  # type: ignore[no-any-return]
    if dropout_p and not is_causal and not enable_gqa:
        return _products(query, key, value, attn_mask, dropout_p, scale)
    found = _aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return found[0]  # type: ignore[no-any-return]


def _products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """Attention by products of matrices, as torch's, whose dropout inside the CPU's would be.

    Low precisions are computed in float32.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    queries, keys = (x.to(wide) * scale**0.5 for x in (query, key))
    scores = queries @ keys.mT
    if attn_mask is not None:
        bias = attn_mask if attn_mask.dtype != torch.bool else _added(attn_mask, query)
        scores = scores + bias
    drawn = _dropout(_aten._safe_softmax.default(scores, -1), dropout_p, True)
    return (drawn @ value.to(wide)).to(query.dtype)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Flash attention; heads whose size is no multiple of 8 are padded, and the result cut."""
    flash = _aten._scaled_dot_product_flash_attention.default
    size = query.shape[-1]
    if size % 8 == 0:
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    padded = [functional.pad(x, (0, -size % 8)) for x in (query, key, value)]
    return flash(*padded, dropout_p, is_causal, scale=scale)[0][..., :size]  # type: ignore[no-any-return]


FLASH, EFFICIENT, PRODUCTS = "flash", "memory-efficient", "products of matrices"
PACKED = "flash inside documents"
_POSITIONS = frozenset(("position_ids",))
"""Columns that are asked where documents begin, not whether they are ones."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The kernel of torch's attention on a GPU.

    Args:
        name: `FLASH`, `EFFICIENT` or `PRODUCTS`, from the best to the worst.
        obstacle: what rules out the next better one; "" for the best.
    """

    name: str
    obstacle: str = ""

    def __str__(self) -> str:
        """The kernel, and why it is no better one."""
        better = {EFFICIENT: FLASH, PRODUCTS: f"{EFFICIENT} attention"}
        if not self.obstacle:
            return self.name
        return f"{self.name}, since {self.obstacle} rules out {better[self.name]}"


def attention_kernel(
    query: _Operand, key: _Operand, value: _Operand, mask: _Operand | None, enable_gqa: bool
) -> AttentionKernel:
    """The kernel that torch chooses for some operands of attention.

    Args:
        query: (samples, heads, tokens, features).
        key: likewise.
        value: likewise.
        mask: None for none.
        enable_gqa: whether several heads of queries may share a head of keys.
    """
    obstacle = _flash_obstacle(query, key, value, mask)
    if not obstacle:
        return AttentionKernel(FLASH)
    if worse := _efficient_obstacle(query, key, value, mask, enable_gqa):
        return AttentionKernel(PRODUCTS, worse)
    return AttentionKernel(EFFICIENT, obstacle)


def _flash_obstacle(query: _Operand, key: _Operand, value: _Operand, mask: object) -> str:
    sizes = {x.shape[-1] for x in (query, key, value)}
    if mask is not None:
        return "its mask"
    if query.dtype not in _LOW_PRECISION:
        return _named(query.dtype)
    if len(sizes) > 1 or max(sizes) > _MOST_FEATURES:
        return f"heads of {' and '.join(map(str, sorted(sizes)))} features"
    return "" if len(query.shape) == 4 else f"a query of {len(query.shape)} dims"


def _efficient_obstacle(
    query: _Operand, key: _Operand, value: _Operand, mask: _Operand | None, enable_gqa: bool
) -> str:
    if isinstance(mask, torch.Tensor) and mask.stride(-1) != 1:
        return "a mask whose rows lie apart"
    if mask is not None and len(mask.shape) not in (2, 4):
        return f"a mask of {len(mask.shape)} dims"
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        return f"{query.shape[-3]} heads of queries over {key.shape[-3]} of keys"
    for size in (query.shape[-1], value.shape[-1]):
        if size * query.dtype.itemsize % _ALIGNED_BYTES:
            return f"heads of {size} features, no multiple of {_ALIGNED_BYTES} bytes,"
    if query.dtype not in (torch.float32, *_LOW_PRECISION):
        return _named(query.dtype)
    return "" if len(query.shape) == 4 else f"a query of {len(query.shape)} dims"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def attention_kernels(graph: fx.Graph) -> list[AttentionKernel]:
    """The kernels that a GPU runs for the attention of a graph, in its order.

    Args:
        graph: of a segment.
    """
    found = []
    for node in graph.nodes:
        if node.target is not _aten.scaled_dot_product_attention.default:
            continue
        given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args)} | node.kwargs
        query, key, value = (given[n].meta["tensor"] for n in ("query", "key", "value"))
        mask, shares = given.get("attn_mask"), given.get("enable_gqa", False)
        shares = shares and not chooses_kernel(node)
        mask = mask.meta["tensor"] if isinstance(mask, fx.Node) else None
        if room_for_documents(node) and not packed_obstacle(query, key, value):
            found.append(AttentionKernel(PACKED))
            continue
        found.append(attention_kernel(query, key, value, mask, shares))
    return found


def attention_sentence(graphs: Iterable[fx.Graph], queried: Collection[str] = ()) -> str | None:
    """A sentence on the kernels of attention on a GPU, and what would give better ones.

    Args:
        graphs: of the segments.
        queried: as of `ModelGraph`.

    Returns:
        The sentence without its full stop; None without attention that torch has a kernel for.
    """
    counts = Counter(kernel for graph in graphs for kernel in {*attention_kernels(graph)})
    if not counts:
        return None
    of_each = [f"{kernel} in {counted(n, 'segment')}" for kernel, n in counts.items()]
    advice = ""
    if any(kernel.obstacle == "its mask" for kernel in counts):
        advice = "; a causal model needs no attention_mask for batches without padding"
        masks, positions = set(queried) - _POSITIONS, _POSITIONS.intersection(queried)
        if masks:
            advice = f"; a microbatch whose {' and '.join(sorted(masks))} is all ones has no mask"
        elif positions:
            advice = "; a microbatch whose position_ids begin anew has flash attention in documents"
    return f"attention: {'; '.join(of_each)}{advice}"


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """What is added to the scores: of the query's element type, with rows that are aligned."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = _added(mask, query)
    num_keys = key.shape[-2]
    if mask.shape[-1] % _ALIGNED_BYTES:
        mask = functional.pad(mask, (0, -mask.shape[-1] % _ALIGNED_BYTES))[..., :num_keys]
    return mask.expand(*query.shape[:2], query.shape[-2], num_keys)


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A boolean mask as what is added to the scores."""
    zeros = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    return zeros.masked_fill(~mask, -torch.inf)


_KERNELS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        _aten.dropout.default: _dropout,
        _aten.scaled_dot_product_attention.default: _attention,
        functional.scaled_dot_product_attention: _attention,
    }
)
