"""DeepSpeed: AutoTP shards the unmodified model over two ranks (`tensor_parallel.autotp_size`).

With `PRESET=yes` in the environment, families that have a preset of DeepSpeed's get it.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import deepspeed.comm.torch
import torch
from tools.families import FAMILIES, MICROBATCHES, SAMPLES, Family, microbatches

from rivals import ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES // MICROBATCHES,
    "gradient_accumulation_steps": MICROBATCHES,
    "zero_optimization": {"stage": 0},
    "tensor_parallel": {"autotp_size": 2},
    "gradient_clipping": 0.0,
}

PRESETS = {
    "Bloom": "bloom", "Llama": "llama", "Llama, tied": "llama", "Mistral": "llama",
    "Qwen3": "qwen2", "Phi-3": "phi3", "Mixtral": "mixtral", "Qwen3-MoE": "mixtral",
}  # fmt: skip
"""`tensor_parallel.preset_model` of each family whose modules have the names of one."""


def start() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Gloo instead, which needs no compiler.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")


def preset_of(family: Family) -> dict[str, str]:
    """The preset of a family, where presets are asked for."""
    names = [name for name, own in FAMILIES.items() if own is family and name in PRESETS]
    return {"preset_model": PRESETS[names[0]]} if names and "PRESET" in os.environ else {}


def gradients(family: Family, expected: ranks.Gradients) -> ranks.Found:
    try:
        optimizer = torch.optim.SGD
        model = family.model()
        config = CONFIG | {"tensor_parallel": {"autotp_size": 2, **preset_of(family)}}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer(model.parameters(), lr=0.0), config=config
        )
    except Exception as error:
        raise ranks.SetUpError from error
    for part in microbatches(family.batch()):
        engine.backward(engine(**part).loss)
    named = engine.module.named_parameters(remove_duplicate=False)
    found = {name: p.grad for name, p in named if p.grad is not None}
    return {name: (own, ranks.shards_of(expected[name], own)) for name, own in found.items()}


if __name__ == "__main__":
    ranks.main(gradients, start)
