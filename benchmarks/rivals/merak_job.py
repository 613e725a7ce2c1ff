"""Merak: `merak.parallelize` lays the unmodified model out, in the degrees of DEGREES."""

from __future__ import annotations

import json
import os

from tools.families import MICROBATCHES, Family

import merak
from merak.core.mesh import current_mesh
from merak.core.shards import take
from rivals import ranks

DEGREES: dict[str, int] = json.loads(os.environ.get("DEGREES", '{"pp": 2}'))


def start() -> None:
    merak.init(**DEGREES)


def gradients(family: Family, expected: ranks.Gradients) -> ranks.Found:
    batch = family.batch()
    try:
        parallel = merak.parallelize(family.model(), batch, num_microbatches=MICROBATCHES)
    except Exception as error:
        raise ranks.SetUpError from error
    parallel.step(batch)
    found = {n: p.grad for n, p in parallel.engine.parameters.items() if p.grad is not None}
    shards, rank = parallel.engine.shards, current_mesh().shard_rank
    return {
        name: (own, [take(expected[name], shards[name], rank)]) if name in shards else own
        for name, own in found.items()
    }


if __name__ == "__main__":
    ranks.main(gradients, start)
