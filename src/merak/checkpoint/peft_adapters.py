"""Adapters of peft, which are written alone, without the base model."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_peft_available

from merak.graph.weights.holders import named_tensors
from merak.graph.weights.laid_out import like

_PROMPTS = "prompt_encoder"
"""Modules of peft's that compute prompts, by adapter."""

CARD = "README.md"
"""Model card, which peft updates where there is one."""


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is one of peft's, of which transformers' Trainer saves the adapters alone."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def adapter_keys(model: nn.Module, state: Mapping[str, torch.Tensor]) -> list[str]:
    """Keys of the state dict that the adapters are made of.

    Args:
        model: one of peft's.
        state: its state dict, on any device, meta included.
    """
    from peft import get_peft_model_state_dict

    adapted: Any = model
    names = {id(tensor): name for name, tensor in state.items()}
    needed = {name for name, p in model.named_parameters() if p.requires_grad and name in state}
    for adapter, config in adapted.peft_config.items():
        if config.is_prompt_learning:  # of which peft saves what the encoder computes
            needed |= {name for name in state if name.startswith(f"{_PROMPTS}.{adapter}.")}
            continue
        chosen = get_peft_model_state_dict(adapted, state_dict=dict(state), adapter_name=adapter)
        needed |= {names[id(tensor)] for tensor in chosen.values() if id(tensor) in names}
    return sorted(needed)


def _with_prompts(model: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model with encoders of prompts that have the values of a state dict."""
    adapted: Any = model
    encoders = getattr(adapted, _PROMPTS, None)
    if not isinstance(encoders, nn.Module):
        return model
    values = {
        id(own): like(own, state[f"{_PROMPTS}.{name}"])
        for name, own in named_tensors(encoders).items()
        if f"{_PROMPTS}.{name}" in state
    }
    shown = copy.copy(model)  # the model itself may be training
    vars(shown)["_modules"] = {
        **model._modules,
        _PROMPTS: copy.deepcopy(encoders, {**values}),
    }
    return shown


def write_adapters(model: nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters as peft does; also in a thread, beside the training.

    Args:
        model: one of peft's.
        state: its state dict, with real tensors for the adapters.
        folder: where to write; a model card that is there is updated.
    """
    adapted: Any = model
    # Its class's method: that of a model that is laid out refuses, also while training goes on.
    shown: Any = _with_prompts(model, state)
    type(adapted).save_pretrained(shown, folder, state_dict=dict(state))


def copy_card(source: Path, folder: Path) -> None:
    """Copy the model card of a folder, for peft to update it, if there is one.

    Args:
        source: the folder of the card.
        folder: where to copy it.
    """
    if (source / CARD).is_file():
        shutil.copy(source / CARD, folder / CARD)
