"""Compiled segments: `torch.compile` of the operators between what Merak adds to them.

These are evaluations, and segments whose backward autograd runs; others are compiled part by part
(`merak.graph.joint.compiled`). A segment's graph has plain operators of torch, and functions of
Merak's own between them: collectives, operators whose results are saved, code that runs as it is.
Every run of plain operators becomes a module that torch compiles, with its backward where there is
one, when it is first called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.torch_compiler import TorchCompiler


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
