"""Gradients that a model takes in its own forward: segments give what eager code gives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from merak.core.errors import TraceError
from merak.engine.optimizer.second_step import _explain_errors
from merak.graph.segment.build import GraphSource
from merak.graph.segment.dynamic_shapes import GraphsByShape
from merak.graph.trace.opaque.operator import opaque_calls
from tests.tiers import one_in
from tests.unit.graph import gradient_models as g
from tests.unit.graph import gradient_parts as parts
from tests.unit.graph.stages import Pipeline, built, compare_two_steps, metas


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


def compare(model: nn.Module, batch: Mapping[str, Tensor], kept: tuple[str, ...] = ()) -> None:
    """Loss, every gradient and every buffer of two steps, and all outputs in evaluation.

    In float64, where the order in which gradients are added up does not matter.
    """
    graph = compare_two_steps(model.double(), in_float64(batch))
    assert tuple(call.ref.path for call in opaque_calls(graph)) == kept


@one_in(3)
@pytest.mark.parametrize(
    "critic",
    [
        g.layers(nn.LeakyReLU),
        g.layers(nn.Sigmoid, drop=0.5),
        g.layers(nn.Softplus),
        g.Attends(),
        g.Deep(),
        g.Normed(),
    ],
    ids=["leaky", "dropout", "softplus", "attention", "blocks", "statistics"],
)
def test_a_penalty_on_a_gradient(critic: nn.Module) -> None:
    compare(g.Penalised(critic), batch_for("x", "other"))


def test_a_penalty_on_the_gradient_of_convolutions() -> None:
    compare(g.Penalised(g.Images()), IMAGES)


@one_in(2)
@pytest.mark.parametrize(
    "model", [g.FastAttack, g.AttentionAttack, g.GradAttribute, g.ProjectedAttack]
)
def test_an_attack(model: type[nn.Module]) -> None:
    compare(model(), batch_for("x", "y"))


@one_in(3)
@pytest.mark.parametrize("model", [g.Balanced, g.EveryParameter, g.Adapted])
def test_gradients_of_parameters(model: type[nn.Module]) -> None:
    compare(model(), batch_for("x", "y"))


def test_forces_from_an_energy() -> None:
    compare(g.Molecules(), PARTICLES)


def test_third_derivatives() -> None:
    compare(g.Physics(), POINTS)


@one_in(3)
@pytest.mark.parametrize("model", [g.Curved, g.Recomputed, g.Sampled, g.Scaled, g.Edited])
def test_gradients_of_inputs(model: type[nn.Module]) -> None:
    compare(model(), batch_for("x"))


# torch itself uses what it calls deprecated, in derivatives along tangents.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@one_in(4)
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_transform_of_functions(kind: str) -> None:
    compare(g.Transformed(kind), batch_for("x"))


@one_in(3)
@pytest.mark.parametrize(
    ("part", "columns"),
    [(parts.Slopes, ("x",)), (parts.Batched, ("x",)), (parts.Polluting, ("x", "y"))],
)
def test_a_part_that_no_operators_can_stand_for_is_opaque(
    part: type[nn.Module], columns: tuple[str, ...]
) -> None:
    compare(parts.Around(part()), batch_for(*columns), kept=("part",))


@one_in(3)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("batched", "it takes gradients in batches (is_grads_batched)"),
        ("parameters", "it calls backward(), which adds to the gradients of the model's own"),
        ("attribute", "it reads the .grad of a parameter"),
        ("through", "cannot be written as operators (it goes through energy, which is opaque)"),
        ("thaws", "it lets a frozen parameter be trained"),
        ("freezes", "sets requires_grad of a parameter of the shape (8, 6) to False"),
    ],
)
def test_what_is_refused_names_its_line(kind: str, said: str) -> None:
    _explain_errors()  # as once an engine has been there, whose wrappers are no lines of a model
    text = message(parts.TopOfForward(kind), batch_for("x"))
    assert said in text
    if kind != "freezes":
        assert f"{parts.__file__}:{line_of(f'# {kind}', parts.__file__)}" in text


def test_no_parameter_keeps_a_gradient_of_a_trace() -> None:
    model = g.Penalised()
    built(model, batch_for("x", "other"))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@lru_cache
def table() -> Tensor:
    return torch.arange(float(g.WIDTH))


class Cached(nn.Module):
    """Keeps a table for all models, outside of any."""

    def __init__(self) -> None:
        super().__init__()
        self.net = g.layers()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x * table()).mean()}  # reads the table


def test_a_constant_without_numbers_is_refused() -> None:
    table.cache_clear()
    built(Cached(), batch_for("x"))
    text = message(Cached(), batch_for("x"))
    table.cache_clear()
    assert text.startswith("the model cannot be traced at ")
    assert f"{__file__}:{line_of('# reads the table')}: " in text
    assert "a tensor of the shape (6,) that has no values" in text


TABLES: dict[str, Tensor] = {}


class CachedInDict(Cached):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if "one" not in TABLES:
            TABLES["one"] = torch.arange(float(g.WIDTH))
        return {"loss": self.net(x * TABLES["one"]).mean()}


def test_a_global_dict_has_no_tensor_of_a_trace() -> None:
    for _ in range(2):
        built(CachedInDict(), batch_for("x"))
        assert TABLES == {}


def message(model: nn.Module, batch: Mapping[str, Tensor]) -> str:
    with pytest.raises(TraceError) as caught:
        built(model, batch)
    text = str(caught.value)
    assert "\n" not in text
    return text


def line_of(text: str, file: str = __file__) -> int:
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(text))


def test_other_shapes_come_from_one_trace() -> None:
    model = g.Penalised()
    graphs = GraphsByShape(GraphSource(model), training=True)
    for rows in (4, 3, 5, 6):
        batch = {n: torch.cat([t, t])[:rows] for n, t in batch_for("x", "other").items()}
        graph = graphs(metas(batch))
        torch.manual_seed(1)
        expected = model(**batch)["loss"]
        torch.manual_seed(1)
        torch.testing.assert_close(Pipeline(graph, model).train(batch), expected.detach())
    assert graphs._num_traced < 4
