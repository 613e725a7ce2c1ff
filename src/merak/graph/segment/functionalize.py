"""Functionalisation across segments: mutated tensors become values that are handed on.

A tensor that accumulates losses or log determinants all along a model would forbid every cut
between its first reader and its last mutation; and a buffer that one stage mutates would be stale
on the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.ir.mutation import find_mutations
from merak.graph.ir.operators import is_weight_gemm

aten = torch.ops.aten

_SUMS = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
}
"""Operators in place that accumulators are made with → those that make a new tensor."""


def release_accumulators(graph: fx.Graph) -> None:
    """Out-of-place accumulation around weight GEMMs, so that segments can be cut between.

    Args:
        graph: of the whole model; changed in place.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    gemms = list(accumulate(is_weight_gemm(node) for node in graph.nodes))
    writes = find_mutations(graph)
    for memory, writers in writes.writers.items():
        members = writes.members[memory]
        if not members or gemms[place[members[0]]] == gemms[place[writers[-1]]]:
            continue
        if all(_is_sum(writer) for writer in writers) and members[1:] == writers:
            _release(members[0], writers, place)


def _is_sum(node: fx.Node) -> bool:
    """Whether an in-place operator and its out-of-place variant give the same, dtype included."""
    if node.target not in _SUMS:
        return False
    operands = [n.meta["tensor"] for n in node.all_input_nodes]
    if not all(isinstance(meta, TensorMeta) for meta in operands):
        return False
    own = node.meta["tensor"]
    first = node.args[0]
    assert isinstance(first, fx.Node)
    same_type = all(meta.dtype == own.dtype for meta in operands)
    return same_type and own.dtype.is_floating_point and first.meta["tensor"].shape == own.shape


def _release(base: fx.Node, writers: Sequence[fx.Node], place: Mapping[fx.Node, int]) -> None:
    if base.op != "call_function":
        return
    states = (base, *writers)
    for state in states:
        for user in list(state.users):
            now = [one for one in states if place[one] < place[user]][-1]
            if now is not state:
                user.replace_input_with(state, now)
    for writer in writers:
        writer.target = _SUMS[writer.target]  # type: ignore[index]
        writer.meta["storage"] = None
    base.meta["storage"] = None


def functionalize_buffers(
    graph: fx.Graph, segments: Sequence[list[fx.Node]]
) -> list[list[fx.Node]]:
    """Values in place of mutated buffers, for the segments that read them later.

    Args:
        graph: of the whole model; changed in place.
        segments: the operators of each segment.

    Returns:
        The operators of each segment, with copies of such buffers where they are written.
    """
    index = {node: i for i, nodes in enumerate(segments) for node in nodes}
    made = [list(nodes) for nodes in segments]
    writes = find_mutations(graph)
    for memory, writers in writes.writers.items():
        last = writers[-1]
        if last not in index:
            continue
        for buffer in writes.members[memory]:
            if buffer.op != "placeholder" or buffer.meta["kind"] is not Kind.BUFFER:
                continue
            later = [n for n in buffer.users if index.get(n, -1) > index[last]]
            if later:
                copy = _copy_after(last, buffer)
                own = made[index[last]]
                own.insert(own.index(last) + 1, copy)
                for node in later:
                    node.replace_input_with(buffer, copy)
    return made


def _copy_after(writer: fx.Node, buffer: fx.Node) -> fx.Node:
    with writer.graph.inserting_after(writer):
        copy = writer.graph.call_function(aten.clone.default, (buffer,))
    copy.meta = {
        **{key: writer.meta.get(key, "") for key in ("module", "source")},
        "tensor": buffer.meta["tensor"],
        "storage": None,
    }
    return copy
