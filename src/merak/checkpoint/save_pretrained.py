"""Hugging Face folders: the whole model, written by many ranks from their shards."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from merak.checkpoint.model_files import ModelFiles, attempt, plan_model_files, without_bars
from merak.checkpoint.peft_adapters import copy_card, has_adapters
from merak.checkpoint.pretrained.file_tensors import check_saves
from merak.checkpoint.pretrained.placing import place_folder, start_folder, unfinished_folder
from merak.core.errors import SavingError
from merak.core.health.status import during, waiting
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard
from merak.graph.weights.holders import find_holders, rank_view
from merak.graph.weights.laid_out import methods_allowed
from merak.graph.weights.rank_agreement import gather_objects


@during("saving the model")
def save_pretrained(
    model: nn.Module,
    owned: Collection[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    folder: str | os.PathLike[str],
    max_shard_size: int | str | None = None,
) -> None:
    """Write the whole model from the shards of all ranks; collective.

    A transformers model is written as its own `save_pretrained` does: config, generation config and
    safetensors under the standard names; of one of peft's the adapters alone; of any other module
    the state dict. Every file is written by one rank that sees the folder and holds most of it; a
    rank has few tensors of others at a time. The folder appears, or its files are replaced, when
    all of it has been written and checked.

    Args:
        model: the user's model, holding this rank's parameters.
        owned: names of the parameters and buffers that this rank holds.
        shards: layouts of those of which it holds a shard.
        mesh: the grid of ranks.
        folder: where to write; seen by rank 0.
        max_shard_size: the most that one file holds, in bytes or as "5GB"; by default as
            `plan_model_files` says.

    Raises:
        WeightsError: a parameter that no rank holds, or a folder that cannot be written.
    """
    with methods_allowed(model):
        _save(model, owned, shards, mesh, Path(folder), max_shard_size)


def _save(
    model: nn.Module,
    owned: Collection[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    target: Path,
    max_shard_size: int | str | None,
) -> None:
    check_saves(model)
    what = "adapters" if has_adapters(model) else "model"
    holdings = find_holders(model, owned, shards, mesh)
    tensors = rank_view(model, owned, shards, mesh).tensors
    unfinished = unfinished_folder(target)
    try:
        writers = ranks_that_see(target, unfinished, mesh, what)
        plan = plan_model_files(model, holdings, mesh, max_shard_size, writers)
        plan.write(tensors, unfinished, wait=waiting, target=target)
        on_rank0(partial(_finish, plan, unfinished, target), target, mesh, what)
    finally:
        if mesh.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)


def save_whole(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a model with all of its weights, as `save_pretrained` does, from one process.

    Args:
        model: whole, on the CPU.
        folder: where to write; it appears, or its files are replaced, when all is written.

    Raises:
        SavingError: it could not be written.
        WeightsError: the model cannot be written.
    """
    check_saves(model)
    target = Path(folder)
    unfinished = unfinished_folder(target)
    saves: Any = model

    def write() -> None:
        start_folder(target, unfinished)
        copy_card(target, unfinished)
        if isinstance(model, PreTrainedModel) or has_adapters(model):
            with without_bars():
                saves.save_pretrained(unfinished)
        else:
            apart = {key: value.clone() for key, value in model.state_dict().items()}
            save_file(apart, unfinished / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        place_folder(unfinished, target)

    try:
        failure = attempt(write, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if failure is not None:
        raise SavingError(f"The model could not be saved in {target}: {failure}.")


def ranks_that_see(target: Path, unfinished: Path, mesh: Mesh, what: str) -> list[int]:
    """Make the hidden folder of a target on rank 0; collective.

    Args:
        target: the folder that is to appear.
        unfinished: the hidden folder.
        mesh: the grid of ranks.
        what: is saved, as a noun.

    Returns:
        The ranks that see it, perhaps on other hosts.

    Raises:
        SavingError: it cannot be made.
    """
    mark = f"seen-{secrets.token_hex(8)}"

    def start() -> None:
        start_folder(target, unfinished)
        (unfinished / mark).touch()
        copy_card(target, unfinished)

    mark = gather_objects(mark)[0]
    on_rank0(start, target, mesh, what)
    seen = gather_objects((unfinished / mark).exists())
    if mesh.rank == 0:
        (unfinished / mark).unlink()
    return [rank for rank, sees in enumerate(seen) if sees]


def on_rank0(step: Callable[[], None], target: Path, mesh: Mesh, what: str) -> None:
    """Run a step on rank 0, which all ranks wait for; if it fails, all of them raise its error.

    Args:
        step: what to run.
        target: the folder that it writes into.
        mesh: the grid of ranks.
        what: is saved, as a noun.

    Raises:
        SavingError: it has failed.
    """
    failure = attempt(step, target) if mesh.rank == 0 else None
    failure = gather_objects(failure)[0]
    if failure is not None:
        raise SavingError(f"The {what} could not be saved in {target}: {failure}.")


def _finish(plan: ModelFiles, unfinished: Path, target: Path) -> None:
    """Write what is beside the weights, check all files, and let them take their places."""
    plan.write_companions(unfinished)
    plan.check(unfinished)
    place_folder(unfinished, target)
