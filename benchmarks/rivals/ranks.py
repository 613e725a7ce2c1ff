"""The part that all frameworks share: a rank's loop over the families, and its comparison.

Every rank writes a line of JSON for each family: which parameters it has compared, and the
largest difference of a gradient from one process, relative to the largest number in it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from tools.families import FAMILIES, Family, expected_gradients

Found = Mapping[str, torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]]
"""By name of a parameter: its whole gradient; or a shard of it, and what that may be equal to."""


SMALLEST = 1e-3
"""Gradients this much smaller than the largest one of the model are held to its scale instead.

Some are zero but for rounding, as of a key's bias, which shifts all scores of a query alike.
"""

Gradients = dict[str, torch.Tensor]
Step = Callable[[Family, Gradients], Found]
"""One step of a framework: gets a family, and the gradients of one process to find shards in."""


def main(gradients: Step, prepare: Callable[[], None] | None = None) -> None:
    """Compare the gradients of this rank with those of one process.

    The words of the command line are a folder for the answers, and names of families.

    Args:
        gradients: trains one step and returns what this rank has.
        prepare: what the framework needs before; torch's gloo group by default.
    """
    warnings.simplefilter("ignore")
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    (prepare or start)()
    rank = int(os.environ["RANK"])
    for name in names:
        answer = compared(FAMILIES[name], gradients)
        with Path(folder, f"rank{rank}.jsonl").open("a") as lines:
            print(json.dumps({"family": name, **answer}), file=lines)
        if "error" in answer and answer["where"] == "step":
            os._exit(3)  # peers may wait for this rank: the next family gets fresh ranks
    dist.barrier()


def start() -> None:
    """Join the other ranks."""
    dist.init_process_group("gloo")


class SetUpError(Exception):
    """A model that a framework could not lay out, before any rank waits for another."""


def compared(family: Family, gradients: Step) -> dict[str, object]:
    """One family: the names compared and the worst of them, or the error."""
    expected = expected_gradients(family)
    try:
        found = gradients(family, expected)
    except Exception as error:
        cause = root_of(error)
        where = "set-up" if isinstance(error, SetUpError) else "step"
        if os.environ.get("SHOW_TRACEBACKS"):
            traceback.print_exception(error)
        return {"error": f"{type(cause).__name__}: {' '.join(str(cause).split())}", "where": where}
    least = SMALLEST * max(float(gradient.abs().max()) for gradient in expected.values())
    differences = {n: difference(value, expected[n], least) for n, value in found.items()}
    return {"differences": differences, "parameters": [*same_parameters(family).values()]}


def root_of(error: BaseException) -> BaseException:
    """The error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def same_parameters(family: Family) -> dict[int, list[str]]:
    """The names of each parameter: tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in family.model().named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def difference(found: object, expected: torch.Tensor, least: float) -> float:
    """The largest difference relative to the largest number; infinite where shapes differ.

    Args:
        found: a whole gradient; or a shard, and what that may be equal to.
        expected: of one process.
        least: smaller gradients are held to this number.
    """
    if isinstance(found, tuple):
        shard, candidates = found
        return min((difference(shard, one, least) for one in candidates), default=float("inf"))
    assert isinstance(found, torch.Tensor)
    if found.shape != expected.shape:
        return float("inf")
    scale = max(float(expected.abs().max()), least) or 1.0
    return float((found - expected).abs().max()) / scale


def shards_of(expected: torch.Tensor, like: torch.Tensor) -> list[torch.Tensor]:
    """What this rank's shard of a gradient may be: a chunk of a dimension, or of parts of it.

    Fused weights (queries, keys and values in one) are cut part by part.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if expected.shape == like.shape:
        return [expected]
    found = []
    for dim in range(expected.dim()):
        for parts in (1, 2, 3):
            size = expected.shape[dim]
            if size % (parts * ranks) or size // ranks != like.shape[dim]:
                continue
            pieces = [part.chunk(ranks, dim)[rank] for part in expected.chunk(parts, dim)]
            found.append(torch.cat(pieces, dim))
    return found
