"""What a small version hides: how much of a model tensor parallelism splits at its real widths."""

import transformers

from merak.check import Layout
from merak.check.real_widths import RealWidths, layer_of
from merak.zoo.request import Request
from merak.zoo.widths_by_name import sharded_at_real_widths


def at_real_widths(tp: int, **given: int) -> RealWidths:
    request = Request("LlamaForCausalLM", {"hidden_size": 768, **given})
    return sharded_at_real_widths(request, Layout(tp=tp), {})


def test_widths_are_the_models_own() -> None:
    found = at_real_widths(4, num_attention_heads=12, intermediate_size=2048)
    config = transformers.LlamaConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=2048
    )
    layers = 2 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768)
    assert config.num_hidden_layers > 2
    assert found.parameters == layers + 2 * 32_000 * 768 + 768
    assert (found.tokens, found.tp) == (1024, 4)
    assert found.split > 0.99
    assert (found.forward, found.backward) == (2, 2)
    assert not found.whole


def test_a_degree_that_does_not_divide_the_heads_is_seen() -> None:
    found = at_real_widths(8, num_attention_heads=12, intermediate_size=2048, vocab_size=1024)
    assert not any("self_attn" in name for name in found.whole)
    assert found.undivided == (
        "tp=8 does not divide the outputs of q_proj.weight, k_proj.weight and v_proj.weight (12 "
        "pieces): groups of 2 ranks hold and compute the same ones; tp=4 would divide all"
    )
    whole = at_real_widths(7, num_attention_heads=12, intermediate_size=2058, vocab_size=1024)
    assert whole.split < 0.9
    assert any("q_proj" in name for name in whole.whole)
    assert "(12 pieces): every rank holds and computes them whole" in str(whole.undivided)
    assert at_real_widths(4, num_attention_heads=12, intermediate_size=2048).undivided is None


def test_parameters_that_nothing_reads_do_not_count() -> None:
    # A decoder alone is given no encoder's output, which its cross-attention would read.
    request = Request("BartForCausalLM", {"d_model": 512})
    found = sharded_at_real_widths(request, Layout(tp=2), {})
    assert found.split > 0.95


def test_segments_of_a_layer_count_together() -> None:
    assert layer_of("model.layers.3.self_attn") == layer_of("model.layers.3.mlp")
    assert layer_of("lm_head") == "lm_head"
