"""A segment whose forward and backward are a graph: the functions that the engine calls.

Its joint graph belongs to the layouts of what it reads and to the gradients that its backward is
given, so it is derived when these are first met. Equal segments, such as blocks, share one.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from merak.core.gradients import accumulate
from merak.core.mesh import Mesh, current_mesh, has_mesh, pretended
from merak.graph.ir.custom_operators import Role, role_of
from merak.graph.ir.ir import Kind
from merak.graph.ir.operators import (
    SEPARATE_EXPERTS,
    SEPARATE_GEMMS,
    family,
    is_aten_operator,
    multiplies_groups,
)
from merak.graph.ir.structure import Structure, structure_of_graph
from merak.graph.ir.torch_compiler import TorchCompiler
from merak.graph.joint.all_reduces import start_early
from merak.graph.joint.clean import clean
from merak.graph.joint.compiled import compile_part
from merak.graph.joint.derive import Given, Strides, derive
from merak.graph.joint.divide import divide
from merak.graph.joint.generate import Part, generate
from merak.graph.joint.parts import Parts, parts_of
from merak.graph.trace.branches.flags import is_condition
from merak.graph.trace.branches.outcomes import BranchValues, branch_values, specialize_branches
from merak.graph.trace.modes.autograd_functions import is_of_torch_alone
from merak.graph.trace.modes.ctc_loss import CTC_LOSS, runs_apart

Functions = Parts[Part]
"""The functions of a segment for some layouts and gradients."""


@dataclass(frozen=True, slots=True)
class Like:
    """What stands for an argument that is not there any more, to make functions for.

    Args:
        shape: of the argument.
        strides: of the argument.
        dtype: of its elements.
        device: where it was.
    """

    shape: torch.Size
    strides: Strides
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        """What stands for a tensor."""
        return Like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def stride(self) -> Strides:
        """Its strides, as a tensor tells them."""
        return self.strides


Argument = torch.Tensor | Like


class JointSegment:
    """Functions of a segment, made when layouts of its arguments are first met.

    Args:
        graph: its operators as they run, with the placeholders of the segment.
        structure: of the segment's graph.
        deferrable: numbers of the parameters whose gradients may be left for later.
        outcomes: of its conditions, for which the graph is specialized.
        keeps: names of the operators whose results are kept where others are recomputed.
        yields: whether something else may run while an all-reduce does.
        compiler: of the functions; None runs their operators as they are.

    Attributes:
        graph: its operators as they run.
        kept: places of those operators in the graph.
    """

    def __init__(
        self,
        graph: fx.Graph,
        structure: Structure,
        deferrable: tuple[int, ...] = (),
        keeps: Container[str] = (),
        outcomes: BranchValues = (),
        yields: bool = False,
        compiler: TorchCompiler | None = None,
    ) -> None:
        self.graph = graph
        self._yields = yields
        self._compiler = compiler
        self._structure = structure
        self._deferrable = deferrable
        self._keeps = {node.name: place for place, node in enumerate(graph.nodes)}
        self._keeps = {name: place for name, place in self._keeps.items() if name in keeps}
        self.kept = tuple(self._keeps.values())
        how = None if compiler is None else compiler.how
        self._kind = (structure, deferrable, self.kept, outcomes, yields, how)
        placeholders = enumerate(graph.find_nodes(op="placeholder"))
        self._conditions = [n for n, node in placeholders if is_condition(node) and not outcomes]
        self._is_local = all(n.op != "call_function" or is_aten_operator(n) for n in graph.nodes)
        self._chosen: dict[BranchValues, JointSegment] = {}
        self._expected: dict[tuple[Strides, ...], Functions | None] = {}
        self.obstacle = ""

    def parts(self, arguments: Sequence[Argument], given: Given | None = None) -> Functions | None:
        """Functions for some arguments; None where the backward is no graph.

        Args:
            arguments: parameters, buffers, columns, inputs, batch-only values; of inputs, what is
                like them is enough.
            given: gradients that the backward is given; None for those that are expected, at first
                one of each output. What other backwards read is among what those read.
        """
        if self._conditions:
            return self._parts_of_outcomes(arguments, given)
        strides = tuple([argument.stride() for argument in arguments])
        if strides not in self._expected:
            self._expected[strides] = self._made(strides, arguments, None)
        expected = self._expected[strides]
        if given is None or expected is None or expected.given == given:
            return expected
        found = self._made(strides, arguments, given)
        if found is not None and found.saved == expected.saved:
            self._expected[strides] = found
        return found

    def _parts_of_outcomes(self, arguments: Sequence[Any], given: Given | None) -> Functions | None:
        """Functions for what conditions among the arguments say, without what they leave out."""
        outcomes = branch_values([arguments[number] for number in self._conditions])
        if outcomes is None:
            self.obstacle = "fake tensors say nothing of what runs"
            return None
        if outcomes not in self._chosen:
            if len(self._chosen) == _MOST_OUTCOMES:
                self.obstacle = f"its conditions have more than {_MOST_OUTCOMES} outcomes"
                return None
            graph = specialize_branches(self.graph, outcomes)
            args = (graph, self._structure, self._deferrable, self._keeps, outcomes)
            self._chosen[outcomes] = JointSegment(*args, self._yields, self._compiler)
        chosen = self._chosen[outcomes]
        found = chosen.parts(arguments, given)
        self.obstacle = chosen.obstacle
        return found

    def _made(
        self, strides: tuple[Strides, ...], arguments: Sequence[Argument], given: Given | None
    ) -> Functions | None:
        devices = tuple(str(argument.device) for argument in arguments)
        # What communicates with nobody is the same in every place of every mesh.
        mesh = _alone(current_mesh()) if has_mesh() and not self._is_local else None
        key = (self._kind, strides, devices, given, mesh, _switches())
        if key not in _MADE:
            if len(_MADE) >= _MOST_MADE:
                _MADE.pop(next(iter(_MADE)))
            around = nullcontext() if mesh is None else pretended(mesh)
            with around, _disable_current_modes():  # such as one that counts tensors
                _MADE[key] = self._make(arguments, given)
        found = _MADE[key]
        if isinstance(found, str):
            self.obstacle = found
            return None
        return found

    def _make(self, arguments: Sequence[Argument], given: Given | None) -> Functions | str:
        try:
            joint = derive(self.graph, arguments, given)
            clean(joint)
        except Exception as error:  # of an operator on fake tensors; autograd runs the backward
            return str(error) or type(error).__name__
        if self._yields:
            start_early(joint)
        fuses = self._compiler is not None
        nodes = parts_of(joint, divide(joint, self._deferrable, self._keeps, fuses))
        if self._compiler is not None:
            nodes = nodes.map(partial(compile_part, compiler=self._compiler))
        return nodes.map(partial(generate, accumulate=accumulate))


def _switches() -> tuple[object, ...]:
    """Switches of torch that decide which operators run for one."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def _alone(mesh: Mesh) -> Mesh:
    """The rank's mesh, which exchanges nothing."""
    return replace(mesh, device_mesh=None, expert_mesh=None)


_MADE: dict[Any, Functions | str] = {}
"""Functions that this process has made, or what stands against them."""

_MOST_MADE = 512

_MOST_OUTCOMES = 16
"""Of a segment's conditions, for which functions are made."""


def joint_segment(
    graph: fx.Graph,
    as_run: fx.Graph,
    deferrable: Container[str] = (),
    keeps: Container[str] = (),
    yields: bool = False,
    compiler: TorchCompiler | None = None,
) -> JointSegment | None:
    """Functions of a segment; None where its backward is no graph for sure.

    Args:
        graph: of the segment.
        as_run: the same with the operators that run.
        deferrable: names of the parameters whose gradients may be left for later.
        keeps: names of the operators whose results are kept where others are recomputed.
        yields: whether something else may run while an all-reduce does.
        compiler: of the functions; None runs their operators as they are.
    """
    if joint_obstacle(graph):
        return None
    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    numbers = tuple(
        number
        for number, node in placeholders
        if node.meta["kind"] is Kind.PARAMETER and node.meta["name"] in deferrable
    )
    graphs = as_run, structure_of_graph(graph)
    return JointSegment(*graphs, numbers, keeps, yields=yields, compiler=compiler)


def joint_obstacle(graph: fx.Graph) -> str:
    """Why the backward of a segment is no graph, as far as its operators tell; "" where it is one.

    Args:
        graph: of the segment, as a rank runs it.
    """
    placeholders = graph.find_nodes(op="placeholder")
    if any(node.meta["tensor"].is_sparse for node in placeholders):
        return "it reads sparse tensors"
    others = [node for node in graph.nodes if not _is_recordable(node)]
    names = dict.fromkeys(node.target.__name__.split(".")[0] for node in others)
    return f"it calls {', '.join(names)}" if others else ""


def has_joint_graph(graph: fx.Graph) -> bool:
    """Whether the backward of a segment is a graph, found once.

    Args:
        graph: of the segment, as a rank runs it; it no longer changes.
    """
    if graph not in _HAS_JOINT:
        _HAS_JOINT[graph] = not joint_obstacle(graph)
    return _HAS_JOINT[graph]


_HAS_JOINT: WeakKeyDictionary[fx.Graph, bool] = WeakKeyDictionary()

_MODULES = frozenset(
    f"merak.ops.{name}"
    for name in (
        "attention.ring",
        "chunked_loss",
        "chunked_rows",
        "collectives",
        "context_parallel",
        "expert_capacity",
        "expert_dispatch",
        "expert_rows",
        "float8",
        "sharded_dropout",
        "sharded_statistics",
        "vocab_parallel",
        "vocab_parallel_reductions",
    )
)
"""Of functions whose calls on fake tensors run the operators that calls on others run."""


def _is_recordable(node: fx.Node) -> bool:
    if node.op != "call_function" or is_aten_operator(node) or multiplies_groups(node):
        return True
    if node.target is CTC_LOSS:
        read = [argument.meta["tensor"] for argument in node.args[:2]]  # type: ignore[union-attr]
        return runs_apart(*read)
    if role_of(node) is Role.AUTOGRAD_FUNCTION:
        return is_of_torch_alone(str(node.args[1]))
    if family(node.target) in SEPARATE_GEMMS | SEPARATE_EXPERTS:  # read sizes on the host
        return False
    return getattr(node.target, "__module__", "") in _MODULES
