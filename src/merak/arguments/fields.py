"""Fields of training arguments: those of transformers, and Merak's own with their help."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments

from merak.engine.loss_scale import MAX_SKIPPED_STEPS


@dataclass(repr=False)  # transformers' own repr hides tokens
class TrainingFields(TrainingArguments):
    """Fields of a training job, without what `MerakArguments` does with them."""

    # Fields that the command line may give as a JSON string; transformers parses them.
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "feature_dict"]  # noqa: RUF012

    schedule: str = field(
        default="1f1b",
        metadata={
            "help": "The pipeline schedule: a name that `merak schedule --list` shows, or a file "
            "that holds one."
        },
    )
    partition: list[int] | None = field(
        default=None,
        metadata={
            "help": "Number of segments of every stage, in order, such as 5 7 7 7. If unset, "
            "segments are balanced over the stages by time."
        },
    )
    segment_times: str | None = field(
        default=None,
        metadata={
            "help": "JSON file with measured seconds per segment, which balancing uses instead "
            "of its estimate."
        },
    )
    feature_dict: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "How tensor parallelism splits parameters, as a dictionary or a JSON file of "
            "one: names or patterns of them to 'column', 'row', 'vocabulary', 'replicate'. It "
            "overrides what is derived from the model."
        },
    )
    trace_cache: str | None = field(
        default=None,
        metadata={
            "help": "Folder where traced models are kept. If unset, $MERAK_CACHE or "
            "~/.cache/merak; if empty, nothing is kept."
        },
    )
    nan_policy: str = field(
        default="stop",
        metadata={
            "help": "What becomes of a step whose loss or gradient is NaN or infinite: 'stop' "
            "ends the job with a sentence, 'skip' leaves the parameters as they are on all ranks.",
            "choices": ["stop", "skip"],
        },
    )
    max_skipped_steps: int = field(
        default=MAX_SKIPPED_STEPS,
        metadata={
            "help": "With nan_policy='skip', so many steps in a row may be skipped; one more ends "
            "the job, since the model has diverged. An overflow of fp16 is not counted while its "
            "loss scale is above 1."
        },
    )
    bucket_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Bytes of gradients that replicas reduce together, while the backward pass "
            "still runs. If unset, 25 MiB, or ddp_bucket_cap_mb."
        },
    )
    master_weights: bool = field(
        default=False,
        metadata={
            "help": "Keep a float32 master of every parameter of a lower precision, which the "
            "optimizer steps."
        },
    )
    gradient_sums: str = field(
        default="float32",
        metadata={
            "help": "What gradients of parameters of a lower precision are summed in, over "
            "microbatches and replicas: 'float32', or their 'own' type in half the memory.",
            "choices": ["float32", "own"],
        },
    )
    zero: int = field(
        default=0,
        metadata={
            "help": "What replicas share instead of each having all of it: 1 the optimizer's state "
            "and update, 2 also the gradients, 3 also the parameters, 0 nothing.",
            "choices": [0, 1, 2, 3],
        },
    )
    tied_gradients: str = field(
        default="microbatch",
        metadata={
            "help": "When gradients of parameters tied across stages are summed: after every "
            "'microbatch', which is bit-identical to one process, or once a 'step', which sends "
            "less.",
            "choices": ["microbatch", "step"],
        },
    )
    hang_limit_s: float = field(
        default=600.0,
        metadata={
            "help": "Seconds that a rank may wait for others, or be in one action of the pipeline; "
            "after them every rank prints where it stands, and the job ends. For a rank that "
            "traces, builds, loads or saves, others wait three times as long."
        },
    )
    max_shapes: int = field(
        default=64,
        metadata={
            "help": "So many shapes of microbatches are kept ready beside the first one; of more, "
            "those met last. A shape that is not ready is traced when a step meets it."
        },
    )
    sub_pipelining: str = field(
        default="auto",
        metadata={
            "help": "Whether tensor parallel work runs every microbatch in two halves, so that "
            "one's all-reduces run beside the other's computation: 'on', 'off', or 'auto' for "
            "where it pays, with all-reduces measured on GPUs or between machines.",
            "choices": ["auto", "on", "off"],
        },
    )
    sequence_parallel: bool = field(
        default=False,
        metadata={
            "help": "Whether tensor parallel ranks hold shares of the sequence between the "
            "products that they split, which takes less memory: sums end in reduce-scatters, and "
            "all-gathers come before the next products. Not together with sub_pipelining='on'."
        },
    )
    recompute: str | None = field(
        default=None,
        metadata={
            "help": "Activations that are computed again for the backward pass instead of kept: "
            "'off', 'full', the share of every stage's segments (0 to 1), segments by number or "
            "name such as '3,4,7', 'selective' for all but operators that are dear to compute and "
            "cheap to keep, or 'auto' for as few as the memory allows. If unset, as the schedule "
            "says, which keeps all unless its name says otherwise."
        },
    )
    offload_activations: str | None = field(
        default=None,
        metadata={
            "help": "Of the activations that are kept, those that wait for the backward pass in "
            "host memory, to and from which they are copied while other segments compute: 'off', "
            "'full', the share of every stage's segments (0 to 1), segments by number or name such "
            "as '3,4,7', or 'auto' for those that the memory makes needed; with recompute='auto' "
            "the other way is to recompute, and the shorter iteration decides. If unset, none. Not "
            "together with sub_pipelining='on'."
        },
    )
    host_bytes_per_s: float | None = field(
        default=None,
        metadata={
            "help": "Bytes per second that a rank copies to host memory while it copies as many "
            "back, for offload_activations='auto'. If unset, it is measured."
        },
    )
    memory_budget: int | None = field(
        default=None,
        metadata={
            "help": "Bytes that a rank may hold; a job that needs more is refused before it "
            "starts. If unset, the memory of the GPU, and on the CPU no limit."
        },
    )


OWN_FIELDS = frozenset(f.name for f in fields(TrainingFields)) - frozenset(
    f.name for f in fields(TrainingArguments)
)
"""The fields that `MerakArguments` adds."""
