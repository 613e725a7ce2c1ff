"""Every field of `transformers.TrainingArguments`, and what Merak does with it.

The page docs/arguments.md is made from this table. A test compares the table with the fields of the
installed transformers: a field without a decision here fails it, and is refused when it is set.
"""

from __future__ import annotations

from merak.arguments.rules import Layout, Rule, honoured, no_effect, refused

_FULL_EVAL = "evaluation uses the weights that are trained; bf16=True or fp16=True autocasts it too"
_RECOMPUTE = "means `recompute='full'`, where `recompute` is not given"
_CHECKPOINT = "Merak recomputes segments of the traced model, not modules by torch's checkpoint"
_COMPILE = (
    "torch compiles the forward, recomputation and backward of each segment when it first runs, "
    "under every schedule; collectives, draws and operators that mutate a tensor run as they are"
)
_DEGREES = "Merak places and shards parameters itself; use merak.init(dp=…, tp=…, pp=…)"
_SHARDS = (
    "Merak shards parameters itself; use zero=3 (full_shard) or zero=2 (shard_grad_op), with "
    "zero_group_size, the ranks of a node, for hybrid_shard"
)
_LIGER = "it swaps the model's modules for kernels that cannot be traced; leave it unset"
_GENERATES = honoured("given to `generate`")
_HUB = honoured("rank 0 pushes what `save_model` and checkpoints wrote")
_LOGGER = honoured("given to the logger, on rank 0", by_rank=True)
_SCRIPT = honoured("read by scripts, not by the trainer", by_rank=True)
_LOADER = honoured("as in transformers, in the loader of every rank that reads data")
_WORKERS = honoured(_LOADER.sentence, by_rank=True)
_EVALUATION = honoured("as in transformers; every rank sees the same metrics")
_SAVING = honoured("as in transformers; the ranks write a folder that any Hugging Face tool reads")
_LOGGING = honoured("as in transformers; rank 0 logs")
_ADAM = honoured("given to the optimizer")

OUTPUT = {
    "output_dir": honoured("the ranks write into it", by_rank=True),
    "do_train": _SCRIPT,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    "resume_from_checkpoint": honoured(
        "read by scripts and recipes, which give it to `train`; `train` itself follows 'auto'",
        by_rank=True,
    ),
}

LENGTH = {
    "per_device_train_batch_size": honoured(
        "samples of one microbatch of one replica; 'auto' for the fastest of 1, 2, 4, 8, … that "
        "fits the memory, with as many samples a step as if it were left out"
    ),
    "per_device_eval_batch_size": honoured("samples of one evaluation batch of one replica"),
    "gradient_accumulation_steps": honoured(
        "the number of microbatches of a step; a step takes microbatch size × microbatches × dp "
        "samples"
    ),
    "num_train_epochs": honoured("as in transformers"),
    "max_steps": honoured("as in transformers"),
    "auto_find_batch_size": refused(
        "ranks cannot change it one by one when memory runs out; per_device_train_batch_size="
        "'auto' chooses one that fits before training",
        layout=Layout.SEVERAL_RANKS,
    ),
}

OPTIMIZATION = {
    "optim": honoured("by name; the table of optimizers says which are correct with which degrees"),
    "optim_args": honoured("given to the optimizer"),
    "optim_target_modules": refused(
        "only GaLore and APOLLO read it, which cannot be honoured; leave it unset"
    ),
    "learning_rate": honoured("as in transformers"),
    "lr_scheduler_type": honoured("every rank steps the same schedule"),
    "lr_scheduler_kwargs": honoured("given to the schedule"),
    "warmup_steps": honoured("as in transformers"),
    "weight_decay": honoured("the names of parameters in your model decide which of them decay"),
    "adam_beta1": _ADAM,
    "adam_beta2": _ADAM,
    "adam_epsilon": _ADAM,
    "max_grad_norm": honoured("the norm is over all parameters of all ranks"),
    "average_tokens_across_devices": honoured(
        "True: the loss is divided by the label tokens of all replicas, as in one process; False: "
        "by each replica's own, then averaged"
    ),
    "label_smoothing_factor": honoured("the smoothed loss is traced with the model"),
    "neftune_noise_alpha": honoured("traced with the model; the same noise in every layout"),
}

PRECISION = {
    "bf16": honoured("autocast inside the traced graph; parameters and gradients stay float32"),
    "fp16": honoured(
        "as bf16, with a loss scale: all ranks agree on an overflow and skip the same steps"
    ),
    "bf16_full_eval": refused(_FULL_EVAL),
    "fp16_full_eval": refused(_FULL_EVAL),
    "tf32": honoured("switched on or off in every rank"),
}

_CHECKPOINT_KEYWORDS = refused(
    f"{_CHECKPOINT}, whose own keywords, such as use_reentrant, have no effect; for every_n_layers "
    "use recompute=0.5 for half, for offload offload_activations"
)

MEMORY_AND_SPEED = {
    "activation_checkpointing": honoured(_RECOMPUTE),
    "activation_checkpointing_kwargs": _CHECKPOINT_KEYWORDS,
    "gradient_checkpointing": honoured(_RECOMPUTE),
    "gradient_checkpointing_kwargs": _CHECKPOINT_KEYWORDS,
    "torch_compile": honoured(_COMPILE),
    "torch_compile_backend": honoured("given to `torch.compile`"),
    "torch_compile_mode": honoured(
        "given to `torch.compile`, without CUDA graphs: tensors of a microbatch outlive the next"
    ),
    "use_liger_kernel": refused(_LIGER),
    "liger_kernel_config": refused(_LIGER),
    "use_cache": refused("a cache of keys and values is not an output of training; leave it False"),
    "torch_empty_cache_steps": honoured(
        "every rank empties its cache behind such a step", by_rank=True
    ),
}

LOGGING = {
    "logging_strategy": _LOGGING,
    "logging_steps": _LOGGING,
    "logging_first_step": _LOGGING,
    "logging_nan_inf_filter": honoured(
        "a filter of logs alone; `nan_policy` says what becomes of such a step"
    ),
    "log_on_each_node": no_effect(
        "every host has the same losses, so rank 0 of the job alone logs and prints"
    ),
    "log_level": honoured("the level of rank 0", by_rank=True),
    "log_level_replica": honoured(
        "the level of every other rank; errors alone where it is not given", by_rank=True
    ),
    "include_num_input_tokens_seen": honoured("counted over all replicas"),
    "disable_tqdm": honoured(
        "rank 0 writes a line for each log, also in a terminal; else it draws a panel there",
        by_rank=True,
    ),
    "skip_memory_metrics": honoured("the metrics are those of rank 0", by_rank=True),
    "report_to": honoured("the loggers run on rank 0", by_rank=True),
    "run_name": _LOGGER,
    "project": _LOGGER,
    "trackio_space_id": _LOGGER,
    "trackio_bucket_id": _LOGGER,
    "trackio_static_space_id": _LOGGER,
    "debug": honoured(
        "'underflow_overflow' means `locate_nan=True`, where that is not given: the first step "
        "that is not finite ends the job with the operator and source line where it began"
    ),
}

EVALUATION = {
    "eval_strategy": _EVALUATION,
    "eval_steps": _EVALUATION,
    "eval_delay": _EVALUATION,
    "eval_on_start": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "eval_use_gather_object": no_effect("a traced model gives tensors, which are gathered as such"),
    "load_best_model_at_end": honoured("every rank loads its own segments of the best checkpoint"),
    "metric_for_best_model": _EVALUATION,
    "greater_is_better": _EVALUATION,
}

SAVING = {
    "save_strategy": _SAVING,
    "save_steps": _SAVING,
    "save_total_limit": _SAVING,
    "save_only_model": _SAVING,
    "save_on_each_node": refused(
        "ranks share the files of a folder; use a file system all nodes see"
    ),
    "enable_jit_checkpoint": refused(
        "ranks would stop at different steps; Merak saves on SIGTERM, within sigterm_limit_s",
        layout=Layout.SEVERAL_RANKS,
    ),
    "ignore_data_skip": honoured("as in transformers"),
    "restore_callback_states_from_checkpoint": honoured("as in transformers"),
    "push_to_hub": _HUB,
    "hub_token": honoured(_HUB.sentence, by_rank=True),
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
}

REPRODUCIBILITY = {
    "seed": honoured("the same weights, dropout and losses in every layout"),
    "data_seed": honoured("the same order of samples in every layout"),
    "full_determinism": honoured("as in transformers, in every rank"),
}

DATA = {
    "dataloader_drop_last": _LOADER,
    "dataloader_num_workers": _WORKERS,
    "dataloader_pin_memory": honoured(
        "as in transformers, in the loader of every rank; off on the CPU, where nothing is copied",
        by_rank=True,
    ),
    "dataloader_persistent_workers": _WORKERS,
    "dataloader_prefetch_factor": _WORKERS,
    "dataloader_multiprocessing_context": _WORKERS,
    "dataloader_in_order": refused(
        "ranks of one replica would read different batches; leave it True",
        layout=Layout.SEVERAL_RANKS,
    ),
    "remove_unused_columns": _LOADER,
    "label_names": _LOADER,
    "train_sampling_strategy": refused(
        "it deals microbatches out to single processes, of which several may be one replica; use "
        "'random', 'sequential' or 'group_by_length'",
        "sequential",
        "group_by_length",
    ),
    "length_column_name": _LOADER,
}

DISTRIBUTION = {
    "use_cpu": refused(
        "the device was chosen by merak.init; call merak.init(device='cpu')", layout=Layout.NOT_CPU
    ),
    "local_rank": no_effect("transformers no longer reads it; torchrun's LOCAL_RANK counts"),
    "ddp_bucket_cap_mb": honoured("the same as `bucket_bytes`, in MiB"),
    "ddp_find_unused_parameters": no_effect(
        "the trace knows which parameters the loss depends on; nothing has to be found"
    ),
    "ddp_static_graph": no_effect("a traced graph is static"),
    "ddp_broadcast_buffers": refused(
        "replicas synchronise the buffers that forward writes after every step; leave it unset",
        False,
        layout=Layout.DATA_PARALLEL,
    ),
    "ddp_backend": refused("merak.init connects the ranks; use merak.init(backend=…)"),
    "ddp_timeout": refused("merak.init connects the ranks; use merak.init(timeout_s=…)"),
    "fsdp": refused(_SHARDS, False, "", []),
    "fsdp_config": refused(_SHARDS, {}),
    "deepspeed": refused(_DEGREES),
    "parallelism_config": refused(_DEGREES),
    "accelerator_config": honoured("option by option, as below"),
}

ACCELERATOR = {
    "split_batches": refused(
        "batch sizes are those of one microbatch of one replica; set per_device_train_batch_size",
        layout=Layout.DATA_PARALLEL,
    ),
    "dispatch_batches": refused(
        "every rank reads the columns that its own segments use; leave it unset",
        False,
        layout=Layout.SEVERAL_RANKS,
    ),
    "even_batches": no_effect(
        "no sample is ever duplicated; the end of an epoch is as in one process"
    ),
    "use_seedable_sampler": honoured("as in one process"),
    "non_blocking": honoured("as in one process, in the loader of every rank"),
    "gradient_accumulation_kwargs": honoured(
        "num_steps is `gradient_accumulation_steps`; the other options change no gradient"
    ),
    "use_configured_state": refused(
        "the state of each rank's Accelerate is made by Merak; leave it False",
        layout=Layout.SEVERAL_RANKS,
    ),
}
"""The decisions for the options of `accelerator_config`."""

SEQ2SEQ = {
    "predict_with_generate": honoured(
        "while an evaluation lasts, every rank has a copy of the whole model, and ranks share out "
        "the batches; without room for copies, stages generate together"
    ),
    "generation_max_length": _GENERATES,
    "generation_num_beams": _GENERATES,
    "generation_config": _GENERATES,
    "sortish_sampler": no_effect("transformers no longer reads it"),
}
"""The decisions for what `Seq2SeqTrainingArguments` adds, in `MerakSeq2SeqArguments`."""

SECTIONS: dict[str, dict[str, Rule]] = {
    "Output and scripts": OUTPUT,
    "Length and batches": LENGTH,
    "Optimization": OPTIMIZATION,
    "Precision": PRECISION,
    "Memory and speed": MEMORY_AND_SPEED,
    "Logging": LOGGING,
    "Evaluation": EVALUATION,
    "Saving": SAVING,
    "Reproducibility": REPRODUCIBILITY,
    "Data": DATA,
    "Distribution": DISTRIBUTION,
}
"""The decisions as the documentation groups them."""

RULES: dict[str, Rule] = {
    name: rule for section in SECTIONS.values() for name, rule in section.items()
}
"""The decision for every field, by its name."""
