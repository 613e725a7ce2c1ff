"""Steps whose linear layers multiply in float8, beside modules that do the same in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

from merak.core import mesh
from merak.core.errors import PlanError
from merak.data import signature
from merak.engine.build import build_engine
from merak.engine.engine import Engine
from merak.graph.float8 import float8_layers
from merak.graph.segment.build import GraphSource
from merak.ops.float8 import float8_linears
from merak.plan.cost.float8_products import float8_sentence, refuse_float8_on
from merak.plan.engine_options import EngineOptions
from tests.unit.engine.models import VOCABULARY, gpt2, text_batch

pytestmark = pytest.mark.usefixtures("one_rank")

BATCHES = [text_batch(seed=0), text_batch(seed=1)]


def engine_of(model: nn.Module, **options: Any) -> Engine:
    chosen = EngineOptions(num_microbatches=len(BATCHES), fp8=True, **options)
    columns = signature(BATCHES[0]).columns
    return build_engine(GraphSource(model), columns, mesh.current_mesh(), chosen)


def step(engine: Engine) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Loss and gradients of a step."""
    columns = [signature(batch).columns for batch in BATCHES]
    loss = engine.train_step(0, columns, BATCHES, 1.0 / len(BATCHES)).sum()
    return loss, {name: own.grad for name, own in engine.parameters.items()}


def in_modules(model: nn.Module) -> nn.Module:
    """The same model, whose layers multiply in float8 wherever they are called."""

    def forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return float8_linears(x, (layer.weight.t(),), (layer.bias,), x.dtype, ())[0]

    for layer in model.modules():
        if isinstance(layer, Conv1D):
            layer.forward = partial(forward, layer)
    return model


def test_a_step_is_that_of_modules_in_float8() -> None:
    engine, model = engine_of(gpt2()), in_modules(gpt2())
    loss, gradients = step(engine)
    total = sum(model(**batch).loss / len(BATCHES) for batch in BATCHES)
    total.backward()
    torch.testing.assert_close(loss, total.detach(), rtol=1e-4, atol=0.0)
    for name, parameter in model.named_parameters():
        found, expected = gradients[name], parameter.grad
        assert found is not None and expected is not None
        # Sums in another order may round an element to another number of eight bits.
        assert (found - expected).norm() <= 2e-2 * expected.norm(), name
    in_full = gpt2()
    sum(in_full(**batch).loss / len(BATCHES) for batch in BATCHES).backward()
    weight = "transformer.h.0.mlp.c_fc.weight"
    expected = in_full.get_parameter(weight).grad
    difference = (gradients[weight] - expected).norm() / expected.norm()
    assert 2e-2 < difference < 0.2, "it is another than in float32"


@pytest.mark.parametrize(
    "options", [{"recompute": "full"}, {"schedule": "zero_bubble_h1", "recompute": "selective"}]
)
def test_whatever_runs_again_or_later_is_the_same(options: dict[str, Any]) -> None:
    loss, gradients = step(engine_of(gpt2()))
    engine = engine_of(gpt2(), **options)
    other_loss, others = step(engine)
    programs = [p for s in engine._state.base.stages.values() for p in s.segments]
    assert not any(p.joint is None or p.joint.obstacle for p in programs)
    assert torch.equal(loss, other_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def test_evaluations_keep_the_precision() -> None:
    engine, model = engine_of(gpt2()), gpt2()
    columns = signature(BATCHES[0]).columns
    (outputs,) = engine.evaluate([columns], BATCHES[:1])
    torch.testing.assert_close(outputs["logits"], model(**BATCHES[0]).logits.detach())


def test_layers_that_stay_are_named() -> None:
    model = gpt2()
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    segments = [p.segment for p in engine_of(model)._state.base.stages[0].segments]
    said = float8_sentence(segments)
    assert said.startswith("7 of 9 linear layers; not transformer.h.0.mlp.c_fc.weight (frozen)")
    assert "not transformer.wte.weight (16 × 16 × 40 are not all multiples of 16)" in said


def test_routers_keep_their_precision() -> None:
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_local_experts=16, vocab_size=VOCABULARY,
        use_cache=False, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    programs = engine_of(MixtralForCausalLM(config))._state.base.stages[0].segments
    layers = dict(float8_layers(program.segment for program in programs))
    assert layers["model.layers.0.mlp.gate.weight"].startswith("a router")
    assert layers["model.layers.0.self_attn.q_proj.weight"] == ""


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    with pytest.raises(PlanError, match=r"float8, which A100 does not; use .* such as an L40S"):
        refuse_float8_on(torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 9))
    refuse_float8_on(torch.device("cuda"))
