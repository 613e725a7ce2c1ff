"""Workloads of architectures by name: the columns that their parameters need."""

from __future__ import annotations

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

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
