"""Former names of arguments, and where their meaning is today.

Scripts for earlier versions of transformers name arguments that today's lacks; a similar name is
often another argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields

from transformers import TrainingArguments

from merak.arguments.rules import Layout, Policy
from merak.arguments.table import RULES

_DEVICE = "merak.init(device='cpu')"
_NONE = "nothing: leave it out"
_DEGREES = "zero=1, 2 or 3, and the degrees of merak.init"

ARGUMENTS: Mapping[str, str] = {
    "adafactor": "optim='adafactor'",
    "dispatch_batches": "accelerator_config={'dispatch_batches': …}",
    "evaluate_during_training": "eval_strategy='steps'",
    "evaluation_strategy": "eval_strategy",
    "fp16_backend": _NONE,
    "fp16_opt_level": _NONE,
    "fsdp_min_num_params": _DEGREES,
    "fsdp_transformer_layer_cls_to_wrap": _DEGREES,
    "gpus": "merak.init(dp=…, tp=…, pp=…)",
    "group_by_length": "train_sampling_strategy='group_by_length'",
    "half_precision_backend": _NONE,
    "include_inputs_for_metrics": "include_for_metrics=['inputs']",
    "include_tokens_per_second": "nothing: the logs have tokens/s",
    "jit_mode_eval": _NONE,
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "lr": "learning_rate",
    "no_cuda": _DEVICE,
    "overwrite_output_dir": _NONE,
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": "hub_model_id='ORGANIZATION/NAME'",
    "push_to_hub_token": "hub_token",
    "save_safetensors": "nothing: files are always safetensors",
    "sharded_ddp": _DEGREES,
    "split_batches": "accelerator_config={'split_batches': …}",
    "torchdynamo": "torch_compile",
    "use_ipex": _NONE,
    "use_legacy_prediction_loop": _NONE,
    "use_mps_device": _NONE,
    "warmup_ratio": "warmup_steps, of which a number below 1 is a fraction of all steps",
    "xpu_backend": "merak.init(backend=…)",
}
"""What arguments of `TrainingArguments` are called today, or what is in their place."""

TRAINER: Mapping[str, str] = {
    "feature_extractor": "processing_class",
    "image_processor": "processing_class",
    "processor": "processing_class",
    "tokenizer": "processing_class",
    "eval_data": "eval_dataset",
    "train_data": "train_dataset",
    "max_seq_length": "a tokenizer that cuts to max_length",
    "optimizer": "optimizer_cls_and_kwargs",
}
"""The same of `Trainer`."""


def accepted_arguments(names: Iterable[str]) -> list[str]:
    """Argument names that a job can set, of those given: suggestions name no others.

    Args:
        names: of fields of training arguments.
    """
    own = {one.name: one for one in fields(TrainingArguments)}
    return [name for name in names if name not in own or not _is_refused(name)]


def _is_refused(name: str) -> bool:
    """Whether no job can give an argument another value than its default."""
    rule = RULES.get(name)
    if rule is None:
        return True
    others = [own for own in rule.accepted if own not in (False, "", None, MISSING, [], {})]
    return rule.policy is Policy.REFUSED and rule.layout is Layout.ANY and not others
