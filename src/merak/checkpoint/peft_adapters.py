"""Adapters of peft, which are written alone, without the base model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_peft_available

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
    for adapter in adapted.peft_config:
        chosen = get_peft_model_state_dict(adapted, state_dict=dict(state), adapter_name=adapter)
        needed |= {names[id(tensor)] for tensor in chosen.values() if id(tensor) in names}
    return sorted(needed)


def write_adapters(model: nn.Module, state: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters as peft does; also in a thread, beside the training.

    Args:
        model: one of peft's.
        state: its state dict, with real tensors for the adapters.
        folder: where to write; a model card that is there is updated.
    """
    adapted: Any = model
    # Its class's method: that of a model that is laid out refuses, also while training goes on.
    type(adapted).save_pretrained(adapted, folder, state_dict=dict(state))


def copy_card(source: Path, folder: Path) -> None:
    """Copy the model card of a folder, for peft to update it, if there is one.

    Args:
        source: the folder of the card.
        folder: where to copy it.
    """
    if (source / CARD).is_file():
        shutil.copy(source / CARD, folder / CARD)
