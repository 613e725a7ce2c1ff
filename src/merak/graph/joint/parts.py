"""Parts of a joint graph: what each reads, runs and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, cast

from torch import fx

from merak.graph.joint.derive import Given, JointGraph
from merak.graph.joint.divide import Division

Kind = TypeVar("Kind")
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class PartNodes:
    """Nodes of a part.

    Args:
        reads: whose values it is given, in order.
        nodes: operators that it runs, in order.
        results: whose values it gives.
        accumulated: by the node that yields a gradient, the parameters (by number) that it is
            added to, and whether nobody else has its memory. The parameters are given behind
            `reads`.
    """

    reads: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    accumulated: Mapping[fx.Node, list[tuple[int, bool]]] = field(default_factory=dict)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Numbers of the parameters that gain a gradient, in order."""
        return tuple(sorted({n for found in self.accumulated.values() for n, _ in found}))

    def last_uses(self) -> dict[fx.Node, fx.Node | None]:
        """The node after which each value is dropped; None for results, nothing for unused ones."""
        last: dict[fx.Node, fx.Node | None] = {}
        for node in self.nodes:
            last[node] = node
            for argument in node.all_input_nodes:
                last[argument] = node
        return last | dict.fromkeys(self.results)


@dataclass(frozen=True, slots=True)
class Parts(Generic[Kind]):
    """The parts of a segment for some layouts and gradients: their nodes, or functions.

    Args:
        given: gradients that the backward is given.
        forward: arguments → outputs, then what is saved.
        plain: arguments → outputs, then what is kept for a recomputation.
        recompute: arguments, then what was kept → what is saved.
        backward: (arguments of `reads`, later sums, gradients of outputs, what is saved, parameters
            of `parameters`) → gradients of `inputs`, then what `weights` reads; the parameters gain
            theirs.
        weights: where the backward is split, (arguments of `weight_reads`, what the backward gives
            for it, parameters of `weight_parameters`) → nothing; the parameters gain theirs.
        saved: names of what is saved.
        reads: numbers of the arguments that the backward reads.
        parameters: numbers of the parameters that have a gradient.
        inputs: numbers of the inputs that have one.
        weight_reads: numbers of the arguments that `weights` reads.
        weight_parameters: numbers of the parameters that gain their gradient from it.
        carries: per output, whether a gradient goes back through it.
    """

    given: Given
    forward: Kind
    plain: Kind
    recompute: Kind
    backward: Kind
    weights: Kind | None
    saved: tuple[str, ...]
    reads: tuple[int, ...]
    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    weight_reads: tuple[int, ...]
    weight_parameters: tuple[int, ...]
    carries: tuple[bool, ...]

    def map(self, change: Callable[[Kind], Other]) -> Parts[Other]:
        """The same with what is made of each part."""
        weights = None if self.weights is None else change(self.weights)
        changed = {
            name: change(getattr(self, name))
            for name in ("forward", "plain", "recompute", "backward")
        }
        found: Any = replace(self, **changed, weights=weights)  # type: ignore[arg-type]
        return cast("Parts[Other]", found)


def parts_of(joint: JointGraph, division: Division) -> Parts[PartNodes]:
    """Nodes of the parts of a joint graph.

    Args:
        joint: the graph.
        division: of it.
    """
    of_inputs = {n: g for n, g in joint.gradients.items() if n in joint.inputs}
    of_parameters = {n: g for n, g in joint.gradients.items() if n not in joint.inputs}
    later = {n: g for n, g in of_parameters.items() if n in division.deferred}
    now = {n: g for n, g in of_parameters.items() if n not in division.deferred}
    results = (*(joint.gradients[n] for n in of_inputs), *division.held)
    reads = _reads(joint, division.backward, [*results, *now.values()])
    weight_reads = _reads(joint, division.weights, later.values())
    given = (
        *(joint.arguments[number] for number in reads),
        *joint.later.values(),
        *joint.tangents.values(),
        *division.saved,
    )
    held = (*(joint.arguments[number] for number in weight_reads), *division.held)
    arguments, outputs, again = tuple(joint.arguments), joint.outputs, division.recomputation
    first = tuple(again.instead.get(node, node) for node in (*outputs, *again.kept))
    weights = PartNodes(held, division.weights, (), _accumulated(joint, later))
    return Parts(
        given=joint.given,
        forward=PartNodes(arguments, division.forward, (*outputs, *division.saved)),
        plain=PartNodes(arguments, again.first, first),
        recompute=PartNodes((*arguments, *again.kept), again.nodes, division.saved),
        backward=PartNodes(given, division.backward, results, _accumulated(joint, now)),
        weights=weights if later else None,
        saved=tuple(node.name for node in division.saved),
        reads=reads,
        parameters=tuple(sorted(now)),
        inputs=tuple(of_inputs),
        weight_reads=weight_reads,
        weight_parameters=tuple(sorted(later)),
        carries=joint.carries,
    )


def _reads(
    joint: JointGraph, nodes: Iterable[fx.Node], results: Iterable[fx.Node]
) -> tuple[int, ...]:
    """Numbers of the arguments that some nodes read, or that are among their results."""
    read = {n for node in nodes for n in node.all_input_nodes} | {*results}
    return tuple(number for number, node in enumerate(joint.arguments) if node in read)


def _accumulated(
    joint: JointGraph, gradients: Mapping[int, fx.Node]
) -> dict[fx.Node, list[tuple[int, bool]]]:
    """By node, the parameters that a gradient is added to, and whether it may become theirs."""
    found: dict[fx.Node, list[tuple[int, bool]]] = {}
    holders = [
        *joint.arguments,
        *joint.later.values(),
        *joint.tangents.values(),
        *joint.outputs,
        *joint.gradients.values(),
    ]
    storages = [node.meta["layout"].storage for node in holders]
    for number, node in gradients.items():
        layout = node.meta["layout"]
        is_whole = layout.storage_bytes == layout.num_bytes
        owned = storages.count(layout.storage) == 1 and is_whole
        found.setdefault(node, []).append((number, owned))
    return found
