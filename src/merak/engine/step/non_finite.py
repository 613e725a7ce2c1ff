"""Location of NaN and infinite values: the first operator of a step that made one of finite ones.

A step that was not finite runs once more, with every operator looked at. Its weights are the same,
since the step has not reached the optimizer, and its random draws are, since they are keyed by step
and sample. Forwards are interpreted operator by operator; backwards are watched kernel by kernel,
and each kernel is of the operator whose gradient autograd computes then.

Infinite values may be intended, as in masks. So one counts where it leaves the segment that made
it; and one that an operator has as a literal argument, such as `masked_fill(mask, -inf)`, never.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.core.source_lines import with_text
from merak.engine.microbatches import MicrobatchFactory
from merak.engine.stage import Stage
from merak.engine.state import EngineState
from merak.engine.zero.optimizer_params import OptimizerParams
from merak.graph.ir.ir import Kind, Segment
from merak.graph.program.codegen import Function, runnable

_TAG = "merak_operator"
"""Key of the operator in the metadata of autograd's nodes."""

_FIRST = ("loss", "segment", "forward", "backward")
_FIRST_OF_FINITE_LOSS = ("backward", "segment", "forward", "loss")


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Operator, parameter or column where a NaN or infinite value first appeared.

    Origins are ordered as the data is: by microbatch, then by execution.

    Args:
        microbatch: its number among those of all replicas.
        is_backward: whether it appeared in the backward.
        place: of its segment in the order of execution.
        position: of its operator among those that the rank has run.
        what: the operator, parameter or column as a noun.
        value: "NaN" or "infinite".
        segment: index of the segment.
        segment_name: module path of the segment.
        module: module path of the operator.
        source: file and line of the operator in the user's model; "" if unknown.
        is_given: whether it is no operator, but a parameter, buffer or column.
    """

    microbatch: int
    is_backward: bool
    place: int
    position: int
    what: str
    value: str
    segment: int
    segment_name: str
    module: str = ""
    source: str = ""
    is_given: bool = False

    def sentence(self, dp_degree: int) -> str:
        """The end of a sentence about a step that was not finite.

        Args:
            dp_degree: number of replicas, over which microbatches are numbered.
        """
        number, replica = divmod(self.microbatch, dp_degree)
        of = f"microbatch {number}" + (f" of replica {replica}" if dp_degree > 1 else "")
        if self.is_given:
            return f"{self.value} is in {self.what}, in {of}"
        segment = f"segment {self.segment} ({self.segment_name})"
        if self.segment < 0:
            segment = "what is computed from the batch alone"
        phase = "backward" if self.is_backward else "forward"
        module = f" of module {self.module}" if self.module else ""
        line = f" at {with_text(self.source)}" if self.source else ""
        return (
            f"{self.value} first appeared in the {phase} of {of}, in {segment}: "
            f"{self.what}{module}{line}"
        )


@dataclass(frozen=True, slots=True)
class _NonFinite:
    """A value that is not finite, and where it comes from.

    Args:
        has_nan: whether it has NaN.
        origin: None for one of another rank, or an intended one.
        is_intended: whether it is infinite by an operator's literal argument.
    """

    has_nan: bool
    origin: Origin | None
    is_intended: bool = False


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator of a segment for one microbatch."""

    finder: NonFiniteFinder
    node: fx.Node
    segment: Segment
    microbatch: int
    position: int

    def origin(self, value: str, what: str = "", backward: int | None = None) -> Origin:
        """The operator as the place where a value appeared; in its backward, the kernel's turn."""
        segment, meta = self.segment, self.node.meta
        is_backward = backward is not None
        return Origin(
            self.microbatch,
            is_backward,
            -segment.index if is_backward else segment.index,
            self.position if backward is None else backward,
            what or f"operator {_name(self.node)}",
            value,
            segment.index,
            segment.name,
            str(meta.get("module", "")),
            str(meta.get("source", "")),
            bool(what) and backward is None,
        )


@dataclass(slots=True)
class NonFiniteFinder:
    """Finds the first values of a step on this rank that are not finite.

    Args:
        loss: name of the loss value; None for none.
    """

    loss: str | None
    # Per class of `_FIRST`, the first origin.
    found: dict[str, Origin] = field(default_factory=dict, init=False)
    _values: dict[tuple[int, str], _NonFinite] = field(default_factory=dict, init=False)
    _num_operators: int = field(default=0, init=False)
    _num_kernels: int = field(default=0, init=False)

    def function(self, segment: Segment, random_key: Sequence[int | str]) -> Function:
        """Function of a segment that looks at the result of every operator.

        Args:
            segment: or a piece of one.
            random_key: of the microbatch; ends with its number among those of all replicas.
        """
        microbatch = int(random_key[-1])
        known: dict[fx.Node, _NonFinite] = {}

        def observe(node: fx.Node, result: Any) -> None:
            if node.op == "output":
                self._leave(segment, microbatch, node, known)
                return
            self._num_operators += 1
            operator = _Operator(self, node, segment, microbatch, self._num_operators)
            state = self._state(operator, result, known)
            if state is not None:
                known[node] = state
            _tag(result, None if node.op == "placeholder" else operator)

        return runnable(segment.graph, observe)

    @contextmanager
    def watching(self, state: EngineState) -> Iterator[None]:
        """Context in which the operators of stages are looked at, and the kernels of backwards."""
        observed: tuple[Stage | MicrobatchFactory, ...] = (
            *state.stages.values(),
            state.microbatches,
        )
        for one in observed:
            one.observer = self
        try:
            with _Kernels(self):
                yield
        finally:
            for one in observed:
                one.observer = None

    def first(self, *, finite_loss: bool) -> tuple[int, Origin] | None:
        """The origin of this rank that counts, and its rank among those of other ranks.

        Args:
            finite_loss: whether the step's loss was finite, so that a gradient was not.
        """
        order = _FIRST_OF_FINITE_LOSS if finite_loss else _FIRST
        own = [(order.index(kind), origin) for kind, origin in self.found.items()]
        return min(own, default=None)

    def note(self, kind: str, origin: Origin) -> None:
        """Record an origin, if it is the first of its kind."""
        self.found[kind] = min(origin, self.found.get(kind, origin))

    def note_kernel(self, operator: _Operator, value: str) -> None:
        """Record a kernel of a backward that made a value which is not finite."""
        self._num_kernels += 1
        if "backward" not in self.found:
            what = f"the gradient of operator {_name(operator.node)}"
            self.note("backward", operator.origin(value, what, self._num_kernels))

    def _state(
        self, operator: _Operator, result: Any, known: Mapping[fx.Node, _NonFinite]
    ) -> _NonFinite | None:
        node = operator.node
        has_nan, has_inf = _flags(result)
        if not (has_nan or has_inf) or _is_empty(node.target):
            return None
        if node.op == "placeholder":
            return self._entering(operator, has_nan)
        read = [known[n] for n in node.all_input_nodes if n in known]
        inherited = [state for state in read if not state.is_intended]
        if inherited:
            first = max(inherited, key=lambda state: state.has_nan)
            return _NonFinite(has_nan, first.origin)
        if not has_nan and (read or _has_infinite_literal((node.args, node.kwargs))):
            return _NonFinite(False, None, is_intended=True)
        return self._new(operator.origin("NaN" if has_nan else "an infinite value"), has_nan)

    def _new(self, origin: Origin, has_nan: bool) -> _NonFinite:
        self.note("forward", origin)
        return _NonFinite(has_nan, origin)

    def _entering(self, operator: _Operator, has_nan: bool) -> _NonFinite:
        """A parameter, buffer, column or value that is not finite before any operator."""
        meta = operator.node.meta
        kind, name = meta["kind"], meta["name"]
        made = self._values.get((operator.microbatch, name))
        if made is not None or kind is Kind.VALUE:
            return made or _NonFinite(has_nan, None)
        if kind in (Kind.BUFFER, Kind.BATCH_ONLY) and not has_nan:
            return _NonFinite(False, None, is_intended=True)  # such as a mask
        whats = {
            Kind.COLUMN: f"column {name!r} of the batch",
            Kind.BATCH_ONLY: "a value of the batch",
        }
        what = whats.get(kind, f"{kind.value} {name} before the step")
        return self._new(operator.origin("NaN" if has_nan else "an infinite value", what), has_nan)

    def _leave(
        self, segment: Segment, microbatch: int, node: fx.Node, known: Mapping[fx.Node, _NonFinite]
    ) -> None:
        returned: Any = node.args[0]
        for name, value in zip(segment.outputs, returned, strict=True):
            state = known.get(value)
            if state is None:
                continue
            self._values.setdefault((microbatch, name), state)
            if state.origin is not None and segment.index >= 0:  # else of the batch, as a mask is
                self.note("loss" if name == self.loss else "segment", state.origin)


class _Kernels(TorchDispatchMode):
    """Mode that looks at the kernels of backwards."""

    def __init__(self, finder: NonFiniteFinder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._finder = finder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a kernel."""
        node: Any = torch._C._current_autograd_node()
        operator = None if node is None else node.metadata.get(_TAG)
        if operator is None or operator.finder is not self._finder or _is_empty(func):
            return func(*args, **(kwargs or {}))
        read_nan, read_inf = _flags((args, kwargs))
        made = func(*args, **(kwargs or {}))
        has_nan, has_inf = _flags(made)
        if has_nan and not read_nan:
            self._finder.note_kernel(operator, "NaN")
        elif has_inf and not (read_nan or read_inf or _has_infinite_literal((args, kwargs))):
            self._finder.note_kernel(operator, "an infinite value")
        return made


def _flags(values: Any) -> tuple[bool, bool]:
    """Whether some tensors have NaN, and infinite elements."""
    has_nan = has_inf = False
    for tensor in _tensors(values):
        if not bool(torch.isfinite(tensor).all()):
            has_nan |= bool(torch.isnan(tensor).any())
            has_inf |= bool(torch.isinf(tensor).any())
    return has_nan, has_inf


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        is_real = isinstance(leaf, torch.Tensor) and not leaf.is_meta
        if is_real and (leaf.is_floating_point() or leaf.is_complex()):
            yield leaf.detach()


def _has_infinite_literal(arguments: Any) -> bool:
    return any(isinstance(leaf, float) and math.isinf(leaf) for leaf in tree_leaves(arguments))


def _is_empty(target: Any) -> bool:
    """Whether an operator gives memory that nobody has written to."""
    return isinstance(target, torch._ops.OpOverload) and "empty" in target._opname


def _name(node: fx.Node) -> str:
    """An operator as people read it."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return re.sub(r"_\d+$", "", node.name)


def _tag(result: Any, operator: _Operator | None) -> None:
    """Tell autograd's nodes of a result which operator they are of; None where gradients leave."""
    reached: list[Any] = [
        leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
    ]
    while reached:
        function = reached.pop()
        if function is None or _TAG in function.metadata:
            continue
        function.metadata[_TAG] = operator
        if operator is not None:
            reached.extend(further for further, _ in function.next_functions)


def non_finite_gradients(params: OptimizerParams) -> tuple[str, ...]:
    """Names of the parameters whose gradients are not finite on this rank."""
    gradients = {name: item.tensor.grad for name, item in params.items.items()}
    return tuple(n for n, g in gradients.items() if g is not None and any(_flags(g)))


def describe(
    ranks: Iterable[tuple[int, Origin] | None], gradients: Iterable[str], dp_degree: int
) -> str:
    """The end of a sentence about a step that was not finite: where that began.

    Args:
        ranks: what every rank has found.
        gradients: names of the parameters whose gradients are not finite.
        dp_degree: number of replicas.
    """
    found = min((one for one in ranks if one is not None), default=None)
    if found is not None:
        return found[1].sentence(dp_degree)
    names = sorted(gradients)
    if names:
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return (
            f"every operator gave finite numbers, but the gradient of {names[0]}{more} is not: it "
            "overflows where gradients are summed over microbatches or ranks"
        )
    return (
        "the step was finite when it ran once more on the same weights and draws, so a device or "
        "kernel of this job computes wrong or differently each time"
    )
