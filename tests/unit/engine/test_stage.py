from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from merak.engine.stage import Stage
from merak.engine.tensors_by_name import TensorDict
from merak.graph.ir.ir import ModelGraph
from tests.unit.engine.models import (
    Skips,
    buffers_of,
    gpt2,
    graph_of,
    microbatch_of,
    number_batch,
    program_of,
    stages_of,
    text_batch,
)

MODELS = {"gpt2": (gpt2, text_batch), "skips": (Skips, number_batch)}


def run_backward(
    graph: ModelGraph, stages: list[Stage], batch: TensorDict, bounds: list[int], keep: bool
) -> tuple[float, list[int]]:
    """One microbatch through all stages and back; the loss, and the segments in backward order."""
    program = program_of(graph, bounds, list(range(len(stages))))
    microbatch = microbatch_of(program, batch, dict(stages[0].buffers), scale=0.5)
    values: TensorDict = {}
    for stage in stages:
        values = stage.forward(0, microbatch, values, keep)
    assert program.loss is not None
    loss = float(values[program.loss])
    assert all(not value.requires_grad for value in values.values())
    order: list[int] = []
    gradients = {program.loss: torch.tensor(0.5)}
    for stage in reversed(stages):
        gradients = stage.backward(
            0, microbatch, gradients, lambda segment: order.append(segment.segment.index)
        )
        assert len(stage._saved) == 0
    assert gradients == {}
    return loss, order


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_explicit_backward_equals_autograd(name: str, num_stages: int, keep: bool) -> None:
    make, make_batch = MODELS[name]
    model, batch = make(), make_batch()
    expected = copy.deepcopy(model)
    loss = expected(**batch)["loss"]
    (loss * 0.5).backward()
    graph = graph_of(model, batch)
    size = len(graph.segments)
    bounds = [size * i // num_stages for i in range(num_stages + 1)]
    stages = stages_of(model, graph, num_stages, set())
    found, order = run_backward(graph, stages, batch, bounds, keep)
    assert found == loss.item()
    assert order == list(reversed(range(size)))
    for (path, own), (_, other) in zip(model.named_parameters(), expected.named_parameters()):
        if not other.requires_grad:
            assert own.grad is None, path
        else:
            assert own.grad is not None and other.grad is not None
            assert torch.allclose(own.grad, other.grad, rtol=1e-5, atol=1e-7), path


def test_shared_parameters_collect_their_gradient_apart() -> None:
    model, batch = gpt2(), text_batch()
    graph = graph_of(model, batch)
    name = "transformer.wte.weight"
    (stage,) = stages_of(model, graph, 1, {name})
    run_backward(graph, [stage], batch, [0, len(graph.segments)], True)
    assert model.get_parameter(name).grad is None
    assert stage.weights.shared[name].grad is not None
    assert stage.weights.shared[name].data_ptr() == model.get_parameter(name).data_ptr()


def test_recomputation_draws_the_same_dropout() -> None:
    found = []
    for keep in (True, False):
        model, batch = gpt2(dropout=0.5), text_batch()
        graph = graph_of(model, batch)
        stages = stages_of(model, graph, 2, set())
        size = len(graph.segments)
        found.append(run_backward(graph, stages, batch, [0, size // 2, size], keep)[0])
        gradients = [p.grad for p in model.parameters()]
        found.append(gradients)
        torch.manual_seed(99)  # whatever was drawn in between
    assert found[0] == found[2]
    for one, other in zip(found[1], found[3]):
        assert torch.equal(one, other)


def test_recompute_ahead_of_the_backward() -> None:
    model, batch = Skips(), number_batch()
    graph = graph_of(model, batch)
    program = program_of(graph, [0, len(graph.segments)], [0])
    (stage,) = stages_of(model, graph, 1, set())
    microbatch = microbatch_of(program, batch, buffers_of(model, graph))
    stage.forward(7, microbatch, {}, save=False)
    saved = stage._saved[7]
    assert all(record.outputs is None for record in saved)
    stage.recompute(7, microbatch)
    assert all(record.outputs is not None for record in saved)


def test_microbatches_may_go_backward_in_any_order() -> None:
    model = Skips()
    batches = [number_batch(seed=i) for i in range(3)]
    expected = copy.deepcopy(model)
    for batch in batches:
        expected(**batch)["loss"].backward()
    graph = graph_of(model, batches[0])
    program = program_of(graph, [0, len(graph.segments)], [0])
    (stage,) = stages_of(model, graph, 1, set())
    made = [microbatch_of(program, b, buffers_of(model, graph)) for b in batches]
    for number, microbatch in enumerate(made):
        stage.forward(number, microbatch, {}, save=True)
    assert len(stage._saved) == 3
    assert program.loss is not None
    for number in (1, 2, 0):
        stage.backward(number, made[number], {program.loss: torch.tensor(1.0)}, lambda s: None)
    for own, other in zip(model.parameters(), expected.parameters()):
        if other.grad is not None:
            assert own.grad is not None
            assert torch.allclose(own.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_a_failed_step_is_forgotten() -> None:
    model, batch = gpt2(), text_batch()
    graph = graph_of(model, batch)
    (stage,) = stages_of(model, graph, 1, {"transformer.wte.weight"})
    run_backward(graph, [stage], batch, [0, len(graph.segments)], True)
    program = program_of(graph, [0, len(graph.segments)], [0])
    microbatch = microbatch_of(program, batch, buffers_of(model, graph))
    stage.forward(0, microbatch, {}, save=True)
    stage.forget()
    assert len(stage._saved) == 0
    assert all(leaf.grad is None for leaf in stage.weights.shared.values())


def test_evaluation_keeps_nothing() -> None:
    model, batch = Skips(), number_batch()
    graph = graph_of(model, batch, training=False)
    program = program_of(graph, [0, len(graph.segments)], [0])
    (stage,) = stages_of(model, graph, 1, set())
    made = stage.evaluate(microbatch_of(program, batch, buffers_of(model, graph)), {})
    names = program.stages[0].results
    expected = model.eval()(**batch)
    assert set(names) == {"loss", "logits"}
    for name, value in names.items():
        assert torch.equal(made[value], expected[name])
    assert len(stage._saved) == 0
    assert not isinstance(made[names["logits"]], nn.Parameter)


class Normed(nn.Module):
    """Batch norms, and a buffer that the forward reads and then changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))
        self.scale = nn.Buffer(torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for block, norm in zip(self.blocks, self.norms):
            x = torch.tanh(norm(block(x))) + self.scale
            self.scale.mul_(0.5)
        return {"loss": nn.functional.cross_entropy(x, y)}


def test_recomputation_neither_repeats_nor_sees_writes_into_buffers() -> None:
    model, batches = Normed(), [number_batch(seed=seed) for seed in range(3)]
    expected = copy.deepcopy(model)
    for batch in batches:
        expected(**batch)["loss"].backward()
    graph = graph_of(model, batches[0])
    (stage,) = stages_of(model, graph, 1, set())
    program = program_of(graph, [0, len(graph.segments)], [0])
    assert program.loss is not None
    microbatches = [microbatch_of(program, b, dict(stage.buffers), scale=1.0) for b in batches]
    for number, microbatch in enumerate(microbatches):
        stage.forward(number, microbatch, {}, save=False)
    for number, microbatch in enumerate(microbatches):
        if number:
            stage.recompute(number, microbatch)
        stage.backward(number, microbatch, {program.loss: torch.ones(())}, lambda _: None)
    for path, buffer in expected.named_buffers():
        assert torch.equal(stage.buffers[path], buffer), path
    for (path, own), (_, other) in zip(model.named_parameters(), expected.named_parameters()):
        assert own.grad is not None and other.grad is not None
        assert torch.allclose(own.grad, other.grad, rtol=1e-5, atol=1e-7), path
