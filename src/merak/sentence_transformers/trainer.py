"""sentence-transformers' trainer as a subclass of both its own and Merak's.

Its own code prepares the data, samples batches, chooses the loss of each, and writes the folder.
The loss is traced as any `compute_loss` is: it calls the model, once for all columns of a batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import sentence_transformers
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from merak.arguments import arguments_for
from merak.checkpoint.save_pretrained import on_rank0
from merak.checkpoint.writing import writing_into
from merak.graph.weights.holders import named_tensors
from merak.graph.weights.laid_out import like, methods_allowed
from merak.sentence_transformers.losses import as_one_graph
from merak.trainer import MerakTrainer
from merak.trainer.generation import with_whole_model
from merak.trainer.subclass.agreed_metrics import metrics_of_rank0
from merak.trainer.subclass.overrides import Decision, Override
from merak.trainer.unsupported import refuse_other_arguments

SentenceTransformerTrainingArguments = arguments_for(
    sentence_transformers.SentenceTransformerTrainingArguments
)

if TYPE_CHECKING:
    _Before = MerakTrainer
else:
    _Before = object  # in Python's order of methods, the package's class comes between the two


class OnRanks(_Before):
    """What the trainer does otherwise on many ranks; it stands before sentence-transformers'."""

    ANSWERED: ClassVar[frozenset[str]] = frozenset(
        ("_save", "_load_best_model", "_load_from_checkpoint", "evaluation_loop")
    )
    RULES: ClassVar[Mapping[str, Override]] = {
        "_save": Override(Decision.CALLED, "on rank 0, whose `model` is whole there")
    }
    takes: ClassVar[str]  # a name of its arguments
    _gathered: Mapping[str, torch.Tensor] = {}  # on rank 0, while a checkpoint is written

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; its arguments are compared first."""
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        refuse_other_arguments(type(self), given.get("args"))
        super().__init__(*args, **kwargs)

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
        whole.model_card_data = model.model_card_data
        self.model = whole
        try:
            with writing_into(folder):
                self._save(folder)
                self._save_companions(folder)
        finally:
            self.model = model

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
