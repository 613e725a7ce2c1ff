"""Runs a sharded model as a pipeline would: a stage per segment, with copies of what crosses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from merak.engine.program import Program, compile_program
from merak.engine.stage import Microbatch, Stage
from merak.graph.ir import ModelGraph, TensorMeta

Tensors = dict[str, torch.Tensor]


def metas(batch: Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    """The signature of a batch."""
    return {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in batch.items()}


class Pipeline:
    """Every segment of a model as a stage of its own, all in this process.

    Args:
        graph: the segments.
        model: holds the parameters and buffers, with numbers.
    """

    def __init__(self, graph: ModelGraph, model: torch.nn.Module) -> None:
        count = len(graph.segments)
        self.graph = graph
        self.model = model
        self.program: Program = compile_program(graph, range(count + 1), range(count), None)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = {**dict(model.named_buffers(remove_duplicate=False)), **graph.constants}
        readers = [name for s in graph.segments for name in s.parameters]
        shared = frozenset(name for name in readers if readers.count(name) > 1)
        self.stages = [
            Stage(i, self.parameters, buffers, shared, torch.device("cpu")) for i in range(count)
        ]

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Tensors:
        """The model's outputs by name."""
        microbatch = self._microbatch(batch)
        outputs: Tensors = {}
        values: Tensors = {}
        for stage in self.stages:
            values = stage.evaluate(microbatch, self._received(stage, values))
            outputs |= self._results(stage, values)
        return {name: outputs[name] for name in self.program.outputs}

    def train(self, batch: Mapping[str, torch.Tensor], *, recompute: bool = False) -> torch.Tensor:
        """The loss of one microbatch; its gradients are then in the parameters' `grad`."""
        microbatch = self._microbatch(batch)
        values: Tensors = {}
        loss = torch.zeros(())
        for stage in self.stages:
            received = self._received(stage, values)
            values = stage.forward(0, microbatch, received, keep=not recompute)
            loss = self._results(stage, values).get("loss", loss)
        gradients = {str(self.graph.loss): torch.ones((), dtype=loss.dtype)}
        for stage in reversed(self.stages):
            made = stage.backward(0, microbatch, gradients, lambda segment: self._collect())
            gradients = {name: gradient.clone() for name, gradient in made.items()}
            if self.graph.loss not in self.program.stages[stage.index].results.values():
                continue
        return loss

    def _collect(self) -> None:
        """Add what the leaves of shared parameters got to the parameters, as it comes."""
        for stage in self.stages:
            for name, leaf in stage.shared.items():
                if leaf.grad is not None:
                    known = self.parameters[name].grad
                    self.parameters[name].grad = leaf.grad if known is None else known + leaf.grad
                    leaf.grad = None

    def _microbatch(self, batch: Mapping[str, torch.Tensor]) -> Microbatch:
        columns = {name: batch[name].clone() for name in self.program.columns}
        microbatch = Microbatch(self.program, columns, {}, (0,))
        for part in (self.program.fixed, self.program.derived):
            segment = part.segment
            assert not segment.parameters
            buffers = self.stages[0].buffers
            with torch.no_grad():
                made = part.function(
                    *(buffers[name] for name in segment.buffers),
                    *(columns[name] for name in segment.columns),
                )
            microbatch.derived |= dict(zip(segment.outputs, made, strict=True))
        return microbatch

    def _received(self, stage: Stage, values: Tensors) -> Tensors:
        names = self.program.stages[stage.index].received
        return {name: values[name].clone() for name in names}

    def _results(self, stage: Stage, values: Tensors) -> Tensors:
        results = self.program.stages[stage.index].results
        return {name: values[value] for name, value in results.items()}


def gradients(model: torch.nn.Module) -> dict[str, Any]:
    """Every parameter's gradient by name; None where it has none."""
    return {name: p.grad for name, p in model.named_parameters()}
