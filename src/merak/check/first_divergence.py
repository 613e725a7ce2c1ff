"""First operator at which a training run on ranks diverges from the run of one process.

A microbatch is run three times: by the user's model, by its traced graph in this process, and by
the ranks. The outputs of the operators of the last two, and the gradients of these, are compared
one by one; the user's model shows whether the trace itself is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.check.case import Case
from merak.check.compare import EXACT, apart_by, as_real, distances
from merak.check.float64 import computing_in
from merak.check.runs import Coordinates, Job, loss_of
from merak.check.source_place import latest
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.program.codegen import runnable
from merak.graph.segment.observe import Observed, Observer, Tensors

ROUNDING = 1e-4
"""The most that float32 may differ in the middle of a model, by the largest magnitude."""


class StepPhase(Enum):
    """Phase of a step in which two runs first differ."""

    TRACE = "the trace"
    FORWARD = "the forward on ranks"
    BACKWARD = "the backward on ranks"
    REDUCTION = "the reduction over microbatches and ranks, or the optimizer's step"


@dataclass(frozen=True, slots=True)
class Divergence:
    """First operator in which two runs differ.

    Args:
        phase: of the step.
        segment: index of the segment; -1 before the first, and where no operator is wrong.
        segment_name: its module path.
        source: file and line of the operator in the user's model; "" if unknown.
    """

    phase: StepPhase
    segment: int = -1
    segment_name: str = ""
    source: str = ""

    def __str__(self) -> str:
        """Return the end of a sentence that begins with the runs."""
        if self.phase is StepPhase.REDUCTION:
            return f"every operator is right, so they diverge in {self.phase.value}"
        line = f" at {self.source}" if self.source else ""
        return (
            f"they diverge in {self.phase.value}, in segment {self.segment} ({self.segment_name})"
            + line
        )


@dataclass(frozen=True, slots=True)
class EqualMicrobatches:
    """Batch of a case made of one microbatch repeated, so that any one of them may be compared.

    Args:
        batch: of the case.
        microbatch: its samples.
    """

    batch: Callable[[int, int], Tensors]
    microbatch: int

    def __call__(self, step: int, num_samples: int) -> Tensors:
        """Return the first microbatch, repeated until there are `num_samples` samples."""
        times = max(1, num_samples // self.microbatch)
        one = self.batch(step, self.microbatch)
        return {n: t.repeat(times, *[1] * (t.ndim - 1)) if t.ndim else t for n, t in one.items()}


def with_equal_microbatches(job: Job) -> Job:
    """Return the job with equal microbatches."""
    case: Case = replace(job.case, batch=EqualMicrobatches(job.case.batch, job.options.microbatch))
    return replace(job, case=case)


def first_divergence(
    job: Job, graph: ModelGraph, ranks: Sequence[tuple[Coordinates, Observed]]
) -> Divergence:
    """Find the first operator at which the runs of a job diverge.

    Args:
        job: with equal microbatches.
        graph: its segments.
        ranks: each rank's dp, tp and pp coordinates, and the outputs of its operators in a step.
    """
    exact = EXACT if job.dtype == torch.float64 else ROUNDING
    nodes = _nodes(graph)
    traced, eager = job.model(), job.model()
    expected, there = observe_graph(job, graph, traced), _eager_values(job, eager)
    known = {n: _is_among(_only(t), there, exact) for n, t in expected.values.items()}
    place = _first(nodes, known, str(graph.loss))
    if place is not None:
        return _divergence(StepPhase.TRACE, place)
    wrong = [
        n for n, off in distances(_gradients(traced), _gradients(eager)).items() if off > exact
    ]
    if wrong:
        lost = latest(graph, wrong)
        return Divergence(StepPhase.TRACE, lost.segment, lost.segment_name, lost.source)
    groups = _by_pipeline(ranks)
    forward = _agreement([[o.values for o in own] for own in groups], expected.values, exact)
    place = _first(nodes, forward, str(graph.loss))
    if place is not None:
        return _divergence(StepPhase.FORWARD, place)
    unit = _units([o for own in groups for o in own], str(graph.loss))
    wanted = _scaled(expected.gradients, unit)
    backward = _agreement([[o.gradients for o in own] for own in groups], wanted, exact)
    place = _last(nodes, backward)
    return (
        Divergence(StepPhase.REDUCTION) if place is None else _divergence(StepPhase.BACKWARD, place)
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """Operator of the graph, and the names of its inputs."""

    segment: Segment
    node: fx.Node
    reads: tuple[str, ...]


def _nodes(graph: ModelGraph) -> dict[str, _Node]:
    """All operators by name, in the order they run."""
    found = {}
    for segment in (graph.prologue, *graph.segments):
        for node in segment.graph.nodes:
            if node.op == "call_function":
                reads = tuple(_label(n) for n in node.all_input_nodes)
                found[node.name] = _Node(segment, node, reads)
    return found


def _label(node: fx.Node) -> str:
    return str(node.meta["name"]) if node.op == "placeholder" else node.name


def _divergence(part: StepPhase, place: _Node) -> Divergence:
    return Divergence(part, place.segment.index, place.segment.name, place.node.meta["source"])


def observe_graph(job: Job, graph: ModelGraph, model: nn.Module) -> Observed:
    """Record the outputs of all operators of a graph for a microbatch, in this process."""
    observer = Observer()
    known: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **graph.constants,
    }
    columns = job.batch(0, job.options.microbatch)
    values: Tensors = {}
    for segment in (graph.prologue, *graph.segments):
        watched, _ = observer(segment)
        given = [known[n] for n in (*segment.parameters, *segment.buffers)]
        given += [columns[n] for n in segment.columns]
        given += [values[n] for n in (*segment.inputs, *segment.batch_only)]
        with computing_in(job.dtype):  # inside of opaque modules
            results = runnable(watched.graph)(*given)
        values.update(zip(segment.outputs, results, strict=True))
    with computing_in(job.dtype):
        values[str(graph.loss)].backward()
    return observer.observed


class _Recorded(TorchDispatchMode):
    """Mode that records every floating point tensor that operators make inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, list[torch.Tensor]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self.found[leaf.numel()].append(leaf.detach().to("cpu", copy=True))
        return result


def _eager_values(job: Job, model: nn.Module) -> Mapping[int, list[torch.Tensor]]:
    """Record every tensor that the user's model computes for its loss, by number of elements."""
    columns = job.batch(0, job.options.microbatch)
    with computing_in(job.dtype), _Recorded() as recorded:
        loss = loss_of(job.case, model, columns)
    loss.backward()
    found: Mapping[int, list[torch.Tensor]] = recorded.found
    return found


def _gradients(model: nn.Module) -> Tensors:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _is_among(value: torch.Tensor, there: Mapping[int, list[torch.Tensor]], exact: float) -> bool:
    return any(
        _is_close(value.reshape(other.shape), other, exact) for other in there[value.numel()]
    )


def _is_close(mine: torch.Tensor, right: torch.Tensor, exact: float) -> bool:
    finite = as_real(right).abs()
    finite = finite[finite.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return apart_by(mine, right) <= exact * scale


def _by_pipeline(ranks: Sequence[tuple[Coordinates, Observed]]) -> list[list[Observed]]:
    """Group the ranks that differ only in their tp coordinate, in its order."""
    groups: dict[tuple[int, int], list[Observed]] = defaultdict(list)
    for (dp, _, pp), observed in sorted(ranks, key=lambda rank: rank[0]):
        groups[dp, pp].append(observed)
    return list(groups.values())


def _agreement(
    groups: Sequence[Sequence[Mapping[str, Tensors]]],
    expected: Mapping[str, Tensors],
    exact: float,
) -> dict[str, bool]:
    """Compare operators by name: true where every group of tp ranks has the expected tensor."""
    found: dict[str, bool] = {}
    for name, right in expected.items():
        for own in groups:
            shown = [rank[name] for rank in own if name in rank]
            is_right = _is_held(shown, _only(right), exact) if len(shown) == len(own) else None
            if is_right is not None:
                found[name] = found.get(name, True) and is_right
    return found


def _is_held(ranks: Sequence[Tensors], right: torch.Tensor, exact: float) -> bool | None:
    """Compare the tensors of tp ranks with one, in any recorded form; None if that is unknown."""
    forms = [[rank[name] for rank in ranks] for name in ranks[0] if all(name in r for r in ranks)]
    known = [_is_held_as(form, right, exact) for form in forms]
    return any(known) if any(is_held is not None for is_held in known) else None


def _is_held_as(mine: Sequence[torch.Tensor], right: torch.Tensor, exact: float) -> bool | None:
    """Compare ranks' tensors with one as replicas, as partial sums or as shards of it."""
    if all(t.shape == right.shape for t in mine):
        return all(_is_close(t, right, exact) for t in mine) or _is_close(
            torch.stack(list(mine)).sum(0), right, exact
        )
    if sum(t.numel() for t in mine) != right.numel():
        return None  # something of it is held by several, or padded
    shards = torch.cat([t.flatten() for t in mine])  # in whatever order
    return _is_close(_sorted(shards), _sorted(right), exact)


def _sorted(tensor: torch.Tensor) -> torch.Tensor:
    return as_real(tensor).flatten().sort().values


def _only(tensors: Tensors) -> torch.Tensor:
    (tensor,) = tensors.values()
    return tensor


def _units(ranks: Sequence[Observed], loss: str) -> float:
    """Factor of a microbatch's loss in the loss of a step."""
    own = (tensor for r in ranks for tensor in r.gradients.get(loss, {}).values())
    return float(next(own, torch.ones(())))


def _scaled(gradients: Mapping[str, Tensors], factor: float) -> dict[str, Tensors]:
    return {n: {k: t * factor for k, t in own.items()} for n, own in gradients.items()}


def _first(nodes: dict[str, _Node], is_right: Mapping[str, bool], loss: str) -> _Node | None:
    """First wrong operator whose error propagates to the loss.

    Some operators have no counterpart, or another form; but their results are right again.
    """
    affected = {loss} if not is_right.get(loss, False) else set()
    for name, place in reversed(nodes.items()):
        if name in affected:
            affected.update(n for n in place.reads if n in nodes and not is_right.get(n, False))
    return next((nodes[n] for n in nodes if n in affected and n in is_right), None)


def _last(nodes: dict[str, _Node], is_right: Mapping[str, bool]) -> _Node | None:
    """Operator with a wrong backward: it reads the last value whose gradient is wrong.

    A wrong gradient that does not propagate is one that ranks hold in another form.
    """
    for name, place in reversed(nodes.items()):
        further = [is_right[n] for n in place.reads if n in is_right]
        if not is_right.get(name, True) and (not further or not all(further)):
            readers = [reader for reader in nodes.values() if name in reader.reads]
            return readers[-1] if readers else place
    return None
