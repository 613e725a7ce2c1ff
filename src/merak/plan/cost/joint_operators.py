"""Operators of a joint graph, described as those of a segment are, so that the same rules hold."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, Segment
from merak.graph.joint.derive import JointGraph, Layout
from merak.graph.joint.divide import Division, divide
from merak.graph.joint.parts import PartNodes, Parts, parts_of


@dataclass(frozen=True, slots=True)
class JointParts:
    """Parts of a segment's joint graph.

    Args:
        segment: whose graph it is.
        arguments: placeholders of the segment.
        division: of the graph, whose backward is whole.
        whole: parts of which the backward is whole.
        split: parts of which it leaves gradients of weights for later.
    """

    segment: Segment
    arguments: list[fx.Node]
    division: Division
    whole: Parts[PartNodes]
    split: Parts[PartNodes]

    def saved_bytes(self) -> dict[str, int]:
        """Bytes of what the forward saves, by the name of the segment's operator that makes it."""
        layouts = [node.meta["layout"] for node in self.division.saved]
        saved = {layout.storage for layout in layouts if layout is not None}
        saved -= {node.meta["layout"].storage for node in self.arguments}
        found: Counter[str] = Counter()
        for node in self.whole.forward.nodes:
            layout = node.meta["layout"]
            if layout is not None and layout.storage in saved:
                saved.remove(layout.storage)
                found[node.meta["origin"]] += layout.storage_bytes
        return dict(found)


def parts_of_segment(
    segment: Segment,
    joint: JointGraph,
    immediate: Collection[str] = (),
    keeps: Collection[str] = (),
) -> JointParts:
    """Parts of a segment's joint graph, whose nodes have `TensorMeta` in `meta["tensor"]`.

    Args:
        segment: whose joint graph it is.
        joint: the graph.
        immediate: names of parameters whose gradients are never left for later.
        keeps: names of the operators whose results are kept where others are recomputed.
    """
    deferrable = [
        number
        for number, node in enumerate(segment.graph.find_nodes(op="placeholder"))
        if node.meta["kind"] is Kind.PARAMETER and node.meta["name"] not in immediate
    ]
    division = divide(joint, keeps=keeps)
    whole = parts_of(joint, division)
    split = parts_of(joint, divide(joint, deferrable, keeps))
    for node in joint.graph.nodes:
        found = [_meta(node), *(_meta(u) for u in node.users if u.target is operator.getitem)]
        metas = tuple(meta for meta in found if meta is not None)
        node.meta["tensor"] = metas[0] if node.meta.get("layout") is not None else metas
    return JointParts(segment, joint.arguments, division, whole, split)


def _meta(node: fx.Node) -> TensorMeta | None:
    layout: Layout | None = node.meta.get("layout")
    return None if layout is None else TensorMeta(layout.shape, layout.dtype)
