"""Checkpoints to resume from: saved under one layout of ranks, loaded under any other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from merak.checkpoint.dcp import State, load_shards, read_index, save_shards, shape_of, shard_of
from merak.checkpoint.optimizer_state import (
    PREFIX,
    fill_optimizer,
    hyperparameters,
    optimizer_shards,
    optimizer_targets,
)
from merak.checkpoint.writing import why_not_written
from merak.core.errors import SavingError, WeightsError
from merak.core.health.status import during
from merak.core.mesh import Mesh
from merak.core.shards import OptimizerTensor, ParameterShard
from merak.graph.weights.holders import RankView, find_holders, rank_view
from merak.graph.weights.rank_agreement import gather_objects

GROUPS = "optimizer_groups"
"""The key of the optimizer's hyperparameters, by parameter name."""


@during("saving parameters and optimizer")
def save_state(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    owned: Collection[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    optimizer_tensors: Mapping[str, OptimizerTensor] | None = None,
) -> None:
    """Save parameters, buffers and optimizer, each rank its own; collective.

    Everything is stored by parameter name and as shards of the whole, so that any layout can load
    it. The folder appears, or replaces the former checkpoint, when all of it has been written.

    Args:
        folder: a folder for this alone, seen by all ranks.
        model: the user's model, holding this rank's parameters.
        optimizer: over parameters of the model; None to save the model alone.
        owned: names of the parameters and buffers that this rank holds.
        shards: layouts of those of which it holds a shard.
        mesh: the grid of ranks.
        optimizer_tensors: what the optimizer steps of this rank's parameters, where not those
            themselves.

    Raises:
        WeightsError: the folder cannot be written or holds other files, or the optimizer has
            parameters that the model does not have.
    """
    target = Path(folder)
    unfinished = target.with_name(f".{target.name}.partial")
    view = rank_view(model, owned, shards, mesh, optimizer_tensors)
    state = _model_shards(view, _buffers_to_save(model, owned, shards, mesh))

    def start() -> None:
        if optimizer is not None:
            state.update(optimizer_shards(optimizer, view))
        if mesh.rank == 0:
            _start(target, unfinished)

    _together(start, target)
    if optimizer is not None:
        by_rank = gather_objects(hyperparameters(optimizer, view))
        if mesh.rank == 0:
            state[GROUPS] = {name: group for groups in by_rank for name, group in groups.items()}
    try:
        _together(partial(save_shards, unfinished, state), target)
        finish = partial(_replace, unfinished, target) if mesh.rank == 0 else _nothing
        _together(finish, target)
    except WeightsError:
        if mesh.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # of no use, and large
        raise


@during("loading parameters and optimizer")
def load_state(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    owned: Collection[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    optimizer_tensors: Mapping[str, OptimizerTensor] | None = None,
) -> None:
    """Load a checkpoint of `save_state` in place, in this layout; collective.

    Args:
        folder: the folder given to `save_state`.
        model: the user's model, holding this rank's parameters.
        optimizer: over parameters of the model; None to load the model alone.
        owned: names of the parameters and buffers that this rank holds.
        shards: layouts of those of which it holds a shard.
        mesh: the grid of ranks.
        optimizer_tensors: what the optimizer steps of this rank's parameters, where not those
            themselves.

    Raises:
        WeightsError: the folder holds no complete checkpoint, or that of another model, or no
            optimizer where one is to be loaded.
    """
    target = Path(folder)
    view = rank_view(model, owned, shards, mesh, optimizer_tensors)
    state: State = {}
    tensors: dict[str, torch.Tensor] = {}

    def prepare() -> None:
        index = _index_of(target)
        state.update(_model_shards(view, view.buffers))
        _check_shapes(state, index, target)
        if optimizer is None:
            return
        if GROUPS not in index.state_dict_metadata:
            raise WeightsError(
                f"{target} was saved without an optimizer; load it with optimizer=None."
            )
        targets, memory = optimizer_targets(optimizer, view, index)
        state.update({GROUPS: None, **targets})
        tensors.update(memory)

    _together(prepare, target, "read")
    _together(partial(load_shards, target, state), target, "read")
    _refresh_masters(view)
    if optimizer is not None:
        loaded = {k: tensors.get(k, v) for k, v in state.items() if k.startswith(PREFIX)}
        fill = partial(fill_optimizer, optimizer, view, loaded, state[GROUPS])
        _together(fill, target, "loaded")


def _refresh_masters(view: RankView) -> None:
    """Copy the loaded parameters into their float32 masters, until those are loaded themselves."""
    for name, found in view.optimizer_tensors.items():
        if found.is_master:
            data = view.tensors[name].detach()
            if found.rows is not None:
                data = (data if data.dim() else data.view(1))[found.rows.start : found.rows.stop]
            found.tensor.detach().copy_(data)


def _index_of(target: Path) -> Metadata:
    index = read_index(target)
    if index is None:
        raise WeightsError(
            f"{target} holds no complete checkpoint (.metadata, which is written last, is missing);"
            " resume from another one."
        )
    return index


def _check_shapes(state: State, index: Metadata, target: Path) -> None:
    for key, part in state.items():
        if shape_of(index, key) != part.size:
            raise WeightsError(
                f"{key.removeprefix('model/')} has shape {part.size} in the model and "
                f"{shape_of(index, key) or 'no place'} in {target}; resume with the model it was "
                "saved from."
            )


def _model_shards(view: RankView, buffers: Collection[str]) -> State:
    return {
        f"model/{name}": shard_of(view.tensors[name], view.shards.get(name), view.shard_index)
        for name in sorted({*view.owned, *buffers})
    }


def _buffers_to_save(
    model: nn.Module, owned: Collection[str], shards: Mapping[str, ParameterShard], mesh: Mesh
) -> list[str]:
    """Buffers that this rank saves: its segments', and on rank 0 those that no segment reads."""
    holdings = find_holders(model, owned, shards, mesh)
    buffers = rank_view(model, owned, shards, mesh).buffers
    return [name for name in buffers if holdings[name].ranks[0] == mesh.rank]


def _together(action: Callable[[], None], target: Path, done: str = "written") -> None:
    """Run an action on every rank; if it fails on one, all ranks raise its error."""
    failure: tuple[str, bool] | None = None
    try:
        action()
    except WeightsError as error:
        failure = (str(error), isinstance(error, SavingError))
    except (Exception, CheckpointException) as error:  # which is no Exception
        reason = why_not_written(error, target) if done == "written" else None
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        named = reason or f"{type(cause).__name__}: {cause}"
        failure = (f"{target} could not be {done}: {named}.", reason is not None)
    failures = [found for found in gather_objects(failure) if found is not None]
    if failures:
        sentence, is_saving = failures[0]
        raise (SavingError if is_saving else WeightsError)(sentence)


def _nothing() -> None:
    pass


def _start(target: Path, unfinished: Path) -> None:
    if target.exists() and (
        not target.is_dir() or (any(target.iterdir()) and not read_index(target))
    ):
        raise WeightsError(
            f"{target} is there already and is no checkpoint of parameters and optimizer; save to "
            "a folder of its own."
        )
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _replace(unfinished: Path, target: Path) -> None:
    """Replace the old checkpoint by the new one in a single rename."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    unfinished.rename(target)
    shutil.rmtree(old, ignore_errors=True)
