"""Work of one operator of a graph, forward and backward, from shapes alone.

FLOPs are those of matrix products, counted as `torch.utils.flop_counter` counts them; each of a
product's gradients is another product of the same size. Views do nothing. Everything else is
taken to read its inputs and write its outputs once; its backward reads the output's gradient and
the inputs, and writes a gradient per input that needs one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import Role, role_of
from merak.graph.ir.operators import (
    ACTIVATIONS,
    ATTENTIONS,
    CONVERSIONS,
    CROSS_ENTROPIES,
    DROPOUTS,
    EXPERT_GEMMS,
    GEMM_OPERANDS,
    GROUPED_GEMMS,
    NARROWS,
    RNNS,
    SEPARATE_GEMMS,
    SPLITS,
    family,
    room_for_documents,
)
from merak.graph.trace.opaque.operator import cost_of
from merak.ops.attention.ring import Ring
from merak.ops.chunked_loss import ChunkedHead
from merak.ops.chunked_rows import RowFunction
from merak.ops.float8 import OF_VALUES
from merak.ops.sharded_dropout import dropout_sharded
from merak.plan.cost.efficiency import AttentionShape, ProductShape


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one kernel.

    Args:
        num_bytes: bytes read and written.
        flops: of a matrix product.
        dtype: the product's element type.
        functions: elements on which a function such as exp is evaluated.
        randoms: elements for which a random bit is drawn.
        kernels: number of kernels that do it together; a mean, where not every microbatch runs it.
        shape: of the matrix product or the fused attention, where it is one.
    """

    num_bytes: float
    flops: float = 0.0
    dtype: torch.dtype = torch.float32
    functions: float = 0.0
    randoms: float = 0.0
    kernels: float = 1
    shape: ProductShape | AttentionShape | None = None


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The kernels of a node: of its forward, and of its backward where a gradient flows."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Kernels of an operator, where it is not enough to read and write all tensors once each way.

    Args:
        work: makes them, of the node and the device type; None for what all others share.
        is_fusible: whether a compiler makes one kernel of it and its neighbours.
        functions: of how many ways, the forward first, a function as exp is evaluated for every
            element in.
        passes: over the largest input beyond one, each way.
        draws: whether a random bit is drawn for every element.
        gradient: what its backward does with the gradient: hand it "on", unless an operand was
            broadcast; keep what a random "mask" did; "change" it, by no operand; or "scale" it, by
            no operand but a second tensor. "" where it reads the operands.
    """

    work: Callable[[fx.Node, str], NodeWork] | None = None
    is_fusible: bool = True
    functions: int = 0
    passes: tuple[int, int] = (0, 0)
    draws: bool = False
    gradient: str = ""


_CUTTING_VIEWS = NARROWS | {"select", "diagonal"}

_EMPTY = frozenset("empty empty_like empty_strided new_empty new_empty_strided".split())

_SAME_WORK: Mapping[str, str] = MappingProxyType(
    {
        "token_cross_entropy": "cross_entropy_loss",
        "token_vocab_parallel_cross_entropy": "vocab_parallel_cross_entropy",
        "token_nll": "nll_loss",
        "sharded_batch_norm": "batch_norm",
    }
)
"""Operators on a rank's own tokens or channels, and those whose work they have."""

_VARIANTS = ("native_", "unsafe_", "_unsafe_")
"""Marks of operators that do the same work as those without."""

_UNDECLARED_VIEWS = frozenset(("aten::_unsafe_view", "aten::unsafe_chunk", "aten::unsafe_split"))
_UNDECLARED_VIEWS |= {"aten::unsafe_split_with_sizes"}
"""Views whose schema does not say that they are."""


def node_work(node: fx.Node, device_type: str) -> NodeWork:
    """Work of a node.

    Args:
        node: an operator, with shapes in its meta.
        device_type: "cpu" or "cuda"; dropout inside attention rules out the CPU's fused kernel.

    Returns:
        Its kernels; none for placeholders and outputs.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return NodeWork()
    work = _work(node, _name(node), device_type)
    return work if any(meta.requires_grad for meta in outputs(node)) else NodeWork(work.forward)


def is_view(node: fx.Node) -> bool:
    """Whether an operator computes nothing: its output is its input's storage, or a tuple's item.

    Args:
        node: an operator, with shapes in its meta.
    """
    return node.target is operator.getitem or _does_nothing(node, _name(node))


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler fuses an operator with its neighbours: pointwise ones and reductions.

    Losses over many classes are kernels of their own, which pass over the classes several times;
    what sends to other ranks is one, too.

    Args:
        node: an operator of torch, with shapes in its meta.
    """
    is_torch = isinstance(node.target, torch._ops.OpOverload) or node.target is dropout_sharded
    is_whole = not _kernels_of(node).is_fusible or role_of(node) is Role.COLLECTIVE
    return is_torch and not is_whole and not is_view(node)


def is_linear(node: fx.Node) -> bool:
    """Whether the backward of a fusible operator reads no input of its forward but a mask."""
    gradient = _kernels_of(node).gradient
    others = [source for source in node.all_input_nodes if outputs(source)]
    return len(others) == 1 if gradient == "scale" else bool(gradient)


def hands_gradient_on(node: fx.Node) -> bool:
    """Whether an input's gradient is the output's, the same tensor."""
    return is_view(node) or _kernels_of(node).gradient == "on"


def draws_mask(node: fx.Node) -> bool:
    """Whether an operator draws a random mask, a byte an element, which its backward reads."""
    return _kernels_of(node).gradient == "mask" and not is_view(node)


def tensors(value: Any) -> tuple[TensorMeta, ...]:
    """The tensors of a node's meta, which may be one, several, or none."""
    if isinstance(value, TensorMeta):
        return (value,)
    if isinstance(value, tuple | list):
        return tuple(tensor for item in value for tensor in tensors(item))
    return ()


def outputs(node: fx.Node) -> tuple[TensorMeta, ...]:
    """The tensors that a node yields."""
    return tensors(node.meta.get("tensor"))


def _work(node: fx.Node, name: str, device_type: str) -> NodeWork:
    if _does_nothing(node, name):
        return NodeWork((), _view_backward(node, name))
    kernels = _kernels_of(node)
    return _elementwise(node, kernels) if kernels.work is None else kernels.work(node, device_type)


def _kernels_of(node: fx.Node) -> _Kernels:
    return _KERNELS.get(_name(node), _Kernels())


def _name(node: fx.Node) -> str:
    """An operator's name without namespace, overload, variant, and the mark of working in place."""
    name = family(node.target).rpartition("::")[2].rstrip("_")
    for variant in _VARIANTS:
        name = name.removeprefix(variant)
    return _SAME_WORK.get(name, name)


def _inputs(node: fx.Node) -> tuple[TensorMeta, ...]:
    return tuple(tensor for source in node.all_input_nodes for tensor in outputs(source))


def _read_bytes(node: fx.Node) -> int:
    """Bytes of what a node reads: of what is expanded, those that lie in memory."""
    return sum(
        meta.num_bytes // _repeats(source)
        for source in node.all_input_nodes
        for meta in outputs(source)
    )


def _repeats(source: fx.Node) -> int:
    """How often each element of a value is in it, as its layout says in a joint graph."""
    layout = source.meta.get("layout")
    if layout is None:
        return 1
    pairs = zip(layout.shape, layout.stride, strict=True)
    return math.prod(max(size, 1) for size, step in pairs if step == 0)


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def _tensor(argument: Any) -> TensorMeta | None:
    return outputs(argument)[0] if isinstance(argument, fx.Node) else None


def _num_bytes(*metas: TensorMeta | None) -> int:
    return sum(meta.num_bytes for meta in metas if meta is not None)


def _size(meta: TensorMeta) -> int:
    return math.prod(meta.shape)


def _gradients(operands: tuple[TensorMeta | None, ...]) -> list[TensorMeta]:
    return [meta for meta in operands if meta is not None and meta.requires_grad]


# Views


def _does_nothing(node: fx.Node, name: str) -> bool:
    """Whether the output is a view of the input. Reshapes are assumed not to copy."""
    if name in ("dropout", "dropout_sharded"):
        return not _argument(node, 2, "train") or _argument(node, 1, "p") == 0
    if name in ("detach", "contiguous"):
        return name == "detach"
    if name in _EMPTY:
        return True
    if name == "to":
        return {t.dtype for t in outputs(node)} == {t.dtype for t in _inputs(node)}
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target._schema.name in _UNDECLARED_VIEWS:
        return True
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _view_backward(node: fx.Node, name: str) -> tuple[Work, ...]:
    """Work of a view's backward: gradients of pieces are written, those of copies summed."""
    whole, pieces = _num_bytes(*_inputs(node)), _num_bytes(*outputs(node))
    if name in _CUTTING_VIEWS and pieces < whole:
        return (Work(whole), Work(2 * pieces))
    if name in SPLITS or pieces > whole:
        return (Work(whole + pieces),)
    return ()


# Matrix products


def _product(node: fx.Node, _: str) -> NodeWork:
    name = _name(node)
    operands = GEMM_OPERANDS[name]
    first, second = _tensor(node.args[operands.x]), _tensor(node.args[operands.weight])
    bias = None if operands.bias is None else _tensor(_argument(node, operands.bias, "bias"))
    out = outputs(node)[0]
    assert first is not None and second is not None
    flops = 2.0 * _size(out) * first.shape[-1]
    if name.startswith("conv"):
        transposed = "transpose" in name or (name == "convolution" and node.args[6])
        positions = _size(first if transposed else out)
        flops = 2.0 * positions * _size(second) / second.shape[0]
    if len(out.shape) > len(second.shape) and name in GROUPED_GEMMS:
        flops /= out.shape[0]  # every row is multiplied for its own group alone
    if name in EXPERT_GEMMS and (offsets := _tensor(node.args[2])) is not None:
        # Of rows that are spread evenly, those of the rank's own experts.
        flops *= second.shape[0] / offsets.shape[0]
    shape = _product_shape(second, out, flops)
    product = Work(_num_bytes(first, second, out), flops, second.dtype, shape=shape)
    backward = _product_gradients(product, shape, first.requires_grad, second.requires_grad)
    backward += [Work(_num_bytes(out, added)) for added in _gradients((bias,))]
    return NodeWork((product,), tuple(backward))


def _float8_linears(node: fx.Node, device_type: str) -> NodeWork:
    """Linear layers of float8 that read the same, as a function of a segment."""
    x = _tensor(node.args[0])
    assert x is not None
    weights = [meta for meta in map(_tensor, node.args[1]) if meta is not None]  # type: ignore[arg-type]
    forward, backward = [_cast_to_float8(x)], [Work(2.0 * _size(x))]
    for weight, out in zip(weights, outputs(node), strict=True):
        flops = 2.0 * _size(out) * x.shape[-1]
        shape = _product_shape(weight, out, flops)
        num_bytes = _size(x) + _size(weight) + out.num_bytes
        product = Work(num_bytes, flops, _float8_dtype(device_type), shape=shape)
        forward += [product, _cast_to_float8(weight)]
        backward += _product_gradients(product, shape, x.requires_grad, weight.requires_grad)
        # Cast, and transposed.
        backward += [_cast_to_float8(out), _cast_to_float8(weight)]
        backward += [Work(2.0 * _size(weight)), Work(2.0 * _size(out))]
    return NodeWork(tuple(forward), tuple(backward))


def _cast_to_float8(meta: TensorMeta) -> Work:
    """The largest magnitude of an operand; then it is scaled, and cast."""
    return Work(4 * meta.num_bytes + _size(meta), kernels=3)


def _scaled_product(node: fx.Node, device_type: str) -> NodeWork:
    """A product of operands of float8, in a joint graph."""
    first, second, out = _tensor(node.args[0]), _tensor(node.args[1]), outputs(node)[0]
    assert first is not None and second is not None
    flops = 2.0 * _size(out) * first.shape[-1]
    shape = _product_shape(second, out, flops)
    num_bytes = _num_bytes(first, second, out)
    return NodeWork((Work(num_bytes, flops, _float8_dtype(device_type), shape=shape),))


def _float8_dtype(device_type: str) -> torch.dtype:
    """Type in which operands of float8 are multiplied: CPUs have no such products."""
    return torch.float32 if device_type == "cpu" else OF_VALUES


def _separate_products(node: fx.Node, _: str) -> NodeWork:
    """A product for every group of rows, each with a weight of its own."""
    x, (out,) = _tensor(node.args[0]), outputs(node)
    weights = [_tensor(weight) for weight in node.args[1]]  # type: ignore[union-attr]
    assert x is not None and weights[0] is not None
    flops = 2.0 * _size(out) * x.shape[-1]
    own = [weight for weight in weights if weight is not None and _size(weight)]
    if family(node.target) == "grouped_linear_rows":
        flops *= len(own) / len(weights)  # as above
    shape = _product_shape(weights[0], out, flops)
    product = Work(_num_bytes(x, *own, out), flops, x.dtype, kernels=len(own), shape=shape)
    of_weights = bool(_gradients(tuple(weights)))
    return NodeWork(
        (product,), tuple(_product_gradients(product, shape, x.requires_grad, of_weights))
    )


def _convolution_backward(node: fx.Node, _: str) -> NodeWork:
    """Gradients of a convolution's operands, each of which takes as long as the convolution."""
    given = _named(node)
    gradient, x, weight = (_tensor(node.args[index]) for index in range(3))
    assert gradient is not None and x is not None and weight is not None
    positions = _size(x if given["transposed"] else gradient)
    flops = 2.0 * positions * _size(weight) / weight.shape[0]
    shape = _product_shape(weight, gradient, flops)
    product = Work(_num_bytes(gradient, x, weight), flops, weight.dtype, shape=shape)
    of_x, of_weight, of_bias = given["output_mask"]
    works = _product_gradients(product, shape, of_x, of_weight)
    return NodeWork((*works, *[Work(gradient.num_bytes)] * of_bias))


def _fill(node: fx.Node, _: str) -> NodeWork:
    """What is written, whatever was there before."""
    return NodeWork((Work(_num_bytes(*outputs(node))),))


def _copy(node: fx.Node, _: str) -> NodeWork:
    """A copy into a tensor, which is not read."""
    both = _elementwise(node, _Kernels(gradient="change"))
    return NodeWork((Work(_num_bytes(*outputs(node), _tensor(node.args[1]))),), both.backward)


def _piece_backward(node: fx.Node, _: str) -> NodeWork:
    """A gradient of a whole, which is filled, and into which that of a piece is copied."""
    return NodeWork((Work(_num_bytes(*outputs(node))), Work(2 * _num_bytes(*_inputs(node)))))


def _scatter(node: fx.Node, _: str) -> NodeWork:
    """Values at indices, added to what is there; of what is not in place, all of that is copied."""
    whole, *values = _inputs(node)
    in_place = family(node.target).endswith("_")
    copied = 0 if in_place else 2 * whole.num_bytes
    work = Work(copied + _num_bytes(*values) + 2 * _num_bytes(values[-1]), kernels=2 - in_place)
    return NodeWork((work,), _elementwise(node, _Kernels()).backward)


def _nll(node: fx.Node, _: str) -> NodeWork:
    """A loss of class indices, which reads one log-probability of each position."""
    return NodeWork((_sectors(node.args[1]),))


def _nll_backward(node: fx.Node, _: str) -> NodeWork:
    """A gradient of all log-probabilities, which is filled, with one number of each position."""
    return NodeWork((Work(_num_bytes(*outputs(node))), _sectors(node.args[2])))


def _sectors(targets: Any) -> Work:
    """One number of each position, which is read or written."""
    (meta,) = outputs(targets)
    return Work(_SECTOR_BYTES * _size(meta))


_SECTOR_BYTES = 32
"""Of a GPU's memory, which are read for one number."""


def _embedding_backward(node: fx.Node, _: str) -> NodeWork:
    """A gradient of the whole table, which is filled, and to which rows are added."""
    rows, indices = (_tensor(node.args[index]) for index in range(2))
    (table,) = outputs(node)
    assert rows is not None
    return NodeWork((Work(table.num_bytes), Work(_num_bytes(indices) + 3 * rows.num_bytes)))


def _product_gradients(
    product: Work, shape: ProductShape, of_first: bool, of_second: bool
) -> list[Work]:
    """The products that make the gradients of a product's operands, of the same size."""
    first = ProductShape(shape.m, shape.k, shape.n, shape.batch)
    second = ProductShape(shape.n, shape.k, shape.m, shape.batch)
    needed = ((of_first, first), (of_second, second))
    return [replace(product, shape=own) for is_needed, own in needed if is_needed]


def _product_shape(second: TensorMeta, out: TensorMeta, flops: float) -> ProductShape:
    """Shape of a product: one of matrices where the second operand is one, else a batch of them."""
    is_batch = len(second.shape) > 2 and len(out.shape) > 2
    batch = math.prod(out.shape[:-2]) if is_batch else 1
    n = max(out.shape[-1], 1) if out.shape else 1  # a dot product has one number
    m = max(_size(out) // (batch * n), 1) if batch else 1
    return ProductShape(m, n, max(round(flops / 2 / max(batch * m * n, 1)), 1), max(batch, 1))


def _einsum(node: fx.Node, _: str) -> NodeWork:
    equation, factors = str(node.args[0]).replace(" ", ""), node.args[1]
    assert isinstance(factors, list | tuple)
    return _contraction(node, equation.partition("->")[0].split(","), factors)


def _bilinear(node: fx.Node, _: str) -> NodeWork:
    return _contraction(node, ("...i", "oij", "...j"), [node.args[n] for n in (0, 2, 1)])


def _contraction(node: fx.Node, terms: Sequence[str], factors: Sequence[Any]) -> NodeWork:
    """Several factors as one product: every combination of their dims is multiplied and added."""
    metas = [meta for meta in map(_tensor, factors) if meta is not None]
    sizes: dict[str, int] = {}
    for term, meta in zip(terms, metas):
        before, _, after = term.partition("...")
        hidden = len(meta.shape) - len(before) - len(after)
        names = [*before, *(f"dim -{dim}" for dim in range(hidden, 0, -1)), *after]
        sizes |= {n: max(size, sizes.get(n, 1)) for n, size in zip(names, meta.shape)}
    flops = 2.0 * math.prod(sizes.values()) * (len(metas) - 1)
    product = Work(_num_bytes(*metas, *outputs(node)), flops, metas[0].dtype)
    return NodeWork((product,), (product,) * len(_gradients(tuple(metas))))


def _recurrent(node: fx.Node, _: str) -> NodeWork:
    """A recurrent layer: every weight is multiplied with every token, one after another."""
    tokens = _tensor(node.args[0])
    assert tokens is not None
    weights = [meta for meta in _inputs(node) if len(meta.shape) == 2 and meta.requires_grad]
    num_tokens = _size(tokens) // tokens.shape[-1]
    flops = 2.0 * num_tokens * sum(_size(weight) for weight in weights)
    product = Work(_num_bytes(*_inputs(node), *outputs(node)), flops, tokens.dtype)
    return NodeWork((product,), (product, product))


def _attention(node: fx.Node, device_type: str) -> NodeWork:
    """Fused attention: scores stay on the chip, and the backward computes them again.

    A causal kernel skips the scores above the diagonal. With dropout the CPU has no fused kernel:
    all scores are written, passed over by softmax and dropout, and read again.
    """
    query, key, value = (_tensor(node.args[index]) for index in range(3))
    assert query is not None and key is not None and value is not None
    mask = _tensor(_argument(node, 3, "attn_mask"))
    sizes, values = query.shape[-1], value.shape[-1]
    num_bytes = _num_bytes(query, key, value, mask, *outputs(node))
    fused = device_type != "cpu" or not _argument(node, 4, "dropout_p", 0.0)
    scores = _size(query) // query.shape[-1] * key.shape[-2]
    if fused:
        # Documents are at most as long as their rows.
        is_causal = _argument(node, 5, "is_causal", False) or room_for_documents(node) > 0
        forward, backward = _fused_attention((query, key, value), is_causal, num_bytes)
        return NodeWork((forward,), (backward,))
    traffic = 3.0 * scores * query.dtype.itemsize
    passes = (Work(traffic), Work(traffic, functions=scores), Work(traffic, randoms=scores))
    products = [Work(num_bytes / 2, 2.0 * scores * size, query.dtype) for size in (sizes, values)]
    return NodeWork((*products, *passes), (*products, *products, *([Work(traffic)] * 3)))


def _fused_attention(
    operands: tuple[TensorMeta, TensorMeta, TensorMeta], is_causal: bool, num_bytes: float
) -> tuple[Work, Work]:
    """One kernel each way, of a query, a key and a value: (…, tokens, features)."""
    query, key, value = operands
    sizes, values = query.shape[-1], value.shape[-1]
    scores = _size(query) // sizes * key.shape[-2]
    fraction = _causal_fraction(query.shape[-2], key.shape[-2]) if is_causal else 1.0
    flops = 2.0 * scores * fraction
    shape = AttentionShape(sizes, key.shape[-2], _size(query) // sizes, fraction < 1, False)
    forward = Work(num_bytes, flops * (sizes + values), query.dtype, scores * fraction, shape=shape)
    flops *= 3 * sizes + 2 * values
    backward = Work(2 * num_bytes, flops, query.dtype, shape=replace(shape, is_backward=True))
    return forward, backward


def _ring(node: fx.Node, _: str) -> NodeWork:
    """Attention over a ring of ranks, as a function of a segment."""
    forward, backward = _ring_works(node.args[:3], Ring.last_of(node.args))
    return NodeWork(forward, backward)


def _ring_there(node: fx.Node, _: str) -> NodeWork:
    return NodeWork(_ring_works(node.args[:3], Ring.last_of(node.args))[0])


def _ring_back(node: fx.Node, _: str) -> NodeWork:
    return NodeWork(_ring_works(node.args[1:4], Ring.last_of(node.args))[1])


def _ring_works(operands: Any, ring: Ring) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """A kernel for each rank's keys, each way, and the sums of what they find, in float32."""
    query, key, value = (outputs(operand)[0] for operand in operands)
    out = replace(query, shape=(*query.shape[:-1], value.shape[-1]))
    num_bytes = _num_bytes(query, key, value, out)
    own = _fused_attention((query, key, value), ring.is_causal, num_bytes)
    other = _fused_attention((query, key, value), False, num_bytes)
    if ring.is_causal:  # half of a block is there for each other rank
        other = tuple(replace(w, flops=w.flops / 2, functions=w.functions / 2) for w in other)  # type: ignore[assignment]
    sums = 8.0 * _size(out), 8.0 * (_size(query) + _size(key) + _size(value))
    made = []
    for one, block, size in zip(own, other, sums, strict=True):
        made.append((one, *[block, Work(size, kernels=3)] * (ring.degree - 1)))
    return made[0], made[1]


def _attention_kernel(node: fx.Node, _: str) -> NodeWork:
    """One of torch's kernels of attention, or of its backward."""
    found = {name: value for name, value in _named(node).items() if isinstance(value, fx.Node)}
    query, key, value = (_tensor(found[name]) for name in ("query", "key", "value"))
    assert query is not None and key is not None and value is not None
    out = replace(query, shape=(*query.shape[:-1], value.shape[-1]))
    bias = _tensor(found.get("attn_bias", found.get("attn_mask")))
    operands, is_causal = (query, key, value), bool(_named(node).get("is_causal"))
    both = _fused_attention(operands, is_causal, _num_bytes(query, key, value, bias, out))
    return NodeWork((both[_name(node).endswith("_backward")],))


def _named(node: fx.Node) -> Mapping[str, Any]:
    """Arguments of an operator of torch by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args)), **node.kwargs}


def _causal_fraction(num_queries: int, num_keys: int) -> float:
    """Fraction of scores on and below the diagonal that starts at the first query and key."""
    full = max(0, num_queries - num_keys)
    rising = num_queries - full
    return (rising * (rising + 1) / 2 + full * num_keys) / (num_queries * num_keys)


# Everything else


def _chunked_loss(node: fx.Node, _: str) -> NodeWork:
    """A head and its loss in chunks, as a function of a segment."""
    how: Any = node.args[-1] if isinstance(node.args[-1], tuple) else node.args[-2]
    head = ChunkedHead(*how)
    hidden: Any = node.args[0]
    weight: Any = node.args[1]
    product, losses, gradients = _chunk_works(hidden, weight, head.rows)
    if head.one_pass:
        gradients = _without_exponentials(gradients)
        scaled = Work(2 * _num_bytes(*outputs(hidden), *outputs(weight)))
        return NodeWork((*[product] * 3, losses, gradients), (scaled,))
    return NodeWork((product, losses), (*[product] * 3, gradients))


def _chunk_losses(node: fx.Node, _: str) -> NodeWork:
    rows = ChunkedHead.last_of(node.args).rows
    return NodeWork(_chunk_works(node.args[0], node.args[1], rows)[:2])


def _chunk_losses_and_gradients(node: fx.Node, _: str) -> NodeWork:
    """The logits, their losses, and two products with their gradients, of as many as are wanted."""
    rows = ChunkedHead.last_of(node.args).rows
    wanted: Any = node.args[6]
    product, losses, gradients = _chunk_works(node.args[0], node.args[1], rows)
    works = (losses, _without_exponentials(gradients), Work(2 * _num_bytes(*outputs(node))))
    return NodeWork((*[product] * (1 + sum(wanted[:2])), *works))


def _chunk_gradients(node: fx.Node, _: str) -> NodeWork:
    """The logits once more, and two products with their gradients, of as many as are wanted."""
    rows = ChunkedHead.last_of(node.args).rows
    product, _losses, gradients = _chunk_works(node.args[1], node.args[2], rows)
    wanted: Any = node.args[8]
    sums = Work(2 * sum(_num_bytes(*outputs(user)) for user in node.users))
    return NodeWork((*[product] * (1 + sum(wanted[:2])), gradients, sums))


def _chunked_rows(node: fx.Node, _: str) -> NodeWork:
    """A head and numbers of its rows in chunks, as a function of a segment."""
    product, forward, backward = _row_works(node)
    return NodeWork((product, forward), (*[product] * 3, backward))


def _chunk_results(node: fx.Node, _: str) -> NodeWork:
    return NodeWork(_row_works(node)[:2])


def _chunk_results_gradients(node: fx.Node, _: str) -> NodeWork:
    """The logits once more, and two products with their gradients, of as many as are wanted."""
    wanted: Any = node.args[-2]
    product, _forward, backward = _row_works(node)
    sums = Work(2 * sum(_num_bytes(*outputs(user)) for user in node.users))
    return NodeWork((*[product] * (1 + sum(wanted[:2])), backward, sums))


def _row_works(node: fx.Node) -> tuple[Work, Work, Work]:
    """The product that makes all logits, what reads them, and that once more with its backward."""
    function = RowFunction.first_of(node.args)
    hidden, weight = (n for n in node.args[len(function) :][:2] if isinstance(n, fx.Node))
    x = outputs(hidden)[0]
    product, _losses, _gradients = _chunk_works(hidden, weight, function.rows_of(x.shape))
    count = math.prod(x.shape[:-1]) * outputs(weight)[0].shape[0]
    num_bytes, kernels = 4 * count * function.num_passes, product.kernels * len(function.calls)
    forward = Work(num_bytes, functions=count, kernels=kernels)
    # The forward's, and twice as much that autograd reads and writes.
    backward = Work(3 * num_bytes, functions=2 * count, kernels=3 * kernels)
    return product, forward, backward


def _scaled(node: fx.Node, _: str) -> NodeWork:
    return NodeWork((Work(2 * _num_bytes(*outputs(node)), kernels=len(node.args) - 2),))


def _chunk_works(hidden: Any, weight: Any, rows: Any) -> tuple[Work, Work, Work]:
    """The product that makes all logits, the passes that make losses, and those of gradients."""
    x, own = outputs(hidden)[0], outputs(weight)[0]
    num_rows, num_classes = math.prod(x.shape[:-1]), own.shape[0]
    count, size = num_rows * num_classes, own.dtype.itemsize
    chunks = math.ceil(num_rows / rows)
    shape = ProductShape(rows, num_classes, x.shape[-1])
    num_bytes = _num_bytes(x) + chunks * _num_bytes(own) + count * size
    product = Work(num_bytes, 2.0 * count * x.shape[-1], own.dtype, kernels=chunks, shape=shape)
    # In float32: converted, their maximum read, shifted, exponentials made, and these summed; then
    # converted, shifted, exponentials made, scaled, and converted back.
    losses = Work(count * (size + 24.0), functions=count, kernels=5 * chunks)
    gradients = Work(count * (2 * size + 32.0), functions=count, kernels=6 * chunks)
    return product, losses, gradients


def _without_exponentials(gradients: Work) -> Work:
    """The passes that make gradients of logits where their exponentials are there: half of them."""
    return replace(
        gradients, num_bytes=gradients.num_bytes / 2, functions=0, kernels=gradients.kernels // 2
    )


def _opaque_call(node: fx.Node, _: str) -> NodeWork:
    """An opaque call: the products found when it was probed, and its operands read once."""
    read, written = _inputs(node), outputs(node)
    typed = next((m for m in (*written, *read) if m.dtype.is_floating_point), None)
    dtype = torch.float32 if typed is None else typed.dtype
    cost = cost_of(node)
    flops, saved_bytes, loop = float(cost.flops), cost.saved_bytes, cost.loop
    if loop is not None:
        pairs = zip(loop.traffic, (flops, 2 * flops), loop.kernels, strict=True)
        forward, backward = (Work(t, f, dtype, kernels=k) for t, f, k in pairs)
        return NodeWork((forward,), (backward,))
    forward = Work(_num_bytes(*read, *written) + saved_bytes, flops, dtype)
    gradients = _num_bytes(*read, *written, *_gradients(read))
    return NodeWork((forward,), (Work(gradients + saved_bytes, 2 * flops, dtype),))


def _embedding(node: fx.Node, _: str) -> NodeWork:
    """A look-up; its backward fills a gradient of the whole table, without any product."""
    table, indices = _tensor(node.args[0]), _tensor(node.args[1])
    (rows,) = outputs(node)
    scatter = (Work(_num_bytes(table)), Work(_num_bytes(indices) + 3 * rows.num_bytes))
    return NodeWork((Work(_num_bytes(indices) + 2 * rows.num_bytes),), scatter)


def _dropout_sharded(node: fx.Node, _: str) -> NodeWork:
    """Dropout by the rank's slice of a pattern that every rank draws whole."""
    (x,) = outputs(node)
    layout = _argument(node, 3, "layout")
    whole = 1 if layout is None else sum(layout[1]) // max(x.shape[layout[0]], 1)
    drawn = _size(x) * whole
    pattern = Work(drawn * (2 * x.dtype.itemsize + 1), randoms=drawn)
    mask = Work(2 * _size(x))
    passes = Work(2 * x.num_bytes + _size(x))
    return NodeWork((pattern, mask, passes), (passes,))


def _elementwise(node: fx.Node, kernels: _Kernels) -> NodeWork:
    read, written = _inputs(node), outputs(node)
    largest = max((*read, *written), key=_size, default=None)
    elements = 0 if largest is None else _size(largest)
    extra_bytes = [passes * _num_bytes(largest) for passes in kernels.passes]
    forward = Work(
        _read_bytes(node) + _num_bytes(*written) + extra_bytes[0],
        functions=elements if kernels.functions else 0.0,
        randoms=elements if kernels.draws else 0.0,
    )
    if kernels.gradient == "on":
        reduced = [meta for meta in _gradients(read) if _size(meta) < elements]
        return NodeWork((forward,), tuple(Work(_num_bytes(meta, *written)) for meta in reduced))
    backward = Work(
        _num_bytes(*read, *written, *_gradients(read)) + extra_bytes[1],
        functions=elements if kernels.functions > 1 else 0.0,
    )
    return NodeWork((forward,), (backward,))


_FILLS = "fill zero zeros_like ones_like full_like new_zeros new_ones new_full".split()

_ATTENTION_KERNELS = [
    f"_scaled_dot_product_{kernel}{way}"
    for kernel in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
    for way in ("", "_backward")
]

_FUNCTIONS_OF_BACKWARDS = [
    *(f"{name}_backward" for name in sorted(ACTIVATIONS)),
    *"_softmax _log_softmax _log_softmax_backward_data".split(),
]
"""Kernels that only graphs of backwards have, and what they read, which evaluate a function."""


def _table(*rows: tuple[Iterable[str], _Kernels]) -> Mapping[str, _Kernels]:
    return MappingProxyType({name: kernels for names, kernels in rows for name in names})


_KERNELS = _table(
    (GEMM_OPERANDS, _Kernels(_product, False)),
    (SEPARATE_GEMMS, _Kernels(_separate_products, False)),
    (("float8_linears",), _Kernels(_float8_linears, False)),
    (("_scaled_mm",), _Kernels(_scaled_product, False)),
    (RNNS, _Kernels(_recurrent, False)),
    (ATTENTIONS, _Kernels(_attention, False)),
    (("attend_ring",), _Kernels(_ring, False)),
    (("ring_attention",), _Kernels(_ring_there, False)),
    (("ring_attention_gradients",), _Kernels(_ring_back, False)),
    (("einsum",), _Kernels(_einsum, False)),
    (("bilinear",), _Kernels(_bilinear, False)),
    (("opaque_call",), _Kernels(_opaque_call, False)),
    (_ATTENTION_KERNELS, _Kernels(_attention_kernel, False)),
    (("convolution_backward",), _Kernels(_convolution_backward, False)),
    (("embedding_dense_backward",), _Kernels(_embedding_backward, False)),
    (("slice_backward", "select_backward", "diagonal_backward"), _Kernels(_piece_backward, False)),
    (("nll_loss_forward", "nll_loss2d_forward"), _Kernels(_nll, False)),
    (("nll_loss_backward", "nll_loss2d_backward"), _Kernels(_nll_backward, False)),
    (("index_put", "index_add", "scatter_add"), _Kernels(_scatter, False)),
    (("copy",), _Kernels(_copy)),
    (_FILLS, _Kernels(_fill)),
    (("embedding", "vocab_parallel_embedding"), _Kernels(_embedding, False)),
    # Log-probabilities are written and read; their sparse gradient is written, then spread.
    (CROSS_ENTROPIES, _Kernels(None, False, functions=2, passes=(2, 2))),
    # Shifted logits are written and read, twice; the gradient is computed in place.
    (("vocab_parallel_cross_entropy",), _Kernels(None, False, functions=2, passes=(4, 2))),
    (("chunked_cross_entropy", "chunked_token_cross_entropy"), _Kernels(_chunked_loss, False)),
    (("chunk_losses",), _Kernels(_chunk_losses, False)),
    (("chunk_gradients",), _Kernels(_chunk_gradients, False)),
    (("chunk_losses_and_gradients",), _Kernels(_chunk_losses_and_gradients, False)),
    (("scale_gradients",), _Kernels(_scaled, False)),
    (("chunked_rows",), _Kernels(_chunked_rows, False)),
    (("chunk_results",), _Kernels(_chunk_results, False)),
    (("chunk_results_gradients",), _Kernels(_chunk_results_gradients, False)),
    # Statistics first; the weight's gradient is a second pass.
    (("batch_norm",), _Kernels(passes=(1, 2))),
    (("layer_norm",), _Kernels(passes=(0, 2))),
    (("layer_norm_backward", "batch_norm_backward"), _Kernels(passes=(2, 0))),
    (ACTIVATIONS | {"cos", "log_softmax", "sin"}, _Kernels(functions=2)),
    ("erf exp log logsumexp sigmoid softmax tanh".split(), _Kernels(functions=1)),
    (_FUNCTIONS_OF_BACKWARDS, _Kernels(functions=1)),
    (DROPOUTS, _Kernels(draws=True, gradient="mask")),
    (("dropout_sharded",), _Kernels(_dropout_sharded, gradient="mask")),
    (("bernoulli",), _Kernels(draws=True)),
    (("add", "sub", "clone", "contiguous"), _Kernels(gradient="on")),
    (("mul", "div"), _Kernels(gradient="scale")),
    (CONVERSIONS | {"neg", "sum", "mean", "masked_fill"}, _Kernels(gradient="change")),
)
"""The one entry of every operator that has any."""
