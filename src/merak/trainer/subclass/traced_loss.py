"""A loss of the script's own as traces call it: with a trainer that is as in its first step.

A job is traced before it has its optimizer, which steps what the trace lays out. So the trace finds
stand-ins, of the same classes and with the same values: the state that `train` begins with, an
optimizer of the whole model, and its schedule. What the loss reads of them is watched by its place,
where the training's own have come by the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import has_length

from merak.arguments import MerakArguments
from merak.core.errors import TraceError
from merak.data import shard_loader
from merak.data.non_tensors import in_order, without_kind
from merak.graph.trace.calls.call import LossFunction, calls_model
from merak.graph.trace.calls.eager_loss import as_eager_as
from merak.trainer.evaluation import gives_loss
from merak.trainer.subclass.methods import describe, names_reached, overriding
from merak.trainer.tokens import TOKENS

_OF_OPTIMIZER = frozenset(
    "optimizer lr_scheduler callback_handler _get_learning_rate get_learning_rates "
    "get_optimizer_group".split()
)
"""Names by which code of a trainer reaches its optimizer or schedule."""


def loss_of(trainer: Any) -> tuple[LossFunction | None, tuple[str, ...]]:
    """The loss function of a trainer, and the columns that go to it alone; None for the model's.

    Args:
        trainer: a `MerakTrainer`.
    """
    compute, has_labels = trainer.compute_loss_func, list(trainer.label_names) == ["labels"]
    is_own = overriding(trainer, "compute_loss") is not None
    if is_own or (trainer.label_smoother is not None and compute is None):
        return _of_compute_loss(trainer), ()
    if compute is None:
        return None, ()
    if not has_labels:  # and an evaluation asks for a loss by the names that there are
        return _of_compute_loss(trainer), ()

    def loss_of_outputs(outputs: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        labels, count = batch.get("labels"), batch.get(TOKENS)
        loss: torch.Tensor = compute(outputs, labels, num_items_in_batch=count)
        return loss

    return as_eager_as([compute], loss_of_outputs), ("labels",)


def _of_compute_loss(trainer: Any) -> LossFunction:
    """The loss of a trainer's `compute_loss`, called as transformers' loops call it."""
    self = trainer  # by which name messages call what the loss reads

    def loss_of_model(model: nn.Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        batch = without_kind(in_order(batch, self.column_order))
        count = batch.pop(TOKENS, None)
        self._is_traced = True
        try:
            if model.training:
                loss: Any = self.compute_loss(model, batch, num_items_in_batch=count)
                if not isinstance(loss, torch.Tensor):
                    raise TraceError(
                        f"{_described(self)} returns a {type(loss).__name__} in training, "
                        "where transformers asks for the loss alone, a tensor: return it, and "
                        "(loss, outputs) with return_outputs=True."
                    )
                return loss, {}
            if not gives_loss(self, batch, self._plain):
                return None, model(**batch)
            found: Any = self.compute_loss(
                model, batch, return_outputs=True, num_items_in_batch=count
            )
        finally:
            self._is_traced = False
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise TraceError(
                f"{_described(self)} takes no notice of return_outputs=True, with which an "
                "evaluation calls it: return (loss, outputs) there."
            )
        return found[0], found[1]

    every = (vars(one).get("compute_loss") for one in (trainer, *type(trainer).__mro__))
    called = (*every, trainer.compute_loss_func, *trainer._called_losses)
    return as_eager_as(called, calls_model(loss_of_model))


def _described(trainer: object) -> str:
    own = overriding(trainer, "compute_loss")
    return "compute_loss" if own is None else describe(own)


@contextmanager
def in_first_step(
    trainer: Any, loader: DataLoader[Any], *, is_planned: bool = False
) -> Iterator[None]:
    """Context with a trainer as it will be in the first step, as far as it is not yet.

    Args:
        trainer: a `MerakTrainer`.
        loader: of a single process, for training.
        is_planned: whether dp and accumulation are still to be chosen; the loader's batches are
            then those of whole steps.
    """
    is_own = overriding(trainer, "compute_loss") is not None
    ends = trainer.args.max_steps > 0 or has_length(loader)  # else training refuses it
    if trainer.is_as_in_first_step or not (is_own and ends):
        yield
        return
    handler, own = trainer.callback_handler, vars(trainer)
    names = ("model", "optimizer", "lr_scheduler", "train_dataloader")
    before = {name: getattr(handler, name) for name in names}
    known = {**own}
    try:
        trainer.is_as_in_first_step = True
        args, dp = copy.copy(trainer.args), (trainer.mesh.dp, trainer.mesh.dp_rank)
        if is_planned:
            args.gradient_accumulation_steps, dp = 1, (1, 0)
        _set_first_step(trainer, loader, args, *dp)
        yield
    finally:
        vars(handler).update(before)
        for name in ("state", "optimizer", "lr_scheduler", "_created_lr_scheduler",
                     "current_gradient_accumulation_steps", "is_as_in_first_step"):  # fmt: skip
            own.pop(name, None)
            own |= {name: known[name]} if name in known else {}


def _set_first_step(
    trainer: Any, loader: DataLoader[Any], args: MerakArguments, dp_degree: int, dp_rank: int
) -> None:
    handler = trainer.callback_handler
    handler.train_dataloader = shard_loader(
        loader,
        dp_degree=dp_degree,
        dp_rank=dp_rank,
        columns=(),
        seed=args.seed,
        whole_rounds=args.dataloader_drop_last and args.zero == 3,
    )
    epochs, per_epoch, *_, max_steps = trainer.set_initial_training_values(
        args, handler.train_dataloader
    )
    trial = getattr(trainer, "_trial", None)
    Trainer._init_training_state(trainer, max_steps, per_epoch, epochs, None, trial)
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    if _OF_OPTIMIZER & names_reached(trainer, "compute_loss"):
        if trainer.optimizer is None:
            made = trainer.create_optimizer()
            trainer.optimizer = AcceleratedOptimizer(
                trainer.optimizer if made is None else made, device_placement=False
            )
        if trainer.lr_scheduler is None:
            trainer.create_scheduler(num_training_steps=max_steps)
    for name in ("model", "optimizer", "lr_scheduler"):
        setattr(handler, name, getattr(trainer, name))
