"""Saving and resuming: transformers' checkpoints, whose weights lie on many ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from merak.checkpoint.export import save_pretrained
from merak.checkpoint.state import load_state, save_state
from merak.core.mesh import Mesh
from merak.engine.engine import Engine


class Saving(Trainer):
    """The part of `MerakTrainer` that writes and reads folders."""

    mesh: Mesh
    engine: Engine | None
