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
from merak.graph.weights.laid_out import StandIn, like

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
    names = dict(enumerate(state))
    # Full of their numbers, which tell what a result is a part of, in no memory of their own.
    marked = {n: torch.tensor(float(i)).expand(state[n].shape) for i, n in names.items()}
    needed = {name for name, p in model.named_parameters() if p.requires_grad and name in state}
    for adapter, config in adapted.peft_config.items():
        if config.is_prompt_learning:  # of which peft saves what the encoder computes
            needed |= {name for name in state if name.startswith(f"{_PROMPTS}.{adapter}.")}
            continue
        chosen = get_peft_model_state_dict(adapted, state_dict=marked, adapter_name=adapter)
        firsts = (part[(0,) * part.dim()].item() for part in chosen.values() if part.numel())
        needed |= {names[int(number)] for number in firsts}
    return sorted(needed)


def shown_to_peft(model: nn.Module) -> nn.Module:
    """A copy of a model's modules, which share its tensors and keep methods of their own.

    Those of a model that is laid out refuse, also in a thread while training goes on.

    Args:
        model: the user's.
    """
    made: nn.Module = type(model).__new__(type(model))
    own = {name: value for name, value in vars(model).items() if not isinstance(value, StandIn)}
    inner = {n: None if m is None else shown_to_peft(m) for n, m in model._modules.items()}
    vars(made).update(own, _modules=inner)
    return made


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
        model: one of peft's, as of `shown_to_peft`.
        state: its state dict, with real tensors for the adapters.
        folder: where to write; a model card that is there is updated.
    """
    shown: Any = _with_prompts(model, state)
    shown.save_pretrained(folder, state_dict=dict(state))


def copy_card(source: Path, folder: Path) -> None:
    """Copy the model card of a folder, for peft to update it, if there is one.

    Args:
        source: the folder of the card.
        folder: where to copy it.
    """
    if (source / CARD).is_file():
        shutil.copy(source / CARD, folder / CARD)
