"""Every method of `transformers.Trainer`, and what becomes of it where a script overrides it.

`refuse_overrides` reads the table at construction, and before training and evaluation. A test
compares it with the installed transformers: a method without a decision here fails it, and its
override is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import transformers
from transformers import Trainer

from merak.core.errors import ArgumentsError
from merak.trainer.subclass.methods import Found, calls, describe, overrides_of, overriding


class Decision(Enum):
    """Decision about a method that a subclass overrides: called, extended, or refused."""

    CALLED = "called as in transformers"
    EXTENDED = "called; must call super()"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Override:
    """The decision on one method.

    Args:
        decision: what becomes of it.
        sentence: how it is called, what `super()` does there, or what to use in its place.
    """

    decision: Decision
    sentence: str


_LOSS = "forward and loss are traced, and autocast with them; use bf16=True or fp16=True"
_RANKS = "every rank calls it with the same values"
_LOOP = "part of transformers' training loop"
_STATE = "all ranks save or load their parts there together"
_PLACES = "the engine places this rank's segments; choose the device with merak.init(device=…)"
_MESH = "Merak places and shards parameters itself; use merak.init(dp=…, tp=…, pp=…)"
_HUB = "rank 0 pushes what the ranks have saved"

_CALLED = {
    "on every rank, with the same values": """_determine_best_metric _evaluate
    _get_learning_rate _get_output_dir _hp_search_setup _issue_warnings_after_load
    _load_callback_state _report_to_hp_search _tune_save_checkpoint _validate_args add_callback
    call_model_init create_model_card create_scheduler evaluate get_decay_parameter_names
    get_learning_rates get_num_trainable_parameters get_optimizer_group
    get_total_train_batch_size hyperparameter_search log log_metrics metrics_format num_examples
    pop_callback predict remove_callback save_metrics save_state set_initial_training_values
    store_flos floating_point_ops is_local_process_zero is_world_process_zero end""",
    "its loader is that of one process, whose batches the replicas share out": """
    get_train_dataloader get_eval_dataloader get_test_dataloader _get_dataloader
    _get_eval_sampler _get_train_sampler _get_collator_with_removed_columns
    _remove_unused_columns _set_signature_columns_if_needed""",
    "its optimizer may hold any of self.model's parameters, and then steps this rank's": """
    create_optimizer create_optimizer_and_scheduler get_optimizer_cls_and_kwargs""",
    "on every rank, with the columns that the rank reads; values may change, not shapes": """
    _prepare_inputs""",
    "with one microbatch at a time": "_get_num_items_in_batch",
    "traced with the model in every job, for each shape; it gets tensors without values, and the "
    "trainer as it is in its first step": "compute_loss",
    _HUB: "_finish_current_push _push_from_checkpoint init_hf_repo push_to_hub",
}

_EXTENDED = {
    "once a microbatch; it hands it to the pipeline, which runs forward and backward": (
        "training_step"
    ),
    "it takes a step's microbatches and agrees on their shapes with the other ranks": (
        "get_batch_samples"
    ),
    "it gives the loss and logits that all ranks have computed for the batch": "prediction_step",
    "it runs the batches through the stages of all ranks": "evaluation_loop",
    "it asks the engine for the norm over all ranks": "_clip_grad_norm _get_grad_norm",
    _STATE: """_load_best_model _load_from_checkpoint _load_optimizer_and_scheduler
    _load_rng_state _load_scaler _save_checkpoint save_model""",
    "Merak keeps track of the training there": """_finalize_training _init_training_state
    _maybe_log_save_evaluate _run_epoch _track_num_input_tokens _wrap_model
    create_accelerator_and_postprocess train _inner_training_loop _prepare_for_training""",
}

_REFUSED = {
    _LOSS: "compute_loss_context_manager autocast_smart_context_manager",
    "columns stay on the host until a stage reads them; override _prepare_inputs": "_prepare_input",
    _PLACES: "_move_model_to_device",
    _MESH: """_build_accelerator_args _defer_fsdp_gradient_reduction _has_mixed_mesh_grads
    _mixed_mesh_grad_norm _prepare_context_parallel_inputs _sync_replicated_trainable_parameters
    get_cp_size get_sp_size get_tp_size""",
    "the ranks write one checkpoint together; override save_model and call super()": """_save
    _save_optimizer_and_scheduler _save_rng_state _save_scaler""",
    "a pipeline is laid out for one microbatch size; set per_device_train_batch_size": (
        "_update_auto_batch_size"
    ),
}


def _table() -> Iterator[tuple[str, Override]]:
    for decision, groups in (
        (Decision.CALLED, _CALLED),
        (Decision.EXTENDED, _EXTENDED),
        (Decision.REFUSED, _REFUSED),
    ):
        for sentence, names in groups.items():
            for name in names.split():
                yield name, Override(decision, sentence)


_BY_HAND = ("training_step", "prediction_step")
"""Methods whose `super()` Merak calls only where a script calls them outside of a training."""

_OF_ACCELERATE = ("backward", "clip_grad_norm_", "clip_grad_value_")

RULES = "RULES"
"""Attribute of a class of Merak's: decisions of its own, by the method's name."""

OVERRIDES: dict[str, Override] = dict(_table())
"""The decision on every method, by its name."""


def trainer_methods() -> list[str]:
    """Names of the methods of the installed `transformers.Trainer`, without special ones."""
    found = (name for name in dir(Trainer) if not name.startswith("__"))
    return sorted(name for name in found if callable(getattr(Trainer, name)))


def refuse_overrides(
    cls: type,
    base: type,
    assigned: Mapping[str, object] | None = None,
    *,
    extended_only: bool,
) -> None:
    """Refuse methods of a script's own that would be called otherwise than in transformers, or not.

    They may be those of a subclass, or be assigned to a trainer or to a class of transformers'.

    Args:
        cls: the class of a trainer.
        base: `MerakTrainer`.
        assigned: the trainer's own attributes, which precede the methods of its class.
        extended_only: whether a method that does a rank's share has to call the one that it
            overrides. A model in one process can be run by hand.

    Raises:
        ArgumentsError: there is one.
    """
    if base not in cls.__mro__:
        return
    for name in trainer_methods():
        for found in overrides_of(cls, name, assigned):
            reason = _problem(cls, name, found, extended_only=extended_only)
            if reason is not None:
                does = f"{found.owner} overrides {name}"
                if found.replaces:
                    does = f"{found.owner}.{name} is replaced by {describe(found.method)}"
                raise ArgumentsError(f"{does}, {reason}.")


def refuse_replaced_accelerator(accelerator: object) -> None:
    """Refuse methods of accelerate that a script has replaced, and that Merak does not call.

    Args:
        accelerator: of a trainer.

    Raises:
        ArgumentsError: there is one.
    """
    for name in _OF_ACCELERATE:
        found = overriding(accelerator, name)
        if found is not None:
            raise ArgumentsError(
                f"Accelerator.{name} is replaced by {describe(found)}, which Merak does not call: "
                "the engine runs backward and clips over all ranks; override training_step or "
                "_clip_grad_norm of the trainer, or compute_loss."
            )


def _problem(cls: type, name: str, found: Found, *, extended_only: bool) -> str | None:
    rule = getattr(cls, RULES, {}).get(name) or OVERRIDES.get(name)
    if rule is None:
        return (
            f"which this Merak does not know in transformers {transformers.__version__}; use "
            "another method, or a callback"
        )
    if rule.decision is Decision.REFUSED:
        return f"which Merak does not call: {rule.sentence}"
    if found.follows_merak and not _is_handed_on(cls, name):
        return (
            "which MerakTrainer's own method does not call; assign it to merak.MerakTrainer, or "
            "override the method in a subclass of MerakTrainer"
        )
    if rule.decision is Decision.EXTENDED and extended_only and not calls(name, found.method):
        return (
            f"and does not call super().{name}(…), without which the ranks do not work together: "
            f"{rule.sentence}; call it{', or the method that it replaces' * found.replaces}"
        )
    return None


def _is_handed_on(cls: type, name: str) -> bool:
    """Whether Merak's own methods of a name all call those of the classes behind them."""
    own = (vars(owner).get(name) for owner in cls.__mro__ if owner.__module__.startswith("merak."))
    return name not in _BY_HAND and all(calls(name, method) for method in own if method is not None)
