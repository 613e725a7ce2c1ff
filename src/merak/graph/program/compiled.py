"""Compiled segments: `torch.compile` of the operators between what Merak adds to them.

These are evaluations, and segments whose backward autograd runs; others are compiled part by part
(`merak.graph.joint.compiled`). Every run of operators that torch may compile becomes a module that
it compiles, with its backward where there is one, when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.joint.compiled import compilable_runs


def compiled(graph: fx.Graph, compiler: TorchCompiler) -> Callable[..., Any]:
    """Function that runs a graph, whose compilable runs of operators are compiled.

    Args:
        graph: of a segment.
        compiler: of the runs.
    """
    operators = (node for node in graph.nodes if node.op == "call_function")
    number_of: dict[fx.Node, int] = {}
    compilable: set[int] = set()
    for number, (is_compilable, run) in enumerate(compilable_runs(operators)):
        number_of |= dict.fromkeys(run, number)
        if is_compilable:
            compilable.add(number)
    whole = fx.GraphModule(torch.nn.Module(), graph)
    split = split_module(whole, whole, number_of.__getitem__, keep_original_order=True)
    for name, module in list(split.named_children()):
        if int(name.removeprefix("submod_")) in compilable:
            setattr(split, name, compiler.compile(cast("fx.GraphModule", module)))
    return split.forward
