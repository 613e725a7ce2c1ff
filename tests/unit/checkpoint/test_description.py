"""Models that a checkpoint fits, and those that it does not, though every shape agrees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from merak.checkpoint.description import describe_model, first_difference
from merak.graph.weights.empty_weights import empty_weights


def gpt2(**fields: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    with empty_weights():
        return GPT2LMHeadModel(GPT2Config(**{**sizes, **fields}))


class Heads(nn.Module):
    """Attention whose number of heads is in no shape."""

    def __init__(self, heads: int, rate: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(8, 8)
        self.drop = nn.Dropout(rate)


def difference(saved: nn.Module, now: nn.Module) -> str | None:
    stored = json.loads(json.dumps(describe_model(saved)))
    return first_difference(stored, json.loads(json.dumps(describe_model(now))))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n_head": 4}, "n_head is 2 in the checkpoint and 4 in the model"),
        ({"n_layer": 1}, "n_layer is 2 in the checkpoint and 1 in the model"),
        ({"activation_function": "relu"}, "activation_function is 'gelu_new' in the checkpoint"),
        ({"resid_pdrop": 0.0, "use_cache": False, "pad_token_id": 3}, None),
    ],
    ids=["heads", "layers", "activation", "what may change"],
)
def test_configs(fields: dict[str, Any], expected: str | None) -> None:
    found = difference(gpt2(), gpt2(**fields))
    assert found is None if expected is None else expected in str(found)


def test_a_field_that_the_forward_fills_in() -> None:
    def of(kind: str | None) -> nn.Module:
        return gpt2(problem_type=kind)

    trained = of("single_label_classification")
    assert difference(trained, of(None)) is None
    assert difference(of(None), trained) is None
    assert "problem_type is 'single_label" in str(difference(trained, of("regression")))


def test_plain_modules() -> None:
    inner = nn.Sequential(Heads(2, 0.1))
    assert difference(inner, nn.Sequential(Heads(2, 0.5))) is None
    told = "0.heads is 2 in the checkpoint and 4 in the model"
    assert difference(inner, nn.Sequential(Heads(4, 0.1))) == told
    assert difference(inner, nn.Sequential(Heads(2), nn.GELU())) == (
        "1.class is absent in the checkpoint and 'GELU' in the model"
    )
    assert difference(Heads(2), gpt2()) == (
        "class is 'Heads' in the checkpoint and 'GPT2LMHeadModel' in the model"
    )


class _Raises:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.parametrize("config", [{"hidden": 4}, _Raises(), "base", 3], ids=type)
def test_a_config_of_any_class(config: Any) -> None:
    model = nn.Linear(2, 2)
    vars(model)["config"] = config
    assert describe_model(model)["modules"][""]["in_features"] == 2
