"""Case of a check: a model that is the same in every process, and its batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from merak.graph.trace.calls.call import LossFunction

_PROBABILITIES = ("drop", "noise", "jitter", "mask_time_prob", "mask_feature_prob")
"""Parts of the names of attributes that hold a probability, or the size, of random draws."""

_FACTORS = "_rescale"
"""Ends the names of attributes that hold the most, and one over the least, of a factor drawn."""


@dataclass(frozen=True, slots=True)
class Case:
    """Model to check, and its batches; sent to other processes by pickle.

    Args:
        name: what to call it, such as its class.
        build: makes the model; seeded before, so that every process makes the same one.
        batch: the batch of all replicas for a step and a number of samples.
        loss_fn: `loss_fn(outputs, batch) -> loss`, where the model computes no loss itself.
        loss_columns: columns that go to the loss function alone, not to the model.
        fixed: further arguments of the model that are no tensors.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, torch.Tensor]]
    loss_fn: LossFunction | None = None
    loss_columns: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def model(self, seed: int) -> nn.Module:
        """Build the model in train mode, without randomness, the same for the same seed.

        Random numbers differ between one process and a pipeline, where microbatches meet segments
        in another order; so dropout and noise are switched off.
        """
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        model = self.build().train()
        disable_randomness(model)
        return model


def disable_randomness(model: nn.Module) -> None:
    """Set every probability of dropout, layer drop and noise of a model, and of its config, to 0.

    Factors that are drawn become 1.

    Args:
        model: the model; its modules' attributes and their configs change in place.
    """
    configs: dict[int, object] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_probabilities(module)
        for name, value in vars(module).items():
            if name == "config" or name.endswith("_config"):
                configs[id(value)] = value
    for config in configs.values():
        _zero_probabilities(config)


def _zero_probabilities(owner: object) -> None:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(value, float) and any(part in name.lower() for part in _PROBABILITIES):
            setattr(owner, name, 0.0)
        if isinstance(value, float) and name.endswith(_FACTORS):
            setattr(owner, name, 1.0)
