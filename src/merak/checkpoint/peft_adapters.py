"""Adapters of peft, which are written alone, without the base model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.import_utils import is_peft_available

from merak.core.private_files import give_usual_modes

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


def write_adapters(
    model: nn.Module, state: Mapping[str, torch.Tensor], folder: Path, target: Path
) -> None:
    """Write the adapters as peft does, into a folder that `place_adapters` moves.

    Args:
        model: one of peft's.
        state: its state dict, with real tensors for the adapters.
        folder: where to write; replaced if it is there.
        target: the folder that it will be moved to.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (target / CARD).is_file():
        shutil.copy(target / CARD, folder / CARD)
    adapted: Any = model
    adapted.save_pretrained(folder, state_dict=dict(state))


def place_adapters(folder: Path, target: Path) -> None:
    """Move every file to its place in the target folder, and leave other files there alone."""
    give_usual_modes(folder)
    for path in sorted(folder.rglob("*")):
        place = target / path.relative_to(folder)
        if path.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    shutil.rmtree(folder)
