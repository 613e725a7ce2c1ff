"""Checks of evaluations and checkpoints before the first step, hours before they happen."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import Trainer

from merak.arguments.folders import (
    check_shared_folder,
    check_space,
    check_url,
    warn_of_space,
)
from merak.checkpoint.pretrained.file_tensors import check_saves
from merak.core.errors import WeightsError
from merak.core.mesh import Mesh
from merak.core.rank0 import warn_on_rank0
from merak.core.tensor_meta import TensorMeta
from merak.data import check_not_empty, example_batch
from merak.graph.weights.holders import named_tensors
from merak.plan.cost.optimizer_memory import measure_step
from merak.trainer.columns import check_batch
from merak.trainer.optimizer_like import similar_optimizer

logger = logging.getLogger(__name__)


def check_output(trainer: Trainer, mesh: Mesh) -> None:
    """Refuse an output folder in which this training's checkpoints cannot be saved; a collective.

    Args:
        trainer: with its model and arguments.
        mesh: of the job.

    Raises:
        ArgumentsError: ranks do not share it or cannot write it, or there is no room.
    """
    args: Any = trainer.args  # of Merak, whatever transformers declares
    saves = saves_checkpoints(trainer)
    is_remote = saves and args.checkpoint_url is not None
    check_shared_folder(str(args.output_dir), mesh, saves=saves and not is_remote)
    if is_remote:
        check_url(args.checkpoint_url, mesh)
    elif saves:
        least = least_checkpoint_bytes(trainer)
        check_space(str(args.output_dir), mesh, least, args.save_total_limit or 1)
    if leaves_last_weights(trainer, mesh):
        warn_of_space(str(args.output_dir), mesh, _weight_bytes(trainer))


def _weight_bytes(trainer: Trainer) -> int:
    """Bytes of the whole model's state dict."""
    model: Any = trainer.model
    if model is None:
        return 0
    named = named_tensors(model)
    found = {id(t): t.numel() * t.element_size() for t in named.values()}
    return sum(found.values())


def saves_checkpoints(trainer: Trainer) -> bool:
    """Whether this training saves checkpoints.

    Args:
        trainer: with its arguments.
    """
    strategy = trainer.args.save_strategy
    return str(getattr(strategy, "value", strategy)) != "no"


def leaves_last_weights(trainer: Trainer, mesh: Mesh) -> bool:
    """Whether this training leaves its last weights on disk: where each rank has a part of them.

    Args:
        trainer: with its arguments.
        mesh: of the job.
    """
    args: Any = trainer.args  # of Merak, whatever transformers declares
    is_in_parts = mesh.world_size > mesh.dp or (args.zero == 3 and mesh.dp > 1)
    return bool(args.save_last_weights and is_in_parts)


def least_checkpoint_bytes(trainer: Trainer) -> int:
    """Bytes that a checkpoint takes at least: trained parameters and their optimizer states.

    Frozen parameters may not be saved, nor is the state of an optimizer of the user's own known.

    Args:
        trainer: with its model and arguments.
    """
    model: Any = trainer.model
    if model is None:  # released behind a trial of a search; `model_init` makes the next
        return 0
    metas = [TensorMeta(tuple(p.shape), p.dtype) for p in model.parameters() if p.requires_grad]
    weights = sum(meta.num_bytes for meta in metas)
    if trainer.args.save_only_model or trainer.optimizer is not None:
        return weights
    counts, factory = Counter(metas), partial(similar_optimizer, trainer)
    with suppress(Exception):  # of an optimizer that cannot step on fake parameters
        decay: float | None = getattr(trainer.args, "ema_decay", None)
        found = measure_step(factory, list(counts), torch.device("cpu"), ema_decay=decay)
        return weights + sum(n * state for n, state in zip(counts.values(), found.state_bytes))
    return weights


def check_saving(trainer: Trainer) -> None:
    """Refuse checkpoints of this training that cannot succeed.

    Args:
        trainer: with its model and arguments; nothing has been traced yet.

    Raises:
        WeightsError: a model that cannot be saved.
    """
    model: Any = trainer.model  # of any module, whatever transformers declares
    try:
        check_saves(model)
    except WeightsError as error:
        if trainer.args.save_strategy != "no":
            raise
        warn_on_rank0(logger, "%s Until then the model can be trained, but not saved.", error)


def first_evaluation_batches(trainer: Trainer) -> list[dict[str, Any]]:
    """A batch of the first samples of each dataset that the job will evaluate.

    Args:
        trainer: with its datasets and arguments.

    Raises:
        DataError: an evaluation dataset without samples, or whose batches the model cannot take.
    """
    args = trainer.args
    if args.eval_strategy == "no" and not (args.eval_on_start or args.do_eval):
        return []
    named: Any = trainer.eval_dataset
    found = []
    for dataset in named.values() if isinstance(named, dict) else [named]:
        if dataset is None:
            continue
        check_not_empty(dataset, "evaluation")
        loader = trainer.get_eval_dataloader(dataset)
        first = example_batch(loader, seed=args.seed, description="evaluation")
        check_batch(trainer, first, loader.dataset)
        found.append(first)
    return found
