"""Checkpoints of every layout, as they were written once: `python -m tests.golden.formats`.

The files beside them are in tests/golden/files.py; the command writes both. They are written when
the format gains something that none of them has, each once: what is here has to load for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import merak
from tests import optimizers

STORED = Path(__file__).parent / "checkpoints" / "layouts"
LOSSES = STORED / "losses.json"
"""Losses of the steps after each, by folder."""

STEPS = 2
"""Before a checkpoint, and after it."""


@dataclass(frozen=True)
class Writing:
    """How a checkpoint was written.

    Args:
        degrees: of the mesh.
        options: of `parallelize`.
        optimizer: its class.
        dtype: of the weights.
        tied: whether the embedding is the head.
    """

    degrees: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"
    dtype: str = "float32"
    tied: bool = True


WRITINGS = {
    "one": Writing({}),
    "dp": Writing({"dp": 2}),
    "zero1": Writing({"dp": 2}, {"zero": 1}),
    "zero2-masters": Writing({"dp": 2}, {"zero": 2, "master_weights": True}, dtype="bfloat16"),
    "zero3": Writing({"dp": 2}, {"zero": 3}),
    "tp": Writing({"tp": 2}),
    "tp-whole-tensors": Writing({"tp": 2}, optimizer="Lamb"),
    "cp": Writing({"cp": 2}),
    "ep": Writing({"dp": 2, "ep": 2}, {"zero": 1}),
    "pp": Writing({"pp": 2}),
    "interleaved": Writing({"pp": 2}, {"schedule": "interleaved_1f1b"}),
    "versions": Writing({"pp": 2}, {"schedule": "pipedream_2bw"}, tied=False),
}
"""By folder."""


def model(dtype: str, tied: bool) -> torch.nn.Module:
    """A mixture of experts of two thousand numbers."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=16, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=16, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    return MixtralForCausalLM(config).to(getattr(torch, dtype))


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(16, (8, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def optimizer_of(name: str) -> Any:
    if name == "AdamW":
        return partial(torch.optim.AdamW, lr=1e-2)
    return partial(getattr(optimizers, name), lr=1e-2)


def losses(writing: Writing, steps: range, load: str | None, save: str | None) -> list[float]:
    """What a rank of a job sees, from a checkpoint or from the start."""
    mesh = merak.init(**writing.degrees, device="cpu")
    replicas = writing.degrees.get("dp", 1)

    def own(step: int) -> dict[str, torch.Tensor]:
        return {
            name: column.chunk(replicas)[mesh.dp_rank] for name, column in batch_of(step).items()
        }

    parallel = merak.parallelize(
        model(writing.dtype, writing.tied), own(0), num_microbatches=4 // replicas,
        optimizer=optimizer_of(writing.optimizer), **writing.options,
    )  # fmt: skip
    if load is not None:
        parallel.load_checkpoint(load)
    found = [float(parallel.step(own(step))) for step in steps]
    if save is not None:
        parallel.save_checkpoint(save)
    return found


def num_ranks(writing: Writing) -> int:
    """Ranks of a job; those of `ep` are replicas."""
    return max(writing.degrees.values(), default=1)


def main() -> None:
    """Write the checkpoints that are not there, and the losses that follow them; and the files."""
    import tests.conftest  # noqa: F401, the settings of processes that compute
    from tests.golden.files import write_missing
    from tests.multirank.ranks import RankPool

    pool = RankPool()
    known = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    for name in sorted(WRITINGS.keys() - known.keys()):
        folder, writing = STORED / name, WRITINGS[name]
        ranks = num_ranks(writing)
        pool.run(losses, ranks, writing, range(STEPS), None, str(folder))
        (then, *_) = pool.run(losses, ranks, writing, range(STEPS, 2 * STEPS), str(folder), None)
        known[name] = then
        LOSSES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    pool.close()
    write_missing()


if __name__ == "__main__":
    main()
