"""Hugging Face folders: the whole model, gathered from its shards on many ranks."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as bars

from merak.checkpoint.peft_adapters import (
    adapter_keys,
    has_adapters,
    place_adapters,
    write_adapters,
)
from merak.checkpoint.writing import why_not_written
from merak.core.errors import SavingError, WeightsError
from merak.core.health.status import during, waiting
from merak.core.mesh import Mesh
from merak.core.private_files import give_usual_modes
from merak.core.shards import ParameterShard, join
from merak.graph.weights.deferred_init import InitRecorder
from merak.graph.weights.holders import (
    TensorHolders,
    find_holders,
    first_names,
    named_tensors,
    shard_shape,
)
from merak.graph.weights.rank_agreement import gather_objects, transfer_device

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Key:
    """One tensor to be written.

    Args:
        shape: sizes of its dims.
        dtype: its element type.
        sources: keys of the state dict of the tensors it is made of.
        converted: whether transformers converts the sources; else there is one, written as it is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    converted: bool


@during("saving the model")
def save_pretrained(
    model: nn.Module,
    owned: Collection[str],
    shards: Mapping[str, ParameterShard],
    mesh: Mesh,
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the whole model from the shards of all ranks; collective.

    A transformers model is written as its own `save_pretrained` does: config, generation config and
    safetensors under the standard names; of one of peft's the adapters alone; of any other module
    the state dict. Rank 0 writes, and holds no more than one file's worth of other ranks' tensors.
    The folder appears, or its files are replaced, when all of it has been written.

    Args:
        model: the user's model, holding this rank's parameters.
        owned: names of the parameters and buffers that this rank holds.
        shards: layouts of those of which it holds a shard.
        mesh: the grid of ranks.
        folder: where to write; seen by rank 0.
        max_shard_size: the most that one file holds, in bytes or as "5GB".

    Raises:
        WeightsError: a parameter that no rank holds, or a folder that cannot be written.
    """
    target = Path(folder)
    partial_folder = target.with_name(f".{target.name}.partial")
    _refuse_adapters(model)
    holdings = find_holders(model, owned, shards, mesh)
    if has_adapters(model):
        _save_adapters(model, holdings, mesh, target, partial_folder)
        return
    keys = _plan_keys(model, _meta_state(model, holdings))
    files, index = _plan_files(keys, max_shard_size)
    gatherer = _Gatherer(model, holdings, mesh)
    failure = None
    if mesh.rank == 0:
        failure = _attempt(partial(_start, model, target, partial_folder), target)
    for file, names in files.items():
        state = {}
        for source in dict.fromkeys(source for name in names for source in keys[name].sources):
            state[source] = gatherer.whole(source)
        if mesh.rank == 0 and failure is None:
            chosen = {name: keys[name] for name in names}
            failure = _attempt(partial(_write, model, chosen, state, partial_folder / file), target)
        del state
    if mesh.rank == 0:
        failure = failure or _attempt(partial(_finish, partial_folder, target, index), target)
        shutil.rmtree(partial_folder, ignore_errors=True)
    failure = gather_objects(failure)[0]
    if failure is not None:
        raise SavingError(f"The model could not be saved in {target}: {failure}.")


def _save_adapters(
    model: nn.Module,
    holdings: Mapping[str, TensorHolders],
    mesh: Mesh,
    target: Path,
    partial_folder: Path,
) -> None:
    """Write the adapters, of which rank 0 holds all."""
    state = _meta_state(model, holdings)
    gatherer = _Gatherer(model, holdings, mesh)
    for key in adapter_keys(model, state):
        state[key] = gatherer.whole(key)
    failure = None
    if mesh.rank == 0:
        failure = _attempt(partial(write_adapters, model, state, partial_folder, target), target)
        failure = failure or _attempt(partial(place_adapters, partial_folder, target), target)
        shutil.rmtree(partial_folder, ignore_errors=True)
    failure = gather_objects(failure)[0]
    if failure is not None:
        raise SavingError(f"The adapters could not be saved in {target}: {failure}.")


def check_saves(model: nn.Module) -> None:
    """Refuse a model that `save_pretrained` cannot write, which is known before it is trained.

    Args:
        model: the user's model, with or without weights.

    Raises:
        WeightsError: it has adapters of transformers' own, or a state dict of more than tensors.
    """
    _refuse_adapters(model)
    _check_keys(model)


def _refuse_adapters(model: nn.Module) -> None:
    if getattr(model, "_hf_peft_config_loaded", False):
        raise WeightsError(
            "The model has adapters, which save_pretrained of merak does not write; merge them "
            "into the model first."
        )


def _check_keys(model: nn.Module) -> None:
    firsts = first_names(named_tensors(model))
    for key, value in model.state_dict(keep_vars=True).items():
        if key not in firsts:
            raise WeightsError(
                f"{key} of the state dict is neither a parameter nor a buffer but "
                f"{type(value).__name__}, which safetensors cannot hold; leave it out of the "
                "state dict."
            )


def _attempt(step: Callable[[], None], target: Path) -> str | None:
    """Run a step; returns the reason of its failure, which the other ranks must learn."""
    try:
        step()
    except Exception as error:
        return why_not_written(error, target) or f"{type(error).__name__}: {error}"
    return None


def _meta_state(model: nn.Module, holdings: Mapping[str, TensorHolders]) -> State:
    """The state dict to write, whole tensors on the meta device."""
    _check_keys(model)
    firsts = first_names(named_tensors(model))
    state: State = {}
    for key in model.state_dict(keep_vars=True):
        holding = holdings.get(firsts[key])
        if holding is None:
            raise WeightsError(
                f"No rank holds {key}; the names given to save_pretrained must cover the model."
            )
        state[key] = torch.empty(holding.shape, dtype=holding.dtype, device="meta")
    if isinstance(model, PreTrainedModel):
        return _without_restored_keys(model, state, firsts)
    return state


def _without_restored_keys(
    model: PreTrainedModel, state: State, firsts: Mapping[str, str]
) -> State:
    """Drop the keys that loading restores: ignored ones, and further names of tied parameters."""
    ignored = set(model._keys_to_ignore_on_save or ())
    chosen: dict[str, str] = {}
    for key in sorted(state, key=lambda key: key in model.all_tied_weights_keys):
        chosen.setdefault(firsts[key], key)
    return {k: t for k, t in state.items() if k not in ignored and chosen[firsts[k]] == k}


def _plan_keys(model: nn.Module, state: State) -> dict[str, _Key]:
    """The tensors to write, and the sources of each.

    transformers reverts the conversions of its loading; the sources of each tensor come from a
    record of the operators that do so.
    """
    recorder = InitRecorder()
    names = {recorder.view_of(tensor): name for name, tensor in state.items()}
    by_storage = {view.storage: name for view, name in names.items()}
    with recorder:
        converted = _convert_back(model, state)
    keys = {}
    for key, tensor in converted.items():
        view = recorder.view_of(tensor)
        storages = sorted(recorder.tape.touched([view]))
        sources = tuple(by_storage[s] for s in storages if s in by_storage)
        keys[key] = _Key(view.shape, view.dtype, sources, view not in names)
    return keys


def _plan_files(
    keys: Mapping[str, _Key], max_shard_size: int | str
) -> tuple[dict[str, list[str]], str | None]:
    """Keys of each file, and the text of the index where there are several files."""
    tensors = {n: torch.empty(k.shape, dtype=k.dtype, device="meta") for n, k in keys.items()}
    split = split_torch_state_dict_into_shards(
        tensors,
        filename_pattern=SAFE_WEIGHTS_NAME.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    if not split.is_sharded:
        return split.filename_to_tensors, None
    total = sum(tensor.numel() for tensor in tensors.values())
    index = {
        "metadata": {"total_parameters": total, **split.metadata},
        "weight_map": split.tensor_to_filename,
    }
    return split.filename_to_tensors, json.dumps(index, indent=2, sort_keys=True) + "\n"


def _convert_back(model: nn.Module, state: State) -> State:
    if not isinstance(model, PreTrainedModel):
        return state
    converted: State = revert_weight_conversion(model, state)
    return converted


class _Gatherer:
    """Brings whole tensors to rank 0, asked for in the same order on every rank."""

    def __init__(self, model: nn.Module, holdings: Mapping[str, TensorHolders], mesh: Mesh) -> None:
        self._named = named_tensors(model)
        self._firsts = first_names(self._named)
        self._holdings = holdings
        self._mesh = mesh

    def whole(self, key: str) -> torch.Tensor:
        """A whole tensor of the state dict on rank 0's CPU; empty on other ranks."""
        name = self._firsts[key]
        holding = self._holdings[name]
        parts = [self._shard(name, holding, rank) for rank in holding.ranks]
        if self._mesh.rank != 0:
            return torch.empty(0)
        return parts[0] if holding.shard is None else join(parts, holding.shard)

    def _shard(self, name: str, holding: TensorHolders, rank: int) -> torch.Tensor:
        """One rank's part, on rank 0's CPU; anything on other ranks."""
        own = self._named[name].detach()
        if rank == self._mesh.rank == 0:
            return own.cpu()
        travel = transfer_device(self._mesh.device)
        if rank == self._mesh.rank:
            with waiting(f"{name} to be taken by", (0,)):
                dist.send(own.to(travel).contiguous(), dst=0)
        elif self._mesh.rank == 0:
            shape = shard_shape(holding.shape, holding.shard)
            part = torch.empty(shape, dtype=holding.dtype, device=travel)
            with waiting(f"{name} from", (rank,)):
                dist.recv(part, src=rank)
            return part.cpu()
        return own


def _start(model: nn.Module, target: Path, partial_folder: Path) -> None:
    """Make the temporary folder and write all that is not weights."""
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    if isinstance(model, PreTrainedModel):
        with _without_bars():  # of weights, of which there are none here
            model.save_pretrained(partial_folder, state_dict={})
        (partial_folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Inside, transformers shows no progress bars."""
    if not bars.is_progress_bar_enabled():
        yield
        return
    with warnings.catch_warnings():  # that the user's environment has the last word
        warnings.simplefilter("ignore")
        bars.disable_progress_bar()
        try:
            yield
        finally:
            bars.enable_progress_bar()


def _write(model: nn.Module, keys: Mapping[str, _Key], state: State, path: Path) -> None:
    """Write one file."""
    made: State = {}
    for name, key in keys.items():
        if name in made:
            continue
        sources = {source: state[source] for source in key.sources}
        if key.converted:
            made.update(_convert_back(model, sources))
        else:
            made[name] = sources[key.sources[0]]
    save_file(_apart({name: made[name] for name in keys}), path, metadata={"format": "pt"})


def _apart(state: State) -> State:
    """Every tensor in memory of its own, as safetensors wants it; copied only where it is not."""
    seen: set[int] = set()
    apart: State = {}
    for name, tensor in state.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        apart[name] = tensor
    return apart


def _finish(partial_folder: Path, target: Path, index: str | None) -> None:
    """Let the folder take its place, or its files theirs in a folder that is there already."""
    if index is not None:
        (partial_folder / SAFE_WEIGHTS_INDEX_NAME).write_text(index, encoding="utf-8")
    give_usual_modes(partial_folder)
    if not target.exists():
        partial_folder.rename(target)
        return
    new = {path.name for path in partial_folder.iterdir()}
    stale = {path.name for path in target.glob("model*.safetensors*")} - new
    for name in sorted(new):
        os.replace(partial_folder / name, target / name)
    for name in stale:
        (target / name).unlink()
    partial_folder.rmdir()
