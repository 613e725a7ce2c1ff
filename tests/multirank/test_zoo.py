"""Architectures of the zoo, each unlike the others; `make zoo` checks all."""

from __future__ import annotations

import pytest

from merak.check import CheckOptions, Job, Layout
from merak.zoo.check_by_name import small_version
from merak.zoo.request import Request
from tests.multirank.check_on import check_on
from tests.multirank.ranks import RankPool
from tests.tiers import slow
from tests.zoo.architectures import architectures
from tests.zoo.run import Result
from tests.zoo.table import render

SAMPLE = {
    "BloomForCausalLM": "positions as a bias of attention",
    "DeepseekV3ForCausalLM": "latent attention, groups of experts",
    "FalconForCausalLM": "one key for all queries, attention beside the feed-forward",
    "Lfm2ForCausalLM": "short convolutions and attention in turn",
    "MambaForCausalLM": "a state-space model",
    "MixtralForCausalLM": "experts with routing by numbers",
    "NemotronHForCausalLM": "recurrences, attention and feed-forwards in a pattern",
    "PhimoeForCausalLM": "experts picked one after another",
    "Qwen3NextForCausalLM": "linear and full attention in turn, shared experts",
    "RecurrentGemmaForCausalLM": "a linear recurrence",
    "XLNetLMHeadModel": "relative positions, einsum",
    "AlbertForMaskedLM": "one layer that runs many times",
    "ConvBertForMaskedLM": "kernels that depend on the input",
    "DebertaV2ForMaskedLM": "attention to positions by gathering",
    "FNetForMaskedLM": "Fourier transforms",
    "NystromformerForMaskedLM": "landmarks and an iterated inverse",
    "LongT5ForConditionalGeneration": "attention in blocks",
    "T5ForConditionalGeneration": "an encoder that every layer of the decoder reads",
    "HieraForImageClassification": "units of masks, pooled queries",
    "SegformerForImageClassification": "keys of fewer places",
    "LlavaForConditionalGeneration": "images in a text",
    "Gemma3ForConditionalGeneration": "images in a text, whose tokens see each other",
    "InternVLForConditionalGeneration": "images in a text, of fewer tokens than patches",
}
"""What each of them adds to the others."""

LAYOUTS = (Layout(pp=2), Layout(tp=2))
ESSENTIAL = (
    "DeepseekV3ForCausalLM", "T5ForConditionalGeneration", "LlavaForConditionalGeneration",
)  # fmt: skip
"""Those that `make test` checks; `make test-all` checks all."""


@pytest.mark.parametrize("name", [n if n in ESSENTIAL else slow(n) for n in SAMPLE])
def test_gradients_of_an_architecture(pool: RankPool, name: str) -> None:
    options = CheckOptions(num_microbatches=2, steps=2)
    trained = small_version(Request(name), Layout(tp=2, pp=2), options)
    if "images" in SAMPLE[name]:
        assert "pixel_values" in trained.job.case.batch(0, 1)
    for layout in LAYOUTS:
        job = Job(trained.job.case, layout, options)
        report = check_on(pool, job, trained.outcome)
        assert report.segments >= 3


def test_the_lists_are_those_of_transformers() -> None:
    found = architectures()
    assert set(SAMPLE) <= set(found)
    assert found["ResNet"] == found["DiT"] == "plain PyTorch"
    assert len(found) > 300


def test_the_page_tells_what_was_found() -> None:
    report = {"ok": True, "segments": 5, "gradient_max_rel_diff": 2e-7, "tp_sharded_fraction": 0.5}
    wrong = report | {"ok": False, "gradient_max_rel_diff": 0.3, "reason": "a | wrong_one"}
    results = [
        Result("A", "pp=2", report),
        Result("A", "tp=2", report),
        Result("A", "evaluate", report | {"evaluation_max_rel_diff": 3e-6}),
        Result("B", "pp=2", wrong),
        Result("C", "eager", reason="EagerError: /x/site-packages/torch/y.py: never"),
    ]
    tasks = {"A": "causal LM", "B": "causal LM", "C": "masked LM", "D": "masked LM"}
    page = "".join(render({(r.architecture, r.layout): r for r in results}, tasks))
    assert "| causal LM | 2 | 0 | 2 | 1 of 2 | 1 of 1 |  | 1 of 1 |" in page
    assert "| `A` | yes | 2e-07 | 2e-07 (50%) |  | 3e-06 |" in page
    assert "| `B` | yes | **differs** 3e-01 |  |  |  |" in page
    assert "| `C` | not trained |" in page and "| `D` | not run |" in page
    assert "- `B`: a \\| wrong\\_one\n- `C`: torch/y.py: never\n" in page
