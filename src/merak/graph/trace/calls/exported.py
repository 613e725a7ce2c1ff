"""The result of `torch.export`, and names for its placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import LITERAL, Kind
from merak.graph.ir.state_read import StateRead
from merak.graph.trace.calls.eager_loss import EagerReplay
from merak.graph.trace.calls.replay import Replay
from merak.graph.trace.opaque.dynamic_region import DynamicSizes
from merak.graph.trace.state.left import LeftState


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model, and what its placeholders and outputs stand for.

    Args:
        graph: its operators, as exported.
        signature: what its placeholders and outputs stand for.
        constants: tensors that are neither parameters nor buffers, by their target.
        outputs: names of the model's outputs, in order.
        parameters: as of `Trace`.
        tied: as of `Trace`.
        columns: names of the batch's columns.
        num_conditions: as of `Trace`.
        sizes: policy for data-dependent sizes.
        reads: as of `Trace`.
        left: per call, as of `Trace`.
        thresholds: values to come of counters at which code may decide otherwise, by label.
        remade: buffers that forward has replaced by tensors of another shape.
        queried: as of `ModelGraph`.
        tensors: places of plain tensors that the model holds, by identity.
        buffers: the model's, by all of their names.
        replay: as of `Trace`.
    """

    graph: fx.Graph
    signature: torch.export.graph_signature.ExportGraphSignature
    constants: Mapping[str, Any]
    outputs: tuple[str, ...]
    parameters: dict[str, TensorMeta]
    tied: dict[str, str]
    columns: tuple[str, ...]
    num_conditions: int = 0
    sizes: DynamicSizes = DynamicSizes.REFUSED
    reads: tuple[StateRead, ...] = ()
    left: tuple[tuple[LeftState, ...], ...] = ((),)
    thresholds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    remade: tuple[str, ...] = ()
    queried: frozenset[str] = frozenset()
    tensors: Mapping[int, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    replay: Replay | EagerReplay | None = None


def lift(exported: Exported) -> dict[str, torch.Tensor]:
    """Name the placeholders after what they stand for, and drop outputs that are not the user's.

    Returns:
        The tensors that are neither parameters nor buffers, by name.

    Raises:
        TraceError: one of these is a meta tensor, or changes from step to step.
    """
    signature, graph, tied = exported.signature, exported.graph, exported.tied
    constants: dict[str, torch.Tensor] = {}
    columns = iter(exported.columns)
    specs = {spec.arg.name: spec for spec in signature.input_specs}
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        target = (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.USER_INPUT:
            node.meta |= {"kind": Kind.COLUMN, "name": next(columns)}
        elif spec.kind == InputKind.PARAMETER:
            node.meta |= {"kind": Kind.PARAMETER, "name": tied.get(target, target)}
        else:
            if spec.kind == InputKind.CONSTANT_TENSOR:
                constant = exported.constants[spec.target or ""]
                # Its place in all graphs of the model; a tensor that forward makes has none.
                target = exported.tensors.get(id(constant), f"{LITERAL}{target}")
                constants[target] = _with_values(target, constant)
            node.meta |= {"kind": Kind.BUFFER, "name": target}
    _keep_user_outputs(graph, signature)
    _merge_placeholders(graph)
    return constants


def _with_values(name: str, constant: Any) -> torch.Tensor:
    if not isinstance(constant, torch.Tensor) or constant.is_meta:
        raise TraceError(
            f"the model reads the tensor {name}, which is no parameter or buffer and has no "
            "values; register it with register_buffer."
        )
    return constant


def _keep_user_outputs(
    graph: fx.Graph, signature: torch.export.graph_signature.ExportGraphSignature
) -> None:
    (output,) = graph.find_nodes(op="output")
    wanted = set(signature.user_outputs)
    user_outputs = [n for n in output.args[0] if isinstance(n, fx.Node) and n.name in wanted]
    by_name = {n.name: n for n in user_outputs}
    output.args = (tuple(by_name[str(name)] for name in signature.user_outputs),)


def _merge_placeholders(graph: fx.Graph) -> None:
    """Merge placeholders of one parameter, column or buffer."""
    first: dict[tuple[Kind, str], fx.Node] = {}
    for node in list(graph.find_nodes(op="placeholder")):
        known = first.setdefault((node.meta["kind"], node.meta["name"]), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
