import pytest

from merak.core.errors import ShardError
from merak.graph.tensor_parallel.apply import tensor_parallel
from merak.graph.tensor_parallel.features import Column, Replicate, Row
from merak.graph.tensor_parallel.hf_tp_plan import features_from_plan, given_plan
from tests.unit.graph import tensor_parallel_cases as cases
from tests.unit.graph.architectures import ARCHITECTURES

LLAMA = ARCHITECTURES["llama"]


def test_styles_become_attributes() -> None:
    plan = {"q": "colwise", "o": "rowwise", "up": "packed_colwise", "n": "replicate"}
    plan["head"] = "colwise_gather_output"
    assert features_from_plan(plan) == {
        "q": Column(),
        "o": Row(),
        "up": Column(parts=(1, 1)),
        "n": Replicate(),
    }


def test_a_style_that_nobody_knows() -> None:
    with pytest.raises(ShardError, match=r"gives 'q' the style 'sideways', which Merak does not"):
        features_from_plan({"q": "sideways"})


def test_only_a_plan_that_was_given_counts() -> None:
    assert given_plan(LLAMA.build()) is None
    model = LLAMA.build(base_model_tp_plan={"layers.0.mlp.*": "replicate"})
    features = given_plan(model)
    assert features == {"layers.0.mlp.*": Replicate()}
    weights = tensor_parallel(cases.traced(model, LLAMA.batch()), features, 2).weights
    assert not any("layers.0.mlp" in name for name in weights)
    assert any("layers.1.mlp" in name for name in weights)


def test_a_plan_of_transformers_own_fits_the_graph() -> None:
    model = LLAMA.build()
    features = features_from_plan(type(model.config).base_model_tp_plan)
    graph = cases.traced(model, LLAMA.batch())
    derived = tensor_parallel(graph, None, 2).weights
    assert tensor_parallel(graph, features, 2).weights == derived


def test_a_wrong_plan_is_refused_with_the_operator_that_breaks_it() -> None:
    phi3 = ARCHITECTURES["phi3"]
    graph = cases.traced(phi3.build(), phi3.batch())
    features = features_from_plan({"layers.*.self_attn.qkv_proj": "colwise"})
    message = r"at slice\w* \(aten\.slice\.Tensor, in model\.layers\.0\.self_attn, .*takes 0 … 64"
    with pytest.raises(ShardError, match=message):
        tensor_parallel(graph, features, 2)
