"""sentence-transformers' trainer as a subclass of both its own and Merak's.

Its own code prepares the data, samples batches, chooses the loss of each, and writes the folder.
The loss is traced as any `compute_loss` is: it calls the model, once for all columns of a batch.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import sentence_transformers
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from merak.arguments import arguments_for
from merak.arguments.planned import chooses_microbatch, chooses_plan
from merak.checkpoint.save_pretrained import on_rank0
from merak.checkpoint.writing import writing_into
from merak.core.errors import ArgumentsError, DataError
from merak.core.rank0 import warn_on_rank0
from merak.data.non_tensors import with_kind
from merak.engine import Engine
from merak.graph.weights.holders import named_tensors
from merak.graph.weights.laid_out import like, methods_allowed
from merak.sentence_transformers import NO_PLAN
from merak.sentence_transformers.losses import (
    as_one_graph,
    gathers,
    hold_modules,
    without_held_modules,
)
from merak.trainer import MerakTrainer
from merak.trainer.generation import with_whole_model
from merak.trainer.subclass.agreed_metrics import metrics_of_rank0
from merak.trainer.subclass.overrides import Decision, Override
from merak.trainer.unsupported import refuse_other_arguments

logger = logging.getLogger(__name__)

SentenceTransformerTrainingArguments = arguments_for(
    sentence_transformers.SentenceTransformerTrainingArguments
)

if TYPE_CHECKING:
    _Before = MerakTrainer
else:
    _Before = object  # in Python's order of methods, the package's class comes between the two


_EQUAL = (
    "a loss takes negatives from the batches of all replicas (gather_across_devices), which must "
    "be equally many and large"
)


class OnRanks(_Before):
    """What the trainer does otherwise on many ranks; it stands before sentence-transformers'."""

    ANSWERED: ClassVar[frozenset[str]] = frozenset(
        ("_save", "_load_best_model", "_load_from_checkpoint", "evaluation_loop")
    )
    RULES: ClassVar[Mapping[str, Override]] = {
        "_save": Override(Decision.CALLED, "on rank 0, whose `model` is whole there")
    }
    takes: ClassVar[str]  # a name of its arguments
    has_kinds = True
    _gathered: Mapping[str, torch.Tensor] = {}  # on rank 0, while a checkpoint is written

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; its arguments are compared first."""
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        arguments = given.get("args")
        refuse_other_arguments(type(self), arguments)
        if arguments and (chooses_plan(arguments) or chooses_microbatch(arguments)):
            raise ArgumentsError(NO_PLAN)
        super().__init__(*args, **kwargs)
        self._hold_modules(self.model)
        is_met = gathers(self._losses_by_name.values()) and self.mesh.dp > 1
        if is_met and not self.args.dataloader_drop_last:  # as the package has it in its own jobs
            self.args.dataloader_drop_last = True
            warn_on_rank0(logger, "%s; dataloader_drop_last is True now.", _EQUAL)

    @property
    def _losses_by_name(self) -> dict[str, nn.Module]:
        loss: Any = self.loss  # type: ignore[attr-defined]
        return loss if isinstance(loss, dict) else {"": loss}

    @property
    def _called_losses(self) -> Sequence[nn.Module]:
        """The losses that `compute_loss` calls, and those inside of them."""
        return [module for loss in self._losses_by_name.values() for module in loss.modules()]

    def _hold_modules(self, model: Any) -> None:
        hold_modules(model, self._losses_by_name.values())

    def prepare_loss(self, loss: Any, model: Any) -> Any:
        """The loss where its model is; as it is, where that has no weights yet."""
        if model.device.type != "meta":
            return super().prepare_loss(loss, model)  # type: ignore[misc]
        return loss if isinstance(loss, nn.Module) else loss(model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model anew, which losses of before then call."""
        model = super().call_model_init(trial)
        if hasattr(self, "loss"):  # else the trainer is being made
            self._hold_modules(model)
        return model

    def get_optimizer_cls_and_kwargs(  # type: ignore[override]  # no static method there
        self, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The package's optimizer, whose groups go by the names of losses' parameters."""
        with without_held_modules(self.model):
            return super().get_optimizer_cls_and_kwargs(*args, **kwargs)

    def build_engine(self, *args: Any, **kwargs: Any) -> Engine:
        """Build the engine, unless replicas would meet with other batches.

        Raises:
            DataError: a loss takes rows from all replicas, and their batches are not alike.
        """
        engine = super().build_engine(*args, **kwargs)
        if engine.meets_replicas:
            self._refuse_other_batches()
        return engine

    def _refuse_other_batches(self) -> None:
        if isinstance(self.train_dataset, dict):
            raise DataError(
                f"{_EQUAL}, and of one dataset, but there are several; train with one dataset, "
                "dp=1, or without gather_across_devices."
            )
        if not self.args.dataloader_drop_last:
            raise DataError(f"{_EQUAL}; set dataloader_drop_last=True.")

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a batch, as one graph where it is traced."""
        rest = (model, inputs, return_outputs, num_items_in_batch)
        if not self._is_traced:
            return super().compute_loss(*rest)
        with as_one_graph(merges_columns=self.mesh.pp > 1):
            return super().compute_loss(*rest)

    def _build_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        loader: DataLoader[Any] = super()._build_dataloader(*args, **kwargs)  # type: ignore[misc]
        loader.collate_fn = _Kinds(loader.collate_fn)
        return loader

    def track_loss_components(self, loss: dict[str, torch.Tensor]) -> None:
        """Add the parts of a loss to what is logged of them; as numbers, where it is traced."""
        if not self._is_traced:
            super().track_loss_components(loss)  # type: ignore[misc]
            return
        own: Any = self
        kept = own.accum_loss_components["train" if self.model.training else "eval"]
        steps = kept.get("steps", 0)
        for name, tensor in loss.items():
            value = tensor.item()
            if own.args.logging_nan_inf_filter and not math.isfinite(value):
                value = kept.get(name, 0.0) / max(steps, 1)
            kept[name] = kept.get(name, 0.0) + value
        kept["steps"] = steps + 1

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The package's own log, which adds the means of the parts of losses."""
        own: Any = self
        for kept in own.accum_loss_components.values():
            kept.update({name: torch.as_tensor(value) for name, value in kept.items()})
        super().log(logs, start_time)
        for kept in own.accum_loss_components.values():
            kept.update({name: torch.as_tensor(value).item() for name, value in kept.items()})

    # ---- evaluators ----

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate the loss on all ranks, and then the evaluator, which encodes with all of them.

        While it lasts every rank has a copy of the whole model.
        """
        with ExitStack() as self._with_whole_model:
            output = super().evaluation_loop(*args, **kwargs)
        return output._replace(metrics=metrics_of_rank0(output.metrics))

    # ---- folders ----

    def _save_parts(self, folder: str) -> None:
        assert self.engine is not None
        state = self.engine.gather_state_dict()
        step = partial(self._save_state, state, folder)
        on_rank0(step, Path(folder), self.mesh, "model")

    def _save_state(self, state: Mapping[str, torch.Tensor], folder: str) -> None:
        model = self.model
        with methods_allowed(model):
            named = named_tensors(model).items()
            new: dict[int, Any] = {id(t): like(t, state[n]) for n, t in named if n in state}
            whole = copy.deepcopy(model, new)
        self._save_copy(whole, folder)

    def _save_copy(self, whole: nn.Module, folder: str) -> None:
        """Let the package, or a subclass, write the folder of a whole model, on rank 0."""
        model = self.model
        card = whole.model_card_data = model.model_card_data
        self.model = card.model = whole  # which the card encodes an example with
        try:
            with writing_into(folder):
                self._save(folder)
                self._save_companions(folder)
        finally:
            self.model = card.model = model

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint with the package's folder, whose weights rank 0 gathers."""
        self._gathered = {} if self.engine is None else self.engine.gather_state_dict()
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._gathered = {}

    def _plan_files(self) -> None:
        """Leave files of the model to the package."""

    def _write_files(self, folder: Path) -> None:
        self._save_state(self._gathered, str(folder))
        super()._write_files(folder)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        self.model.model_card_data.set_best_model_step(int(best.rpartition("-")[2]))
        MerakTrainer._load_best_model(self)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        MerakTrainer._load_from_checkpoint(self, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """A collator whose batches say what they are: which columns in which order, of which dataset.

    Args:
        collate: the package's, or the script's.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        return with_kind(self.collate(samples))


class _Evaluating(MerakTrainer):
    """Evaluates the loss; then its model is whole, for what comes next in the package's loop."""

    evaluator: Any
    _with_whole_model: ExitStack

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, **kwargs: Any
    ) -> EvalLoopOutput:
        """Evaluate a dataset, if there is one beside the evaluator."""
        if self.evaluator is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        nothing: Any = None
        output = EvalLoopOutput(nothing, nothing, {}, 0)
        if len(dataloader) > 0:
            output = super().evaluation_loop(dataloader, *args, **kwargs)
        card = self.model.model_card_data
        whole = with_whole_model(self, self.engine, self.mesh.device)
        self._with_whole_model.enter_context(whole)
        self.model.model_card_data = card
        return output


class SentenceTransformerTrainer(
    OnRanks, sentence_transformers.SentenceTransformerTrainer, _Evaluating
):
    """Training of embeddings, as `sentence_transformers.SentenceTransformerTrainer`.

    The model is a `SentenceTransformer`, `args` is a
    `merak.sentence_transformers.SentenceTransformerTrainingArguments`, and all else is as of the
    package's own.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """

    takes = "merak.sentence_transformers.SentenceTransformerTrainingArguments"
