"""TRL's trainers as subclasses of both TRL's and Merak's.

TRL's own code prepares the data, wraps the model with adapters, computes the loss and keeps the
metrics. The loss is traced as any `compute_loss` is; what it reads of tensors, it reads behind the
step.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import trl
from datasets import Dataset  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput
from trl.trainer.callbacks import SyncRefModelCallback

from merak.arguments import arguments_for
from merak.core.errors import ArgumentsError
from merak.graph.trace.calls.eager_loss import eager_loss
from merak.trainer import MerakTrainer
from merak.trainer.unsupported import refuse_other_arguments
from merak.trl.head import plain_head
from merak.trl.reference import NAME, SyncReference, hold_reference

SFTConfig = arguments_for(trl.SFTConfig)
DPOConfig = arguments_for(trl.DPOConfig)
KTOConfig = arguments_for(trl.KTOConfig)
RewardConfig = arguments_for(trl.RewardConfig)


if TYPE_CHECKING:
    _AfterTrl = MerakTrainer
else:
    _AfterTrl = object  # in Python's order of methods, TRL's class comes between the two


class OnRanks(_AfterTrl):
    """What a trainer of TRL's does otherwise on many ranks; it stands before TRL's class."""

    ANSWERED: ClassVar[frozenset[str]] = frozenset(("prediction_step",))
    takes: ClassVar[str]  # a name of its arguments
    _labels: ClassVar[tuple[str, ...]] = ("labels",)
    _gives_logits: bool = False  # whether an evaluation asks for logits beside the loss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make TRL's trainer; its arguments are compared first, before data are prepared."""
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        refuse_other_arguments(type(self), given.get("args"))
        self._check(**given)
        super().__init__(*args, **kwargs)
        self.label_names = list(self._labels)  # which its evaluations return
        self._gives_logits = self.compute_metrics is not None

    def _check(self, **given: Any) -> None:
        """Refuse what no layout can honour, before TRL prepares anything.

        Args:
            **given: arguments of TRL's constructor.

        Raises:
            ArgumentsError: there is something.
        """
        if getattr(given["args"], "activation_offloading", False):
            raise ArgumentsError(
                "activation_offloading=True moves what autograd saves, and the backward is a graph "
                "here; use offload_activations, which says how much."
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's loss, whose heads are plain operators where it is traced."""
        if not self._is_traced:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_overridden = type(self).compute_loss.__module__ != __name__
        gives = return_outputs and (self._gives_logits or is_overridden)
        with plain_head():
            found: Any = super().compute_loss(model, inputs, gives, num_items_in_batch)
        if not return_outputs:
            return found
        if not gives:
            return found, {}
        return found if is_overridden else (found[0], {"logits": found[1].logits})

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate on all ranks; logits, which take a second forward, only where they are read."""
        only = prediction_loss_only
        self._gives_logits = not (self.args.prediction_loss_only if only is None else only)
        return super().evaluation_loop(
            dataloader, description, only, ignore_keys, metric_key_prefix
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **further: Any,
    ) -> tuple[Any, Any, Any]:
        """The loss, logits and labels that all ranks have computed, as TRL has them."""
        if self._evaluation is None and self.mesh.world_size == 1:  # called by hand
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return MerakTrainer.prediction_step(
            self, model, inputs, prediction_loss_only, ignore_keys, **further
        )


class WithReference(OnRanks):
    """A trainer that compares the model with what it was, which all ranks compute together."""

    _labels = ("input_ids",)
    _columns: ClassVar[tuple[str, ...]]
    """Columns of what a reference model gives, as TRL adds them to a dataset."""
    _computes_reference: bool = False  # whether an evaluation is one of the reference

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make TRL's trainer; a reference that it keeps becomes a part of the model."""
        super().__init__(*args, **kwargs)
        self._hold_reference()
        if self.pop_callback(SyncRefModelCallback) is not None:
            self.add_callback(SyncReference)

    def _hold_reference(self) -> None:
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            hold_reference(self.model, reference)

    def _estimate_flops(self) -> float:
        """Operations of the model that is trained, as TRL counts them."""
        held = self.model._modules.pop(NAME, None)
        try:
            return super()._estimate_flops()
        finally:
            self.model._modules |= {} if held is None else {NAME: held}

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Compute log-probabilities of the reference as an evaluation, and add them to a dataset.

        The model is laid out for its training by then, at the columns that it will have.
        """
        if not isinstance(dataset, Dataset):
            raise ArgumentsError(
                "precompute_ref_log_probs=True computes a whole dataset before training, which is "
                f"no stream, but the {name} dataset is one; leave it out."
            )
        self._hold_reference()
        empty = dataset
        for column in self._columns:
            empty = empty.add_column(column, np.zeros(len(dataset), np.float32))
        loader: Any = DataLoader(empty, batch_size, collate_fn=self.data_collator)
        changed = {"train_dataset": empty} if self.engine is None else {}
        changed |= {"compute_metrics": None, "preprocess_logits_for_metrics": None}
        changed |= {"can_return_loss": True, "label_names": [], "_computes_reference": True}
        before = {key: getattr(self, key) for key in changed}
        vars(self).update(changed)
        try:
            made: Any = self.evaluation_loop(loader, f"Reference of {name}", False).predictions
        finally:
            vars(self).update(before)
            vars(self).pop("model_preparation_time", None)  # else the next evaluation reports it
        made = made if isinstance(made, tuple) else (made,)  # of one column
        for column, values in zip(self._columns, made, strict=True):
            dataset = dataset.add_column(column, values)
        return dataset

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's loss; while the reference is computed, its log-probabilities as outputs."""
        if not (return_outputs and self._computes_reference):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        own: Any = self
        with plain_head():
            found = own.compute_ref_log_probs(own.ref_model or model, inputs)
        return found[0].sum(), dict(zip(self._columns, found))


class SFTTrainer(OnRanks, trl.SFTTrainer, MerakTrainer):
    """Supervised fine-tuning, as `trl.SFTTrainer`.

    The model is a causal language model or its name, `args` is a
    `merak.trl.SFTConfig`, and all else is as of TRL's.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """

    takes = "merak.trl.SFTConfig"


class DPOTrainer(WithReference, trl.DPOTrainer, MerakTrainer):
    """Preference training, as `trl.DPOTrainer`.

    The model is a causal language model or its name, `args` is a
    `merak.trl.DPOConfig`, and all else is as of TRL's.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """

    takes = "merak.trl.DPOConfig"
    _columns = ("ref_chosen_logps", "ref_rejected_logps")


class KTOTrainer(WithReference, trl.KTOTrainer, MerakTrainer):
    """Training on judged completions, as `trl.KTOTrainer`.

    Its loss selects the samples of each label and has branches for microbatches without one: it
    runs as Python on the last stage (`merak.eager_loss`), on log-probabilities that all ranks have
    computed. The model is a causal language model or its name, `args` is a
    `merak.trl.KTOConfig`, and all else is as of TRL's.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """

    takes = "merak.trl.KTOConfig"

    @property
    def _columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("ref_logps", "ref_KL_logps") if self.calculate_KL else ("ref_logps",)

    @eager_loss
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's loss, of which values decide what follows the calls of the model."""
        return super().compute_loss(*args, **kwargs)


class RewardTrainer(OnRanks, trl.RewardTrainer, MerakTrainer):
    """Training of a reward model, as `trl.RewardTrainer`.

    The model is a classifier of sequences with one label or its name, `args` is a
    `merak.trl.RewardConfig`, and all else is as of TRL's.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """

    takes = "merak.trl.RewardConfig"
    _labels = ()
