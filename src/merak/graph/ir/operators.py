"""Families of operators, by what they compute."""

from __future__ import annotations

from torch import fx

from merak.graph.ir.ir import Kind


def is_weight_gemm(node: fx.Node) -> bool:
    """Whether the operator multiplies by a parameter (seen through views of it)."""
    if _family(node) not in _GEMMS:
        return False
    return any(_is_parameter(source) for source in node.all_input_nodes)


def reads_parameter(node: fx.Node) -> bool:
    """Whether the operator reads a parameter directly."""
    return any(
        s.op == "placeholder" and s.meta["kind"] is Kind.PARAMETER for s in node.all_input_nodes
    )


def is_embedding(node: fx.Node) -> bool:
    """Whether the operator looks rows of a parameter up."""
    return _family(node) in ("aten.embedding", "aten.embedding_bag") and reads_parameter(node)


_GEMMS = frozenset(
    f"aten.{name}"
    for name in (
        "linear",
        "addmm",
        "mm",
        "bmm",
        "baddbmm",
        "matmul",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "convolution",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "bilinear",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "_grouped_mm",
    )
) | {"transformers.grouped_mm_fallback"}


_VIEWS = frozenset(
    f"aten.{name}"
    for name in "t numpy_T transpose permute swapaxes view reshape to unsqueeze contiguous".split()
)


def _is_parameter(node: fx.Node) -> bool:
    while node.op == "call_function" and _family(node) in _VIEWS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node.op == "placeholder" and node.meta["kind"] is Kind.PARAMETER


def _family(node: fx.Node) -> str:
    """The operator's name without its overload: aten.add for aten.add.Tensor."""
    return str(node.target).rpartition(".")[0]
