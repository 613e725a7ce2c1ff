"""Equations of `torch.einsum`, as a label for every dim."""

from __future__ import annotations

from torch import fx

from merak.core.tensor_meta import TensorMeta

Labels = tuple[str, ...]


def einsum_labels(node: fx.Node) -> tuple[list[Labels], Labels] | None:
    """Labels of the dims of an einsum's operands, and of its result.

    Dims that an ellipsis stands for get labels of their own, counted from behind, as they
    broadcast. Labels that the result leaves out are summed over.

    Returns:
        The labels; None where an operand has a letter twice: it is a diagonal.
    """
    equation, tensors = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(tensors, (list, tuple))
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = []
    for term, tensor in zip(left.split(","), tensors, strict=True):
        assert isinstance(tensor, fx.Node) and isinstance(tensor.meta["tensor"], TensorMeta)
        terms.append(_labels(term, len(tensor.meta["tensor"].shape)))
    if any(len(set(labels)) < len(labels) for labels in terms):
        return None
    num_hidden = max(sum(len(label) > 1 for label in labels) for labels in terms)
    if arrow:
        return terms, _labels(right, num_hidden + len(right.replace("...", "")))
    every = [label for labels in terms for label in labels]
    hidden = _labels("...", num_hidden)
    return terms, (*hidden, *sorted(c for c in every if every.count(c) == 1 and len(c) == 1))


def _labels(term: str, num_dims: int) -> Labels:
    """Labels of so many dims, of which those that no letter stands for are in an ellipsis."""
    before, ellipsis, after = term.partition("...")
    num_hidden = num_dims - len(before) - len(after) if ellipsis else 0
    return (*before, *(f"...{place}" for place in range(num_hidden, 0, -1)), *after)
