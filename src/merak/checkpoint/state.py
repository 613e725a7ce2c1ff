"""Parameters, buffers and optimizer of a rank, saved under one layout and loaded under any other.

Everything goes by parameter name, and tensors are shards of the whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from merak.checkpoint.description import describe_model, first_difference
from merak.checkpoint.formats.of_trainer import Order, with_names
from merak.checkpoint.manifest import MODEL
from merak.checkpoint.optimizer_state import (
    fill_optimizer,
    hyperparameters,
    optimizer_shards,
    optimizer_targets,
    optimizer_values,
    refuse_other_class,
)
from merak.checkpoint.saved import SavedCheckpoint, open_checkpoint
from merak.checkpoint.shards import Shards, shard_of
from merak.checkpoint.storage import load_shards
from merak.checkpoint.values import pack_value
from merak.checkpoint.writing import together
from merak.core.errors import WeightsError
from merak.core.health.status import during
from merak.core.mesh import Mesh
from merak.core.shards import OptimizerTensor, ParameterShard
from merak.graph.weights.holders import RankView, find_holders, rank_view

OUTER = "outer/"
"""Keys of the momentum of DiLoCo's outer optimizer are `outer/parameter name`."""


@dataclass(frozen=True, slots=True)
class RankState:
    """Tensors of a model and its optimizer that a rank holds.

    Args:
        model: the user's model, holding this rank's parameters.
        optimizer: over parameters of the model; None to save or load the model alone.
        owned: names of the parameters and buffers that this rank holds.
        shards: layouts of those of which it holds a shard.
        mesh: the grid of ranks.
        optimizer_tensors: what the optimizer steps of this rank's parameters, where not those
            themselves.
        description: of the model, from before its forward ran, which may write into its config;
            None for what it is now.
        further: further tensors of the training by key, saved and loaded with the optimizer: the
            parameter whose shards they are laid out like, None for tensors of their own.
        reset: begins anew with those of `further` that a checkpoint does not have, by their keys.
        outer_momenta: of an outer optimizer, by parameter name, shaped as what the optimizer steps.
        whole_tensors: whole parameters that the optimizer steps on this rank for all that have
            pieces of them, by name.
        order: of the parameters in the optimizer's groups, for checkpoints of transformers' own
            Trainer; None where it is not known.
    """

    model: nn.Module
    optimizer: Optimizer | None
    owned: Collection[str]
    shards: Mapping[str, ParameterShard]
    mesh: Mesh
    optimizer_tensors: Mapping[str, OptimizerTensor] = field(default_factory=dict)
    description: Mapping[str, Any] | None = None
    further: Mapping[str, tuple[str | None, torch.Tensor]] = field(default_factory=dict)
    reset: Callable[[Collection[str]], None] | None = None
    outer_momenta: Mapping[str, torch.Tensor] = field(default_factory=dict)
    order: Order | None = None
    whole_tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def view(self) -> RankView:
        """Return the tensors of this rank by name."""
        held = (self.owned, self.shards, self.mesh, self.optimizer_tensors, self.whole_tensors)
        return rank_view(self.model, *held)


def held_shards(state: RankState, buffers: Collection[str]) -> Shards:
    """Return the shards that a rank can save.

    Args:
        state: of the rank.
        buffers: names of the buffers that it saves; see `buffers_to_save`.
    """
    view = state.view()
    shards = _model_shards(view, buffers)
    if state.optimizer is not None:
        shards |= optimizer_shards(state.optimizer, view) | _further_shards(state, view)
    return shards | _outer_shards(state, view)


def held_values(state: RankState) -> dict[str, dict[str, Any]]:
    """Return what a rank's optimizer has beside tensors, packed, by parameter name; its class."""
    if state.optimizer is None:
        return {}
    view = state.view()
    groups, values = hyperparameters(state.optimizer, view), optimizer_values(state.optimizer, view)
    return {
        "optimizer_groups": {name: _packed(name, group) for name, group in groups.items()},
        "optimizer_values": {name: _packed(name, group) for name, group in values.items()},
        "optimizer_class": {type(state.optimizer).__name__: True} if groups else {},
    }


def merged_values(by_rank: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Merge what `held_values` returned on all ranks; equal groups are stored once."""
    merged: dict[str, dict[str, Any]] = {}
    for values in by_rank:
        for kind, by_name in values.items():
            merged.setdefault(kind, {}).update(by_name)
    if not merged:
        return {}
    by_content: dict[str, list[str]] = {}
    for name, group in sorted(merged["optimizer_groups"].items()):
        by_content.setdefault(json.dumps(group), []).append(name)
    own_values = [[name, own] for name, own in sorted(merged["optimizer_values"].items())]
    return {
        "optimizer_groups": [[names, json.loads(text)] for text, names in by_content.items()],
        "optimizer_values": {"dict": own_values},
        "optimizer_class": sorted(merged["optimizer_class"]),
    }


def _packed(name: str, values: Mapping[str, Any]) -> Any:
    return pack_value(values, f"the optimizer's state of {name}")


def buffers_to_save(state: RankState) -> list[str]:
    """Buffers that this rank saves: its segments', and on rank 0 those that no segment reads.

    Collective.
    """
    holdings = find_holders(state.model, state.owned, state.shards, state.mesh)
    return [name for name in state.view().buffers if holdings[name].ranks[0] == state.mesh.rank]


@during("loading parameters and optimizer")
def load_state(
    folder: str | os.PathLike[str], state: RankState, allow_pickled: bool = False
) -> Mapping[str, Any]:
    """Load a checkpoint in place, in this layout; collective.

    Args:
        folder: of the checkpoint.
        state: of this rank, which is filled.
        allow_pickled: whether to read a checkpoint of the format before this one, whose index can
            run code.

    Returns:
        The small values that the checkpoint holds, such as "scheduler".

    Raises:
        WeightsError: the folder holds no checkpoint, or that of another model, or no optimizer
            where one is to be loaded.
    """
    target = Path(folder)
    found: list[SavedCheckpoint] = []
    wanted: Shards = {}
    tensors: dict[str, torch.Tensor] = {}
    absent: list[str] = []

    def prepare() -> None:
        view = state.view()
        saved = _with_keys(open_checkpoint(target, allow_pickled), state, view)
        found.append(saved)
        check_model(saved, state.description or describe_model(state.model), view)
        wanted.update(_model_shards(view, view.buffers))
        _check_shapes(wanted, saved)
        if state.optimizer is None:
            return
        if saved.values.get("optimizer_groups") is None:
            raise WeightsError(
                f"{folder} was saved without an optimizer, so no training can go on from it; start "
                "a new one from its weights."
            )
        refuse_other_class(state.optimizer, saved.values, saved.metadata, folder)
        shards, memory = optimizer_targets(state.optimizer, view, saved.metadata)
        wanted.update(shards)
        tensors.update(memory)
        further = _further_shards(state, view)
        stored = {key: own for key, own in further.items() if saved.shape(key) == own.size}
        wanted.update(stored)
        absent.extend(key for key in further if key not in stored)
        outer = _outer_shards(state, view)
        held = saved.metadata.state_dict_metadata
        wanted.update({key: shard for key, shard in outer.items() if key in held})

    together(prepare, target, "read")
    (saved,) = found
    together(partial(load_shards, saved.reader, wanted), target, "read")
    together(partial(_fill, state, tensors, saved), target, "read")
    if absent and state.reset is not None:
        state.reset(absent)
    return saved.values


def _with_keys(saved: SavedCheckpoint, state: RankState, view: RankView) -> SavedCheckpoint:
    """The checkpoint with keys as Merak's own have, where it is transformers' own Trainer's."""
    files = saved.of_trainer
    if files is None:
        return saved
    if state.optimizer is not None and files.optimizer is not None and state.order is None:
        raise WeightsError(
            f"{saved.folder} was written by transformers' Trainer, which numbers the parameters of "
            "the optimizer, and their order is not known here; resume with MerakTrainer and an "
            "optimizer over the same groups, or start a new training from its weights."
        )
    order = state.order if state.optimizer is not None else None
    values, reader = with_names(files, state.model, view, order)
    return replace(saved, metadata=reader.read_metadata(), values=values, reader=reader)


def check_model(
    saved: SavedCheckpoint, description: Mapping[str, Any], view: RankView | None = None
) -> None:
    """Check that a checkpoint is one of this model.

    Args:
        saved: the checkpoint.
        description: of the user's model.
        view: of a rank, with the names of all tensors of the model; None to compare descriptions.

    Raises:
        WeightsError: it is of another model; with the first difference.
    """
    difference = None
    if saved.model is not None:
        difference = first_difference(saved.model, json.loads(json.dumps(description)))
    if difference is None and view is not None:
        stored = {k.removeprefix(MODEL) for k in saved.metadata.state_dict_metadata
                  if k.startswith(MODEL)}  # fmt: skip
        if only_stored := sorted(stored - view.tensors.keys()):
            difference = f"it has {only_stored[0]}, and the model has not"
    if difference is not None:
        raise WeightsError(
            f"{saved.folder} is a checkpoint of another model: {difference}; resume with the model "
            "it was saved from, or start a new training from its weights (merak export)."
        )


def _check_shapes(wanted: Shards, saved: SavedCheckpoint) -> None:
    for key, shard in wanted.items():
        if saved.shape(key) != shard.size:
            raise WeightsError(
                f"{key.removeprefix(MODEL)} has shape {shard.size} in the model and "
                f"{saved.shape(key) or 'no place'} in {saved.folder}; resume with the model it was "
                "saved from."
            )


def _fill(state: RankState, tensors: Mapping[str, torch.Tensor], saved: SavedCheckpoint) -> None:
    """Give masters and the optimizer what was loaded for them."""
    view = state.view()
    for name, found in view.optimizer_tensors.items():
        if found.is_master or found.is_copy:  # until its own value is loaded, if it was saved
            data = view.tensors[name].detach()
            if found.rows is not None:
                data = (data if data.dim() else data.view(1))[found.rows.start : found.rows.stop]
            found.tensor.detach().copy_(data)
    if state.optimizer is not None:
        groups, values = saved.values["optimizer_groups"], saved.values["optimizer_values"]
        held = {name: own for name, own in values.items() if name in view.owned}
        fill_optimizer(state.optimizer, view, tensors, held, groups)


def _further_shards(state: RankState, view: RankView) -> Shards:
    return {
        key: shard_of(tensor, view.shards.get(like) if like else None, view.shard_index)
        for key, (like, tensor) in state.further.items()
    }


def _outer_shards(state: RankState, view: RankView) -> Shards:
    return {
        f"{OUTER}{name}": shard_of(momentum, view.shards.get(name), view.shard_index)
        for name, momentum in state.outer_momenta.items()
    }


def _model_shards(view: RankView, buffers: Collection[str]) -> Shards:
    return {
        f"{MODEL}{name}": shard_of(view.tensors[name], view.shards.get(name), view.shard_index)
        for name in sorted({*view.owned, *buffers})
    }
