"""Operator families: the one table that every list of operators in Merak is taken from.

A family is a set of operator names as `family` gives them: "add" for `aten.add.Tensor`. Code that
works on several families combines them with `|`; a family grows here, and nowhere else. Names with
a trailing underscore work in place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind

_KNOWN = frozenset(("aten", "prims", "merak", "transformers"))
"""Libraries whose operators are known by name."""


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Matrix products

LINEARS = _names("linear addmm")
"""GEMMs of a matrix of weights and a bias."""

MATMULS = _names("mm bmm matmul")

EXPERT_GEMMS = _names("grouped_mm_rows grouped_mm_fallback_rows")
"""Of grouped products, those of a rank that has some of the groups' weights."""

GROUPED_GEMMS = _names("_grouped_mm grouped_mm_fallback") | EXPERT_GEMMS
"""Rows in groups, each group with a weight of its own, as of experts."""

SEPARATE_GEMMS = _names("grouped_linear grouped_linear_rows own_grouped_linear")
"""Rows in groups, as of experts, whose weights are a list and not one stack."""

SEPARATE_EXPERTS = SEPARATE_GEMMS | _names("grouped_values grouped_values_rows own_grouped_values")
"""Operators that read a parameter of each expert: (rows, parameters, offsets, skips_idle, …)."""

CONVOLUTIONS = _names("conv1d conv2d conv3d")

TRANSPOSED_CONVOLUTIONS = _names("conv_transpose1d conv_transpose2d conv_transpose3d")

RNNS = _names("lstm gru rnn_tanh rnn_relu")

DENSE_GEMMS = LINEARS | MATMULS | {"baddbmm"}
"""Products of plain matrices, or of batches of them."""

GEMMS = (
    DENSE_GEMMS
    | GROUPED_GEMMS
    | SEPARATE_GEMMS
    | CONVOLUTIONS
    | TRANSPOSED_CONVOLUTIONS
    | RNNS
    | {"convolution", "einsum", "bilinear"}
)


@dataclass(frozen=True, slots=True)
class Operands:
    """Positions of a GEMM's operands among its arguments.

    Args:
        x: of the activation.
        weight: of what it is multiplied with.
        bias: of the summand; None where there is none.
    """

    x: int
    weight: int
    bias: int | None


GEMM_OPERANDS: Mapping[str, Operands] = MappingProxyType(
    {
        "linear": Operands(0, 1, 2),
        **dict.fromkeys(("addmm", "baddbmm"), Operands(1, 2, 0)),
        **dict.fromkeys(MATMULS | GROUPED_GEMMS, Operands(0, 1, None)),
        **dict.fromkeys(
            CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS | {"convolution"}, Operands(0, 1, 2)
        ),
    }
)
"""Operands of the GEMMs that multiply two tensors."""


# Operators that move elements

RESHAPES = _names("view reshape _unsafe_view flatten unflatten")

SHAPED_LIKE = _names("view_as reshape_as")

SWAPS = _names("t transpose swapaxes swapdims")
"""Transpositions of two dims."""

TRANSPOSES = SWAPS | _names("mT mH adjoint movedim moveaxis numpy_T permute")

SQUEEZES = _names("squeeze unsqueeze")

CONVERSIONS = _names("to _to_copy")
"""Changes of dtype or device."""

COPIES = _names("contiguous clone alias")

SAME_VALUES = COPIES | CONVERSIONS | {"detach"}
"""Operators that yield their operand's values in its shape."""

EXPANDS = _names("expand expand_as broadcast_to")

SPLITS = _names("split split_with_sizes chunk tensor_split unbind")

NARROWS = _names("slice narrow")

PADS = _names("pad constant_pad_nd")

CONCATENATIONS = _names("cat concat")


# Operators that make or fill tensors

FILLS_LIKE = _names("zeros_like ones_like full_like empty_like")
"""New tensors of an operand's shape."""

FILLS_NEW = _names("new_zeros new_ones new_full new_empty")
"""New tensors of a given shape, of an operand's dtype."""

FILLS_SHAPE = _names("zeros ones full empty")
"""New tensors of a given shape."""

RANDOM_LIKE = _names("rand_like randn_like")

UNINITIALIZED = _names("empty empty_like empty_strided new_empty new_empty_strided")
"""New tensors that hold whatever the memory held."""

OVERWRITES = _names(
    "fill_ zero_ copy_ normal_ uniform_ bernoulli_ exponential_ random_ log_normal_ cauchy_ "
    "geometric_ _no_grad_trunc_normal_"
)
"""Operators whose first argument ends up with nothing of what it held before."""

INDEXED_WRITES = _names(
    "index_add_ index_copy_ index_fill_ index_put_ index_reduce_ masked_fill_ masked_scatter_ "
    "put_ scatter_ scatter_add_ scatter_reduce_"
)
"""Operators that write some elements, and yield the shape and dtype of what they write into."""

DROPOUTS = _names("dropout alpha_dropout feature_dropout feature_alpha_dropout")
"""Dropouts, with the arguments p and train."""


# Operators that compute

COMPARISONS = _names("eq ne lt le gt ge")

LOGICAL = _names("logical_not logical_and logical_or bitwise_not bitwise_and bitwise_or")

ACTIVATIONS = _names("celu elu gelu log_sigmoid mish silu softplus")

SOFTMAXES = _names("softmax log_softmax _softmax _log_softmax _safe_softmax")

CUMULATIVE = _names("cumsum cumprod")

REDUCTIONS = _names("sum mean amax amin max min var std all any logsumexp prod")

NORMS = _names("layer_norm rms_norm")
"""Norms of each token by itself."""

UNDECLARED_STATISTICS: Mapping[str, int] = MappingProxyType(
    {"batch_norm": 5, "instance_norm": 5, "native_batch_norm": 5}
)
"""Norms that update running statistics though no schema says so → the argument that asks for it."""

BATCH_NORMS = UNDECLARED_STATISTICS.keys() | _names(
    "_native_batch_norm_legit _batch_norm_with_update sharded_batch_norm"
)
"""Norms over the samples of a batch."""

RUNNING_STATISTICS = (3, 4)
"""The arguments of `BATCH_NORMS` that are their running mean and variance."""

POOLS = _names(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
    "max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
)

RESIZES = _names(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa"
)

MIRRORS = _names(
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d"
)
"""Padding by pixels that are there."""

EMBEDDINGS = _names("embedding embedding_bag")

CROSS_ENTROPIES = _names("cross_entropy_loss")

NLL_LOSSES = _names("nll_loss nll_loss_nd nll_loss2d")

CLASS_LOSSES = CROSS_ENTROPIES | NLL_LOSSES
"""Losses of scores of classes, with a target for each position."""

ATTENTIONS = _names("scaled_dot_product_attention attend_sharded")

ASSERTIONS = _names(
    "_assert_tensor_metadata _assert_scalar _assert_async sym_constrain_range "
    "sym_constrain_range_for_size"
)


def family(target: Any) -> str:
    """The name of an operator without its overload: "add" for aten.add.Tensor.

    One of a library that is not known here has the library before its name: what a user calls
    mine::linear need not be torch's linear.
    """
    if isinstance(target, torch._ops.OpOverload):
        return _operator_family(target)
    return str(getattr(target, "__name__", target))


def multiplies_groups(node: fx.Node) -> bool:
    """Whether a node is a grouped product in the form that takes every type and width."""
    return node.op == "call_function" and family(node.target) == "grouped_mm_fallback"


def room_for_documents(node: fx.Node) -> int:
    """Room for the documents of attention with a mask of causality and documents; 0 for others."""
    mask, dropout_p = _mask_of(node)
    meta = None if mask is None or dropout_p else mask.meta.get("tensor")
    return meta.documents if isinstance(meta, TensorMeta) else 0


def chooses_kernel(node: fx.Node) -> bool:
    """Whether attention has a mask of documents, or a mask over shared heads of keys and values.

    Kernels of a GPU that read a mask share none: `attend_packed` runs the best there is.
    """
    mask, dropout_p = _mask_of(node)
    shares = mask is not None and not dropout_p and bool(node.kwargs.get("enable_gqa"))
    return shares or room_for_documents(node) > 0


def _mask_of(node: fx.Node) -> tuple[fx.Node | None, Any]:
    """The mask of torch's attention, and its dropout."""
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return None, 0.0
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    mask = given.get("attn_mask")
    return mask if isinstance(mask, fx.Node) else None, given.get("dropout_p", 0.0)


@cache
def _operator_family(target: torch._ops.OpOverload) -> str:
    name = str(target._schema.name)
    return name.rpartition("::")[2] if target.namespace in _KNOWN else name


def aten_family(target: Any) -> str:
    """The name of an operator of torch's own; "" for any other function."""
    is_aten = isinstance(target, torch._ops.OpOverload) and target.namespace == "aten"
    return family(target) if is_aten else ""


def draws(target: Any) -> bool:
    """Whether a function is an operator that torch knows to draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_pointwise(target: Any) -> bool:
    """Whether a function is an operator that torch knows to compute each element by itself."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def is_known(target: torch._ops.OpOverload) -> bool:
    """Whether an operator's library is one whose operators are known by name."""
    return target.namespace in _KNOWN


def is_weight_gemm(node: fx.Node) -> bool:
    """Whether the operator multiplies by a parameter, or by what is computed of parameters."""
    if node.op != "call_function" or family(node.target) not in GEMMS:
        return False
    if any(_is_parameter(source) for source in node.all_input_nodes):
        return True
    return len({_is_of_parameters(source) for source in node.all_input_nodes}) > 1


def reads_parameter(node: fx.Node) -> bool:
    """Whether the operator reads a parameter directly."""
    return any(
        s.op == "placeholder" and s.meta["kind"] is Kind.PARAMETER for s in node.all_input_nodes
    )


def is_embedding(node: fx.Node) -> bool:
    """Whether the operator looks rows of a parameter up."""
    is_lookup = node.op == "call_function" and family(node.target) in EMBEDDINGS
    return is_lookup and reads_parameter(node)


_WEIGHT_VIEWS = RESHAPES | TRANSPOSES | SQUEEZES | SAME_VALUES
"""Operators through which a weight is still that weight."""


def _is_parameter(node: fx.Node) -> bool:
    while node.op == "call_function" and family(node.target) in _WEIGHT_VIEWS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER


_MOST_STEPS = 64
"""How many operators a weight may be behind its parameters."""


def _is_of_parameters(node: fx.Node) -> bool:
    """Whether a value is computed in few steps of parameters and buffers alone."""
    seen, todo = {node}, [node]
    while todo and len(seen) <= _MOST_STEPS:
        own = todo.pop()
        if own.op == "placeholder" and own.meta["kind"] not in (Kind.PARAMETER, Kind.BUFFER):
            return False
        new = set(own.all_input_nodes) - seen
        seen |= new
        todo += new
    return not todo and any(n.meta.get("kind") is Kind.PARAMETER for n in seen)


def weights_only(graph: fx.Graph, *, constants: bool = False) -> set[fx.Node]:
    """Nodes that depend on parameters and buffers alone.

    Args:
        graph: of a segment.
        constants: whether those count that depend on nothing.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            inside = node.meta["kind"] in (Kind.PARAMETER, Kind.BUFFER)
        else:
            read = node.all_input_nodes
            inside = (constants or bool(read)) and all(n in found for n in read)
        if inside:
            found.add(node)
    return found


def is_aten_alone(graph: fx.Graph) -> bool:
    """Whether a graph calls torch's own operators alone, which know nothing of other ranks."""
    return all(
        is_aten_operator(node) for node in graph.nodes if node.op not in ("placeholder", "output")
    )


def is_aten_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch's own, or picks one of its results."""
    is_own = getattr(node.target, "namespace", None) in ("aten", "prims")
    return is_own or node.target in (operator.getitem, torch._C._set_grad_enabled)
