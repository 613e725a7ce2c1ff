"""Compiled parts: runs of torch's operators in a part become functions that torch compiles.

What mutates or draws, and what is not torch's own, such as collectives, runs between them as it is.
So a part is compiled for every schedule, recomputation and level of ZeRO alike.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.joint.clean import has_effect, is_view
from merak.graph.joint.parts import PartNodes

_FEWEST = 2
"""Operators of a run that are worth compiling, beside views."""


def compile_part(part: PartNodes, compiler: TorchCompiler) -> PartNodes:
    """Part whose runs of torch's operators are compiled.

    Args:
        part: stays as it is.
        compiler: of the runs.
    """
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in part.reads:
        known[node] = graph.placeholder(node.name)
        known[node].meta = dict(node.meta)
    shared: set[fx.Node] = set()
    for is_compilable, run in compilable_runs(part.nodes, _fills_to_write(part.nodes)):
        computes = (not is_view(n) and n.target is not operator.getitem for n in run)
        if not is_compilable or sum(computes) < _FEWEST:
            for node in run:
                known[node] = graph.node_copy(node, known.__getitem__)
            continue
        inputs, outputs = _inputs(run), _outputs(run, part)
        call = _compiled(run, inputs, outputs, compiler)
        made = graph.call_function(call, tuple(known[node] for node in inputs))
        made.meta = {"layout": None}
        for number, node in enumerate(outputs):
            known[node] = graph.call_function(operator.getitem, (made, number))
            known[node].meta = dict(node.meta)
        shared |= _equal_nodes(run)
    return PartNodes(
        tuple(known[node] for node in part.reads),
        tuple(node for node in graph.nodes if node.op == "call_function"),
        tuple(known[node] for node in part.results),
        {
            known[node]: [(n, owned and node not in shared) for n, owned in found]
            for node, found in part.accumulated.items()
        },
    )


def _fills_to_write(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Operators whose new memory is written into, such as a mask that is drawn.

    A compiler may give one tensor for two that read nothing and are filled alike.
    """
    written = {n.meta["layout"].storage for node in nodes for n in mutated_arguments(node)}
    fills = (node for node in nodes if not node.all_input_nodes and node.meta["layout"] is not None)
    return {node for node in fills if node.meta["layout"].storage in written}


def compilable_runs(
    nodes: Iterable[fx.Node], stay: Container[fx.Node] = ()
) -> Iterator[tuple[bool, list[fx.Node]]]:
    """Operators in order, in runs that torch may compile and runs that stay as they are.

    Torch may compile operators that mutate and draw nothing, and what picks one of their results.

    Args:
        nodes: the operators.
        stay: of them, those that stay as they are all the same.

    Returns:
        Each run, and whether torch may compile it.
    """
    run: list[fx.Node] = []
    was_compilable = False
    for node in nodes:
        is_compilable = isinstance(node.target, torch._ops.OpOverload) and not has_effect(node)
        is_compilable = is_compilable and node not in stay
        if node.target is operator.getitem and node.args[0] in run:
            is_compilable = was_compilable
        if run and is_compilable is not was_compilable:
            yield was_compilable, run
            run = []
        run.append(node)
        was_compilable = is_compilable
    if run:
        yield was_compilable, run


def _inputs(run: Sequence[fx.Node]) -> list[fx.Node]:
    own = set(run)
    read = dict.fromkeys(argument for node in run for argument in node.all_input_nodes)
    return [node for node in read if node not in own]


def _outputs(run: Sequence[fx.Node], part: PartNodes) -> list[fx.Node]:
    """Values of a run that the rest of the part reads, or gives."""
    own = set(run)
    read = {n for node in part.nodes if node not in own for n in node.all_input_nodes}
    read |= {*part.results, *part.accumulated}
    return [node for node in run if node in read]


def _compiled(
    run: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    compiler: TorchCompiler,
) -> Callable[..., Any]:
    """Function of a run's inputs that gives its outputs."""
    graph = fx.Graph()
    known = {node: graph.placeholder(f"v{number}") for number, node in enumerate(inputs)}
    for number, node in enumerate(run):
        copy = known[node] = graph.node_copy(node, known.__getitem__)
        copy.name, copy.meta = f"o{number}", {}
    graph.output(tuple(known[node] for node in outputs))
    layouts = tuple(_layout(node) for node in inputs)
    module = fx.GraphModule(torch.nn.Module(), graph)
    made = compiler.compile(module, layouts)

    def compiled_run(*args: Any) -> Any:
        # On tensors without memory, as a step that was given up runs on, nothing is compiled.
        return (made if _get_current_dispatch_mode() is None else module)(*args)

    return compiled_run


def _layout(node: fx.Node) -> Hashable:
    found = node.meta["layout"]
    return None if found is None else (found.shape, found.stride, found.dtype, str(found.device))


def _equal_nodes(run: Sequence[fx.Node]) -> set[fx.Node]:
    """Operators of a run that compute the same as another one, whose result may be theirs."""
    numbers: dict[Any, int] = {}
    of: dict[fx.Node, int] = {}
    for node in run:
        args = fx.map_arg((node.args, tuple(node.kwargs.items())), lambda n: of.get(n, n))
        of[node] = numbers.setdefault((node.target, repr(args)), len(numbers))
    counts = Counter(of.values())
    return {node for node in run if counts[of[node]] > 1}
