"""Compiled segments: `torch.compile` of the operators between what Merak adds to them.

A segment's graph has plain operators of torch, and functions of Merak's own between them:
collectives, operators whose results are saved or deferred, code that runs as it is. Every run of
plain operators becomes a module that torch compiles, forward and backward, when it is first called;
the equal layers of a model share one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.structure import Structure, structure_of_graph

INDUCTOR = "inductor"
"""torch's default backend, the one that has modes."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """Options with which `torch.compile` compiles segments.

    Args:
        backend: of torch, by name.
        mode: of the backend "inductor"; None for its default.
    """

    backend: str = INDUCTOR
    mode: str | None = None


class TorchCompiler:
    """Compiles modules by `torch.compile`: one for all that have the same structure.

    A module has no tensors: parameters, buffers and constants are arguments of its call.

    Args:
        how: they are compiled.
    """

    def __init__(self, how: Compilation) -> None:
        self.how = how
        self._made: WeakValueDictionary[tuple[Structure, Hashable], torch.nn.Module]
        self._made = WeakValueDictionary()

    def compile(self, module: fx.GraphModule, layouts: Hashable = None) -> torch.nn.Module:
        """Compiled module, as long as somebody has it the same for an equal graph.

        Args:
            module: without tensors, whose graph no longer changes.
            layouts: of what it is called with, where the graph does not say.
        """
        key = structure_of_graph(module.graph), layouts
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _compile(module, self.how)
        return made


def compiled(graph: fx.Graph, compiler: TorchCompiler) -> Callable[..., Any]:
    """Function that runs a graph, whose runs of plain operators are compiled.

    Args:
        graph: of a segment.
        compiler: of the runs.
    """
    number, was_plain = 0, False
    runs: dict[fx.Node, int] = {}
    plain: set[int] = set()
    for node in graph.nodes:
        is_plain = was_plain if _indexes_result(node) else _is_plain(node)
        number += is_plain is not was_plain
        was_plain = is_plain
        runs[node] = number
        if is_plain:
            plain.add(number)
    whole = fx.GraphModule(torch.nn.Module(), graph)
    split = split_module(whole, whole, runs.__getitem__, keep_original_order=True)
    for name, module in list(split.named_children()):
        if int(name.removeprefix("submod_")) in plain:
            setattr(split, name, compiler.compile(cast("fx.GraphModule", module)))
    return split.forward


def _is_plain(node: fx.Node) -> bool:
    """Whether torch may compile an operator: one of torch's that mutates nothing."""
    return isinstance(node.target, torch._ops.OpOverload) and not mutated_arguments(node)


def _indexes_result(node: fx.Node) -> bool:
    """Whether a node picks one of an operator's results, or computes with numbers."""
    return getattr(node.target, "__module__", "") == operator.getitem.__module__


def _compile(module: torch.nn.Module, how: Compilation) -> torch.nn.Module:
    made: Any
    if how.backend == INDUCTOR:
        # Draws are those of the layout-independent random state. Tensors of one microbatch outlive
        # the next call, which the memory of CUDA graphs would not allow.
        options = {
            **(_all_modes()[how.mode] if how.mode else {}),
            "fallback_random": True,
            "triton.cudagraphs": False,
        }
        made = torch.compile(module, backend=INDUCTOR, options=options, dynamic=False)
    else:
        made = torch.compile(module, backend=how.backend, dynamic=False)
    return cast("torch.nn.Module", made)


def compile_backends() -> Sequence[str]:
    """Names of the backends of `torch.compile` that are installed."""
    return torch.compiler.list_backends(exclude_tags=())


def compile_modes() -> Sequence[str]:
    """Names of the modes of the backend "inductor"."""
    return sorted(_all_modes())


def _all_modes() -> dict[str, dict[str, Any]]:
    from torch._inductor import list_mode_options  # takes a second, which most jobs do not need

    return list_mode_options()
