"""Gradients that a model takes in its own forward: segments give what eager code gives."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from merak.graph.call import Call, call_model
from merak.graph.kept.whole import kept_calls
from tests.unit.graph import gradient_models as g
from tests.unit.graph.stages import Pipeline, built, gradients_of


def batch_for(*names: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {
        "x": torch.randn(4, g.WIDTH),
        "other": torch.randn(4, g.WIDTH),
        "y": torch.randint(g.CLASSES, (4,)),
    }
    return {name: made[name] for name in names}


IMAGES = {"x": torch.randn(2, 3, 12, 12), "other": torch.randn(2, 3, 12, 12)}
PARTICLES = {"x": torch.randn(2, 4, 3), "energy": torch.randn(2), "forces": torch.randn(2, 4, 3)}
POINTS = {"x": torch.randn(5, 1), "t": torch.randn(5, 1)}
TRANSFORMS = ("grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian")


def in_float64(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t.clone() for n, t in batch.items()}


def compare(model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Loss, every gradient and every buffer of two steps, and all outputs in evaluation.

    In float64, where the order in which gradients are added up does not matter.
    """
    model = model.double()
    eager = copy.deepcopy(model).train()
    call = Call(tuple(batch), {}, None, ())
    graph = built(model, in_float64(batch))
    assert not kept_calls(graph)
    for _ in range(2):
        model.zero_grad()
        eager.zero_grad()
        torch.manual_seed(1)
        expected = call_model(eager, in_float64(batch), call)["loss"]
        expected.backward()
        torch.manual_seed(1)
        torch.testing.assert_close(Pipeline(graph, model).train(in_float64(batch)), expected)
    found = gradients_of(model)
    for name, known in gradients_of(eager).items():
        gradient = found[name]
        assert (gradient is None) == (known is None), name
        torch.testing.assert_close(gradient, known, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    evaluated = built(model, in_float64(batch), training=False)
    torch.manual_seed(1)
    outputs = call_model(eager.eval(), in_float64(batch), call)
    torch.manual_seed(1)
    made = Pipeline(evaluated, model).evaluate(in_float64(batch))
    torch.testing.assert_close(made, {n: t.detach() for n, t in outputs.items()})


@pytest.mark.parametrize(
    "critic",
    [
        g.layers(nn.LeakyReLU),
        g.layers(nn.Sigmoid, drop=0.5),
        g.layers(nn.Softplus),
        g.Attends(),
        g.Normed(),
    ],
    ids=["leaky", "dropout", "softplus", "attention", "statistics"],
)
def test_a_penalty_on_a_gradient(critic: nn.Module) -> None:
    compare(g.Penalised(critic), batch_for("x", "other"))


def test_a_penalty_on_the_gradient_of_convolutions() -> None:
    compare(g.Penalised(g.Images()), IMAGES)


@pytest.mark.parametrize("model", [g.FastAttack, g.GradAttribute, g.ProjectedAttack])
def test_an_attack(model: type[nn.Module]) -> None:
    compare(model(), batch_for("x", "y"))


@pytest.mark.parametrize("model", [g.Balanced, g.EveryParameter, g.Adapted])
def test_gradients_of_parameters(model: type[nn.Module]) -> None:
    compare(model(), batch_for("x", "y"))


def test_forces_from_an_energy() -> None:
    compare(g.Molecules(), PARTICLES)


def test_third_derivatives() -> None:
    compare(g.Physics(), POINTS)


@pytest.mark.parametrize("model", [g.Curved, g.Recomputed, g.Sampled])
def test_gradients_of_inputs(model: type[nn.Module]) -> None:
    compare(model(), batch_for("x"))


# torch itself uses what it calls deprecated, in derivatives along tangents.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_transform_of_functions(kind: str) -> None:
    compare(g.Transformed(kind), batch_for("x"))
