"""Checkpoints that transformers' own Trainer wrote: what one process needs to go on.

The weights are in safetensors files under the names of the state dict; `optimizer.pt` numbers the
parameters in the order of the optimizer's groups. Its files of torch are read as weights alone,
which runs no code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from transformers import PreTrainedModel

from merak.checkpoint.manifest import MANIFEST
from merak.checkpoint.optimizer_state import MASTER, PREFIX
from merak.checkpoint.pretrained.trainer_files import (
    OPTIMIZER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
from merak.checkpoint.storage import ReaderOfOneLoad
from merak.core.errors import WeightsError
from merak.core.files.json_file import read_json
from merak.core.health.status import during
from merak.core.kinds import fits
from merak.graph.weights.holders import RankView, first_names, full_shape, named_tensors
from merak.graph.weights.pretrained import CheckpointTensor, Entry, read_headers, stored_tensors

SMALL = {"scheduler": SCHEDULER_NAME, "loss_scale": SCALER_NAME}
"""Small values by the file that holds each."""

OTHERS = {
    "adapter_model.safetensors": "it holds adapters alone",
    "pytorch_model_fsdp*": "it was saved under FSDP",
    "global_step*": "it was saved under DeepSpeed",
    "zero_to_fp32.py": "it was saved under DeepSpeed",
    "pytorch_model.bin*": "its weights are no safetensors files",
}
"""Files and folders of checkpoints that are not read, and the reason."""

Order = Sequence[Sequence[str]]
"""Names of the whole model's parameters by group of the optimizer, as one process has them."""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """Files of such a checkpoint, opened.

    Args:
        folder: of them.
        entries: tensors of the weights' files.
        optimizer: state dict of the optimizer, its tensors mapped from the file; None for none.
        values: small values by name.
    """

    folder: Path
    entries: Sequence[Entry]
    optimizer: Mapping[str, Any] | None
    values: Mapping[str, Any]


def is_of_trainer(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that transformers' own Trainer wrote."""
    names = (OPTIMIZER_NAME, TRAINING_ARGS_NAME)
    return not (folder / MANIFEST).exists() and any((folder / name).is_file() for name in names)


def open_of_trainer(folder: Path) -> TrainerFiles:
    """Open a checkpoint of transformers' own Trainer.

    Raises:
        WeightsError: it is of a kind that is not read, or damaged.
    """
    files = sorted(map(str, folder.glob("model*.safetensors")))
    for pattern, reason in OTHERS.items():
        if any(folder.glob(pattern)) or any(folder.glob(f"*/{pattern}")):
            raise _not_read(folder, reason)
    if not files:
        raise _not_read(folder, "it has no model.safetensors")
    try:
        entries = read_headers(files)
        _check_state(folder / TRAINER_STATE_NAME)
        optimizer = _torch_file(folder / OPTIMIZER_NAME)
        values = {name: _torch_file(folder / file) for name, file in SMALL.items()}
    except Exception as cause:  # whatever a damaged file may lead to
        message = " ".join(str(cause).split())[:120] or type(cause).__name__
        raise WeightsError(
            f"{folder} is damaged ({message}); resume from another checkpoint."
        ) from cause
    if optimizer is not None and values["scheduler"] is None:
        raise WeightsError(
            f"{folder} is damaged (it has no {SCHEDULER_NAME}); resume from another."
        )
    return TrainerFiles(folder, entries, optimizer, {n: v for n, v in values.items() if v})


def _check_state(file: Path) -> None:
    """Refuse a state of the trainer that transformers could not read, where there is one."""
    if not os.path.lexists(file):
        return
    state = read_json(file, finite=False)
    if not isinstance(state, dict) or not fits(state.get("global_step"), int):
        raise ValueError(f"{file.name} has no number of steps")


def _torch_file(file: Path) -> Any:
    """Content of a file of torch, read as weights alone; None where there is none."""
    if not file.is_file():
        return None
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _not_read(folder: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"{folder} was written by transformers' Trainer, and {reason}, so no training can go on "
        "from it here; load its weights (from_pretrained) and start a new training."
    )


def with_names(
    files: TrainerFiles, model: nn.Module, view: RankView, order: Order | None
) -> tuple[dict[str, Any], TrainerReader]:
    """Rename the states of such a checkpoint to parameter names, as in Merak's own.

    Args:
        files: of the checkpoint.
        model: the user's model, as this rank holds it.
        view: tensors of this rank.
        order: of the optimizer that is to be loaded; None to load the model alone.

    Returns:
        Small values, and a reader of the tensors.

    Raises:
        WeightsError: it is a checkpoint of another model, or of an optimizer of other parameters.
    """
    sources = _weights(files, model)
    found: dict[str, Source] = {f"model/{name}": source for name, source in sources.items()}
    values = dict(files.values)
    if order is not None and files.optimizer is not None:
        numbers = _numbers(files, order)
        states: Mapping[int, Mapping[str, Any]] = files.optimizer["state"]
        own: dict[str, dict[str, Any]] = {}
        for name, number in numbers.items():
            if name not in view.owned:
                continue
            if view.optimizer_tensor(name).is_master and name in sources:
                found[f"{PREFIX}{name}/{MASTER}"] = sources[name]
            for key, value in states.get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    _check_shape(files.folder, name, key, value, view)
                    found[f"{PREFIX}{name}/{key}"] = _of_tensor(value)
                else:
                    own.setdefault(name, {})[key] = value
        values |= {"optimizer_groups": _groups(files.optimizer, order), "optimizer_values": own}
    return values, TrainerReader(found)


@dataclass(frozen=True, slots=True)
class Source:
    """Tensor of such a checkpoint, not read yet.

    Args:
        shape: of the whole.
        dtype: in the file.
        read: reads the whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    def metadata(self) -> TensorStorageMetadata:
        """The tensor as torch's distributed checkpoint knows it."""
        size = torch.Size(self.shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return TensorStorageMetadata(TensorProperties(dtype=self.dtype), size, [whole])


def _of_tensor(value: torch.Tensor) -> Source:
    return Source(tuple(value.shape), value.dtype, lambda: value)


def _weights(files: TrainerFiles, model: nn.Module) -> dict[str, Source]:
    """Weights by first name, converted as `from_pretrained` does."""
    firsts = first_names(named_tensors(model))
    stored = {one.key: CheckpointTensor(one.key, one) for one in files.entries}
    shapes = {one.key: one.shape for one in files.entries}
    unexpected = stored.keys() - firsts.keys()
    if isinstance(model, PreTrainedModel):
        stored, shapes, unexpected = stored_tensors(model, files.entries)
    if unexpected:
        raise WeightsError(
            f"{files.folder} is a checkpoint of another model: it has {min(unexpected)}, and the "
            "model has not; resume with the model it was saved from."
        )
    sources = {}
    for name, tensor in stored.items():
        made = tensor.source
        entry = made if isinstance(made, Entry) else made.entries[0][1]
        sources[firsts[name]] = Source(shapes[name], entry.dtype, tensor.read)
    return sources


def _numbers(files: TrainerFiles, order: Order) -> dict[str, int]:
    """Numbers of the parameters in the state dict of the optimizer, by name."""
    assert files.optimizer is not None
    groups = files.optimizer["param_groups"]
    there, here = [len(group["params"]) for group in groups], [len(names) for names in order]
    if there != here:
        raise WeightsError(
            f"{files.folder / OPTIMIZER_NAME} has groups of {_listed(there)} parameters, and the "
            f"optimizer here has groups of {_listed(here)}; resume with the same trainable "
            "parameters and the same groups."
        )
    return {
        name: number
        for group, names in zip(groups, order, strict=True)
        for name, number in zip(names, group["params"], strict=True)
    }


def _listed(counts: Sequence[int]) -> str:
    return " and ".join(map(str, counts))


def _groups(optimizer: Mapping[str, Any], order: Order) -> dict[str, dict[str, Any]]:
    """Hyperparameters by parameter name."""
    found: dict[str, dict[str, Any]] = {}
    for group, names in zip(optimizer["param_groups"], order, strict=True):
        values = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        found |= dict.fromkeys(names, values)
    return found


def _check_shape(folder: Path, name: str, key: str, value: torch.Tensor, view: RankView) -> None:
    """Check that a tensor of the optimizer may be one of this parameter."""
    shape = full_shape(view.tensors[name], view.shards.get(name))
    size = tuple(value.shape)
    if value.numel() > 1 and len(size) == len(shape) and size != shape and math.prod(shape) > 1:
        raise WeightsError(
            f"{key} of {name} has shape {size} in {folder / OPTIMIZER_NAME} and the parameter has "
            f"{shape}; resume with the model and the optimizer that it was saved with."
        )


class TrainerReader(ReaderOfOneLoad):
    """Reads boxes of tensors, each of which is read whole.

    Args:
        sources: the tensors by key.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__(Metadata({key: source.metadata() for key, source in sources.items()}))
        self._sources = sources

    @during("reading parameters and optimizer")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the boxes of a plan."""
        by_key: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_key.setdefault(item.storage_index.fqn, []).append(item)
        for key, items in by_key.items():
            whole = self._sources[key].read()
            for item in items:
                places = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                target.copy_(whole[tuple(slice(start, start + n) for start, n in places)])
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
