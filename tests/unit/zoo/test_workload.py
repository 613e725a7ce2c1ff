"""Workloads of architectures by name: the columns that their parameters need."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from merak.graph.trace.opaque.report import report_opaque
from merak.zoo.model_source import ModelSource
from merak.zoo.workload import example_workload

WHISPER = ModelSource(
    WhisperForConditionalGeneration,
    WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=64,
        max_source_positions=16, max_target_positions=16, num_mel_bins=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    None,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_have_the_type_of_the_parameters_and_tokens_their_own(dtype):
    workload = example_workload(WHISPER, global_batch=2, sequence=8, dtype=dtype)
    columns = dict(workload.columns(2))
    assert columns["input_features"].dtype == dtype
    assert columns["labels"].dtype == torch.int64
    assert workload.graph(1).segments  # whose convolution takes no features of another type


class Checked(nn.Embedding):
    """Looks at its tokens, of which made-up ones are all 0 or 1."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if int(ids.max()) < 2:
            raise ValueError("a text of one word")
        return super().forward(ids)


class CheckedGPT2(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer.wte = Checked(config.vocab_size, config.n_embd)


def test_modules_that_check_their_inputs_are_measured_on_an_example_batch():
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    workload = example_workload(ModelSource(CheckedGPT2, config, None), global_batch=2)
    graph = workload.graph(1)
    assert [one.module for one in report_opaque(graph)] == ["transformer.wte"]
    assert len(graph.segments) > 2
