"""Names of segments by what they compute, by which measured times find them again."""

from __future__ import annotations

import hashlib
import re

from torch import fx

from merak.graph.ir.ir import Kind
from merak.graph.ir.structure import structural_key
from merak.plan.cost.operators import outputs

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def segment_digest(graph: fx.Graph) -> str:
    """Digest that is equal for graphs that differ in names alone, in any process."""
    return _digest(structural_key(graph))


def segment_kind(graph: fx.Graph) -> str:
    """Digest of a graph's operators and parameters, equal for all sizes of a microbatch."""
    return _digest(
        [
            (
                node.op,
                node.target if node.op == "call_function" else "",
                node.meta.get("kind"),
                node.meta["tensor"] if node.meta.get("kind") is Kind.PARAMETER else "",
                [(len(meta.shape), meta.dtype) for meta in outputs(node)],
            )
            for node in graph.nodes
        ]
    )


def segment_size(graph: fx.Graph) -> float:
    """Bytes of all values of a graph, by which times of one kind are interpolated."""
    return float(sum(meta.num_bytes for node in graph.nodes for meta in outputs(node)))


def _digest(content: object) -> str:
    text = _ADDRESS.sub("", repr(content))
    return hashlib.sha256(text.encode()).hexdigest()[:24]
