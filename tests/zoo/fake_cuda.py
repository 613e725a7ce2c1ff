"""Trace architectures for GPUs, on fake tensors: `python -m tests.zoo.fake_cuda [NAME …]`.

It needs a torch with CUDA and no GPU. Each architecture is traced for the CPU and for a GPU, in
bfloat16 autocast; a GPU's trace may fail only where the CPU's does, and has as many attention
operators. Ends with 1 where one differs. `make compat` runs it.
"""

from __future__ import annotations

import argparse
import sys
import time
from unittest import mock

import torch
import transformers

import merak
from merak.zoo.model_source import resolve_model
from merak.zoo.workload import example_workload

NAMES = (
    "GPT2LMHeadModel LlamaForCausalLM Qwen3ForCausalLM MixtralForCausalLM Gemma2ForCausalLM "
    "BertForMaskedLM T5ForConditionalGeneration BartForConditionalGeneration "
    "ViTForImageClassification MambaForCausalLM"
).split()


def attention_of(name: str, device: str) -> tuple[int, int]:
    """How many nodes a trace has, and how many of them are attention.

    Args:
        name: of the architecture.
        device: "cpu" or "cuda".
    """
    source = resolve_model(name)
    workload = example_workload(
        source, global_batch=2, autocast=torch.bfloat16, device=torch.device(device)
    )
    nodes = [str(node.target) for own in workload.graph(1).segments for node in own.graph.nodes]
    return len(nodes), sum("scaled_dot_product" in target for target in nodes)


def line_of(name: str) -> tuple[bool, str]:
    """Whether both traces agree, and what they have."""
    found, texts = [], []
    for device in ("cpu", "cuda"):
        started = time.process_time()
        try:
            own = attention_of(name, device)
            found.append((True, own[1]))
            seconds = time.process_time() - started
            texts.append(f"{device}: {own[0]} nodes, {own[1]} of attention, {seconds:.1f} s")
        except Exception as error:
            found.append((False, 0))
            texts.append(f"{device}: {type(error).__name__}: {str(error)[:300]}")
    return found[0] == found[1], "; ".join(texts)


def main() -> None:
    """Trace all that are named, or some of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    names = parser.parse_args().names
    if not torch.backends.cuda.is_built():
        sys.exit("this torch has no CUDA; use one from the package index, such as torch==2.11.0")
    transformers.logging.set_verbosity_error()
    merak.init(device="cpu")
    wrong = 0
    with (  # what torch asks a driver for
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch("torch.cuda.is_bf16_supported", lambda **_: True),
    ):
        for name in names:
            agrees, text = line_of(name)
            wrong += not agrees
            print(f"{'' if agrees else 'DIFFERS '}{name}: {text}", flush=True)
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
