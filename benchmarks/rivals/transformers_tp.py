"""transformers: `from_pretrained(tp_plan="auto")` shards a model that has a plan over two ranks."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from tools.families import MICROBATCHES, Family, microbatches

from rivals import ranks


def gradients(family: Family, expected: ranks.Gradients) -> ranks.Found:
    with tempfile.TemporaryDirectory() as folder:
        whole = family.model()
        shared = [folder]
        dist.broadcast_object_list(shared)  # transformers saves on rank 0 alone
        whole.save_pretrained(shared[0])  # type: ignore[operator]
        dist.barrier()
        try:
            model = type(whole).from_pretrained(shared[0], tp_plan="auto").train()  # type: ignore
        except Exception as error:
            raise ranks.SetUpError from error
        dist.barrier()
    for part in microbatches(family.batch()):
        (model(**part).loss / MICROBATCHES).backward()
    named = model.named_parameters(remove_duplicate=False)
    found = {name: p.grad for name, p in named if p.grad is not None}
    return {name: of_rank(own, expected[name]) for name, own in found.items()}


def of_rank(
    own: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole gradient of a DTensor, or a shard and what it may be equal to."""
    if hasattr(own, "full_tensor"):
        own = own.full_tensor()
    return own if own.shape == expected.shape else (own, ranks.shards_of(expected, own))


if __name__ == "__main__":
    ranks.main(gradients)
