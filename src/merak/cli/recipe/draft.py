"""Arguments of a recipe's job, before its ranks are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from merak.arguments.draft import DraftArguments
from merak.cli.recipe.schema import Recipe
from merak.core.elastic import AUTO_PLAN, Degrees, GivenDegrees, check_expert_degree
from merak.core.mesh import Mesh, pretended

AUTO_BF16 = "auto"
"""What `bf16` of a recipe may be besides true and false: true on GPUs that have it."""


def settings(recipe: Recipe, device: torch.device, has_bf16: bool | None = None) -> dict[str, Any]:
    """Return the training settings of a recipe as `MerakArguments` takes them.

    Args:
        recipe: of the job.
        device: that the ranks compute on; it need not be here.
        has_bf16: whether devices that are planned for have bfloat16; None for `device`.
    """
    # Throughput is measured in input tokens, so they are counted unless the recipe says no.
    found = {"include_num_input_tokens_seen": "all", **recipe.arguments}
    if found.get("bf16") == AUTO_BF16:
        has_bf16 = _has_bf16(device) if has_bf16 is None else has_bf16
        found["bf16"] = not found.get("fp16") and has_bf16
    return found


def _has_bf16(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type == "cuda"
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def draft_of(
    recipe: Recipe, device: torch.device, ranks: int, has_bf16: bool | None = None
) -> tuple[Mesh, DraftArguments]:
    """Return the mesh of a recipe's job, and its arguments, checked as every rank checks them.

    Args:
        recipe: of the job.
        device: that the ranks compute on; it need not be here.
        ranks: of the job, for `plan: auto`.
        has_bf16: as of `settings`.

    Raises:
        MerakError: degrees or arguments that cannot be honoured.
    """
    degrees = recipe.parallel.axes()
    ep = check_expert_degree(recipe.parallel.ep, Degrees(**degrees))
    axes = degrees["dp"], degrees["tp"], degrees["pp"]
    mesh = Mesh(*axes, rank=0, device=device, device_mesh=None, cp=degrees["cp"], ep=ep)
    if recipe.plan == AUTO_PLAN:
        given = GivenDegrees(recipe.parallel.dp, recipe.parallel.tp, recipe.parallel.pp)
        given.check_ranks(ranks)
        mesh = replace(mesh, dp=ranks, tp=1, pp=1, given=given)
    with pretended(mesh):
        return mesh, DraftArguments(**settings(recipe, device, has_bf16))
