"""Tensors of a Hugging Face folder, and the tensors of the model that each is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from merak.core.errors import WeightsError
from merak.core.tensor_meta import TensorMeta
from merak.graph.weights.deferred_init import InitRecorder
from merak.graph.weights.holders import TensorHolders, first_names, named_tensors

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file.

    Args:
        meta: its shape and type.
        sources: keys of the state dict of the tensors it is made of.
        converted: whether transformers converts the sources; else there is one, written as it is.
    """

    meta: TensorMeta
    sources: tuple[str, ...]
    converted: bool


def check_saves(model: nn.Module) -> None:
    """Refuse a model that cannot be written as a Hugging Face folder.

    Args:
        model: the user's model, with or without weights.

    Raises:
        WeightsError: it has adapters of transformers' own, or a state dict of more than tensors.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise WeightsError(
            "The model has adapters, which save_pretrained of merak does not write; merge them "
            "into the model first."
        )
    firsts = first_names(named_tensors(model))
    for key, value in model.state_dict(keep_vars=True).items():
        if key not in firsts:
            raise WeightsError(
                f"{key} of the state dict is neither a parameter nor a buffer but "
                f"{type(value).__name__}, which safetensors cannot hold; leave it out of the "
                "state dict."
            )


def meta_state(model: nn.Module, holdings: Mapping[str, TensorHolders]) -> State:
    """The state dict that is written, as whole tensors on the meta device.

    Args:
        model: the user's model.
        holdings: the holders of its tensors.

    Raises:
        WeightsError: a parameter that no rank holds.
    """
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


def file_tensors(model: nn.Module, state: State) -> dict[str, FileTensor]:
    """The tensors to write by their keys in the files, and the sources of each.

    transformers reverts the conversions of its loading; the sources of each tensor come from a
    record of the operators that do so.

    Args:
        model: the user's model.
        state: as `meta_state` gives it.
    """
    recorder = InitRecorder()
    names = {recorder.view_of(tensor): name for name, tensor in state.items()}
    by_storage = {view.storage: name for view, name in names.items()}
    with recorder:
        converted = convert_back(model, state)
    found = {}
    for key, tensor in converted.items():
        view = recorder.view_of(tensor)
        storages = sorted(recorder.tape.touched([view]))
        sources = tuple(by_storage[s] for s in storages if s in by_storage)
        found[key] = FileTensor(TensorMeta(view.shape, view.dtype), sources, view not in names)
    return found


def convert_back(model: nn.Module, state: State) -> State:
    """Revert the conversions with which transformers loads a model.

    Args:
        model: the user's model.
        state: some whole tensors of its state dict.
    """
    if not isinstance(model, PreTrainedModel):
        return state
    converted: State = revert_weight_conversion(model, state)
    return converted
