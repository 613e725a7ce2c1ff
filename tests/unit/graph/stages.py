"""Runs a sharded model as a pipeline would: a stage per segment, with copies of what crosses."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.testing import assert_close

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.program.codegen import Function, runnable
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.trace.calls.call import Call, LossFunction, call_model

Tensors = dict[str, torch.Tensor]


def metas(batch: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    """The signature of a batch."""
    return {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in batch.items()}


def built(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    *,
    loss_fn: LossFunction | None = None,
    training: bool = True,
) -> ModelGraph:
    """A model's segments."""
    return build_graph(GraphSource(model, loss_fn=loss_fn), metas(batch), training=training)


@dataclass
class Record:
    """One segment's forward: the leaves it started from, and its results by name."""

    leaves: Tensors
    results: Tensors


class Pipeline:
    """Every segment of a model as a stage of its own, all in this process.

    Args:
        graph: the segments.
        model: holds the parameters and buffers, with numbers.
    """

    def __init__(self, graph: ModelGraph, model: torch.nn.Module) -> None:
        self.graph = graph
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = {**dict(model.named_buffers(remove_duplicate=False)), **graph.constants}
        self.functions = [_function(segment) for segment in graph.segments]
        self.received = ((), *graph.boundaries())

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Tensors:
        """The model's outputs by name."""
        with torch.no_grad():
            records = self.forward(batch)
        made: Tensors = {}
        for record in records:
            made |= record.results
        return {name: made[value] for name, value in self.graph.outputs.items()}

    def train(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one microbatch; its gradients are then in the parameters' `grad`."""
        records = self.forward(batch)
        loss = next(
            r.results[str(self.graph.loss)] for r in records if self.graph.loss in r.results
        )
        gradients: Tensors = {str(self.graph.loss): torch.ones_like(loss)}
        for record in reversed(records):
            _backward(record, gradients)
        return loss.detach()

    def derive(self, columns: Mapping[str, torch.Tensor]) -> Tensors:
        """What depends on the batch alone, and on draws that decide what runs."""
        prologue = self.graph.prologue
        with torch.no_grad():
            made = _run(_function(prologue), self._arguments(prologue, dict(columns), {}, {}))
        return dict(zip(prologue.outputs, made, strict=True))

    def forward(self, batch: Mapping[str, torch.Tensor]) -> list[Record]:
        """Every segment's forward."""
        columns = {name: tensor.clone() for name, tensor in batch.items()}
        values: Tensors = {}
        batch_only = self.derive(columns)
        records = []
        for segment, function, received in zip(
            self.graph.segments, self.functions, self.received, strict=True
        ):
            # Nothing but the boundary reaches a stage.
            arrived = {name: values[name].detach().clone() for name in received}
            leaves = {
                name: arrived[name].requires_grad_(self.graph.values[name].requires_grad)
                for name in segment.inputs
            }
            made = _run(function, self._arguments(segment, columns, leaves, batch_only))
            results = dict(zip(segment.outputs, made, strict=True))
            values = {**arrived, **results}
            records.append(Record(leaves, results))
        return records

    def _arguments(
        self, segment: Segment, columns: Tensors, inputs: Tensors, batch_only: Tensors
    ) -> list[torch.Tensor]:
        return [
            *(self.parameters[name] for name in segment.parameters),
            *(self.buffers[name] for name in segment.buffers),
            *(columns[name] for name in segment.columns),
            *(inputs[name] for name in segment.inputs),
            *(batch_only[name] for name in segment.batch_only),
        ]


def _function(segment: Segment) -> Function:
    return runnable(segment.graph)


def _run(function: Function, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    results = function(*arguments)
    assert isinstance(results, tuple)
    return results


def _backward(record: Record, gradients: Tensors) -> None:
    pairs = [
        (made, gradients.pop(name)) for name, made in record.results.items() if name in gradients
    ]
    pairs = [(made, gradient) for made, gradient in pairs if made.requires_grad]
    if pairs:
        torch.autograd.backward([made for made, _ in pairs], [gradient for _, gradient in pairs])
    for name, leaf in record.leaves.items():
        if leaf.grad is not None:
            gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Every parameter's gradient by name; None where it has none."""
    return {name: p.grad for name, p in model.named_parameters()}


def assert_gradients(
    model: torch.nn.Module,
    eager: torch.nn.Module,
    zero_for_none: bool = False,
    **tolerance: float | None,
) -> None:
    """Gradients of one model are those of another.

    Args:
        model: has gradients.
        eager: has those that are right; none where the other must have none.
        zero_for_none: whether zeros may be there in place of none.
        **tolerance: as of `torch.testing.assert_close`.
    """
    found = gradients_of(model)
    for name, known in gradients_of(eager).items():
        own = found[name]
        if zero_for_none:
            zeros = torch.zeros_like(dict(model.named_parameters())[name])
            own, known = (zeros if g is None else g for g in (own, known))
        assert (own is None) == (known is None), name
        assert_close(own, known, **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def assert_like_eager(
    graph: ModelGraph,
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss: Mapping[str, float | None] | None = None,
    *,
    seed: int | None = None,
    draws: AbstractContextManager[None] | None = None,
    zero_for_none: bool = False,
    **tolerance: float | None,
) -> None:
    """The loss, the gradients and the buffers of a step are those of eager code.

    Args:
        graph: segments of the model.
        model: gets the gradients, and the buffers that the step writes.
        batch: of the step.
        loss: the loss's own tolerance, as of `torch.testing.assert_close`.
        seed: of torch's generator, for both; None leaves it alone.
        draws: in which eager code draws what the graph draws; None for nothing of its own.
        zero_for_none: as of `assert_gradients`.
        **tolerance: that of gradients and buffers, and of the loss if it has none of its own.
    """
    eager = copy.deepcopy(model)
    model.zero_grad()
    eager.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    found = Pipeline(graph, model).train(batch)
    if seed is not None:
        torch.manual_seed(seed)
    with draws or nullcontext():
        made = eager(**batch)
    expected = made if isinstance(made, torch.Tensor) else made["loss"]
    expected.backward()
    assert_close(found, expected.detach(), **tolerance if loss is None else loss)
    assert_gradients(model, eager, zero_for_none, **tolerance)
    assert_close(dict(model.named_buffers()), dict(eager.named_buffers()), **tolerance)


def compare_two_steps(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss_fn: LossFunction | None = None,
    **tolerance: float | None,
) -> ModelGraph:
    """Two steps are those of eager code, of which one reads what the other has written.

    So is every output in evaluation, in its order.

    Args:
        model: in any mode; gets gradients, and the buffers that steps write.
        batch: of both steps.
        loss_fn: as of `GraphSource`.
        **tolerance: as of `torch.testing.assert_close`, of all that is compared.

    Returns:
        The segments in training.
    """
    eager, call = copy.deepcopy(model).train(), Call(tuple(batch), {}, loss_fn, ())
    graph = built(model, batch, loss_fn=loss_fn)
    for _ in range(2):
        model.zero_grad()
        eager.zero_grad()
        torch.manual_seed(1)
        expected = call_model(eager, {n: t.clone() for n, t in batch.items()}, call)["loss"]
        expected.backward()
        torch.manual_seed(1)
        assert_close(Pipeline(graph, model).train(batch), expected.detach(), **tolerance)
    assert_gradients(model, eager, **tolerance)
    assert_close(dict(model.named_buffers()), dict(eager.named_buffers()), **tolerance)
    evaluated = built(model, batch, loss_fn=loss_fn, training=False)
    torch.manual_seed(1)
    outputs = call_model(eager.eval(), {n: t.clone() for n, t in batch.items()}, call)
    torch.manual_seed(1)
    made = Pipeline(evaluated, model).evaluate(batch)
    assert list(made) == list(outputs)
    assert_close(made, {n: t.detach() for n, t in outputs.items()}, **tolerance)
    return graph


def check_structure(graph: ModelGraph) -> None:
    """Placeholders are what the segment says, in order; values are made before they are read.

    What depends on the batch alone is made of columns and buffers, of no parameter.
    """
    made_of = {n.meta["kind"] for n in graph.prologue.graph.find_nodes(op="placeholder")}
    assert made_of <= {Kind.COLUMN, Kind.BUFFER}
    known: set[str] = set()
    for segment in (graph.prologue, *graph.segments):
        parts = {
            Kind.PARAMETER: segment.parameters,
            Kind.BUFFER: segment.buffers,
            Kind.COLUMN: segment.columns,
            Kind.VALUE: segment.inputs,
            Kind.BATCH_ONLY: segment.batch_only,
        }
        said = [(kind, name) for kind, names in parts.items() for name in names]
        placeholders = segment.graph.find_nodes(op="placeholder")
        assert [(n.meta["kind"], n.meta["name"]) for n in placeholders] == said
        assert set(segment.inputs) <= known
        assert set(segment.batch_only) <= set(graph.prologue.outputs)
        if segment is not graph.prologue:
            known |= set(segment.outputs)
    assert set(graph.outputs.values()) <= known
    assert not {name for s in graph.segments for name in s.inputs} & set(graph.prologue.outputs)
