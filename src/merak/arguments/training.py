"""`MerakArguments`: the arguments of `transformers.Trainer`, and a few of Merak's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from merak.arguments.alone import fresh_state
from merak.arguments.features import write_features
from merak.arguments.optimizers import OPTIMIZERS
from merak.arguments.rules import UNKNOWN, Layout, Policy, problems, raise_first, refusal
from merak.arguments.table import ACCELERATOR, RULES
from merak.core.errors import ArgumentsError, PlanError
from merak.core.mesh import Mesh, current_mesh
from merak.engine.precision import check_autocast
from merak.graph.feature_file import parse_features
from merak.plan.recompute import Mode, parse_recompute

CACHE_VARIABLE = "MERAK_CACHE"
"""The environment variable that names the folder of traced models."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are reduced together: what DistributedDataParallel takes."""


def default_trace_cache() -> str:
    """The folder of traced models: $MERAK_CACHE, or ~/.cache/merak (as XDG_CACHE_HOME says)."""
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return named
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(home), "merak")


@dataclass(repr=False)  # transformers' own repr hides tokens
class MerakArguments(TrainingArguments):
    """The arguments of `transformers.Trainer` for a job of dp × tp × pp ranks.

    Every field of `transformers.TrainingArguments` keeps its meaning or is refused with a
    sentence; docs/arguments.md says which. Call `merak.init` before building it.

    Args:
        schedule: the order of forward and backward work in the pipeline.
        partition: segments of every stage, in order; balanced by time where it is not given.
        segment_times: JSON file with the measured seconds of every segment, for balancing.
        feature_dict: how parameters are split by tensor parallelism, or a JSON file that says so.
        trace_cache: folder where traced models are kept; empty for none.
        nan_policy: "stop" or "skip", for a step whose loss or gradient is not finite.
        bucket_bytes: bytes of gradients reduced together over the replicas.
        master_weights: keep float32 masters of bfloat16 and float16 parameters.
        gradient_sums: "float32" or "own": what gradients of such parameters are summed in.
        zero: 1 shards the optimizer over the replicas, 2 also the gradients, 3 the parameters.
        tied_gradients: "microbatch" or "step": when gradients of tied parameters are summed.
        hang_limit_s: seconds that a rank may wait before every rank says where it stands and the
            job ends.
        max_shapes: so many shapes of microbatches are kept ready beside the first one.
        sub_pipelining: "auto", "on" or "off": whether microbatches run in two halves.
        sequence_parallel: whether tensor parallel ranks hold shares of the sequence between the
            products that they split.
        recompute: what is computed again for the backward instead of kept.
        memory_budget: bytes that a rank may hold.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument cannot be honoured.
    """

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
            "after them every rank prints where it stands, and the job ends."
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
    memory_budget: int | None = field(
        default=None,
        metadata={
            "help": "Bytes that a rank may hold; a job that needs more is refused before it "
            "starts. If unset, the memory of the GPU, and on the CPU no limit."
        },
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured, then settle defaults as transformers does."""
        mesh = current_mesh()
        raise_first(problems(self, RULES, OWN_FIELDS, mesh))
        check_autocast(self.autocast, mesh.device)  # before transformers looks at device 0
        if mesh.device.type == "cpu" and self.bf16:
            self.use_cpu = True  # transformers would look for a GPU that has it
        super().__post_init__()  # type: ignore[no-untyped-call]
        check_arguments(self)
        self._settle()

    def _settle(self) -> None:
        if current_mesh().device.type == "cpu":
            self.dataloader_pin_memory = False  # as transformers does with use_cpu
        if self.trace_cache is None:
            self.trace_cache = default_trace_cache()
        self.trace_cache = os.path.expanduser(self.trace_cache)
        if isinstance(self.feature_dict, str):
            self.feature_dict = _read_json("feature_dict", self.feature_dict, dict)
        if isinstance(self.feature_dict, Mapping):
            parse_features(self.feature_dict)  # raises where one is wrong
        if self.bucket_bytes is None:
            cap_mb = self.ddp_bucket_cap_mb
            self.bucket_bytes = DEFAULT_BUCKET_BYTES if cap_mb is None else cap_mb * 2**20

    def to_dict(self) -> dict[str, Any]:
        """The arguments as plain values; a feature dict as a JSON file has it."""
        plain: dict[str, Any] = super().to_dict()  # type: ignore[no-untyped-call]
        if isinstance(self.feature_dict, Mapping):
            plain["feature_dict"] = write_features(self.feature_dict)
        return plain

    @cached_property
    def _setup_devices(self) -> torch.device:
        """This rank's device, with Accelerate in single-process mode."""
        mesh = current_mesh()
        self.distributed_state = fresh_state()
        self._n_gpu = 1 if mesh.device.type == "cuda" else 0
        return mesh.device

    @property
    def autocast(self) -> torch.dtype | None:
        """What the model's forward is autocast to; None for its own precision."""
        if self.bf16:
            return torch.bfloat16
        return torch.float16 if self.fp16 else None

    @property
    def world_size(self) -> int:
        """The number of replicas, which batch sizes are multiplied by: the degree of dp."""
        return current_mesh().dp

    @property
    def process_index(self) -> int:
        """The global rank; 0 logs and saves."""
        return current_mesh().rank

    @property
    def local_process_index(self) -> int:
        """The rank on this node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def should_log(self) -> bool:
        """Whether this is rank 0, the one that speaks."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.process_index == 0

    @property
    def place_model_on_device(self) -> bool:
        """Never: the engine creates this rank's segments, and only those, on the device."""
        return False

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Let rank 0 (of each node, where `local`) do the work before the others.

        Args:
            local: the first rank of each node rather than that of the job.
            desc: what is done, as in transformers.
        """
        if current_mesh().world_size == 1:
            yield
            return
        first = (self.local_process_index if local else self.process_index) == 0
        if not first:
            dist.barrier()
        try:
            yield
        finally:
            if first:
                dist.barrier()


OWN_FIELDS = frozenset(f.name for f in fields(MerakArguments)) - frozenset(
    f.name for f in fields(TrainingArguments)
)
"""The fields that `MerakArguments` adds."""


def check_arguments(arguments: MerakArguments) -> None:
    """Refuse arguments that this job cannot honour; call it again where they may have changed.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument cannot be honoured; the first one is named.
    """
    mesh = current_mesh()
    raise_first(problems(arguments, RULES, OWN_FIELDS, mesh))
    raise_first(_optimizer_problems(arguments, mesh))
    raise_first(_accelerator_problems(arguments, mesh))
    raise_first(_own_problems(arguments, mesh))


def _optimizer_problems(arguments: MerakArguments, mesh: Mesh) -> Iterator[str]:
    name = str(getattr(arguments.optim, "value", arguments.optim))
    rule = OPTIMIZERS.get(name, UNKNOWN)
    if rule.policy is Policy.REFUSED and rule.layout.holds(mesh):
        yield refusal("optim", name, rule)
    elif arguments.zero and mesh.dp > 1 and rule.layout is Layout.TENSOR_PARALLEL:
        yield (
            f"optim={name!r} cannot be honoured with zero={arguments.zero}: its update looks at "
            "whole parameters, of which each replica steps some rows; use 'adamw_torch', or zero=0."
        )
    elif (arguments.zero or arguments.master_weights) and name.startswith("schedule_free"):
        yield (
            f"optim={name!r} cannot be honoured with zero={arguments.zero} and master_weights="
            f"{arguments.master_weights}: it also changes the parameters between steps, which then "
            "are not its own; use 'adamw_torch'."
        )


def _accelerator_problems(arguments: MerakArguments, mesh: Mesh) -> Iterator[str]:
    config: object = arguments.accelerator_config
    if isinstance(config, AcceleratorConfig):
        for sentence in problems(config, ACCELERATOR, frozenset(), mesh):
            yield f"accelerator_config.{sentence}"


def _own_problems(arguments: MerakArguments, mesh: Mesh) -> Iterator[str]:
    for name in ("nan_policy", "tied_gradients", "gradient_sums", "zero"):
        choices = MerakArguments.__dataclass_fields__[name].metadata["choices"]
        if getattr(arguments, name) not in choices:
            named = " or ".join(repr(choice) for choice in choices)
            yield f"{name}={getattr(arguments, name)!r} is not a choice; use {named}."
    for name in ("bucket_bytes", "ddp_bucket_cap_mb"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            yield f"{name}={value} is not a size of a bucket; use a whole number of 1 or more."
    cap_mb, bucket_bytes = arguments.ddp_bucket_cap_mb, arguments.bucket_bytes
    if cap_mb is not None and bucket_bytes is not None and bucket_bytes != cap_mb * 2**20:
        yield (
            f"bucket_bytes={bucket_bytes} and ddp_bucket_cap_mb={cap_mb} contradict each other; "
            "set one of them."
        )
    if arguments.max_shapes < 1:
        yield f"max_shapes={arguments.max_shapes} is no number of shapes to keep; use 1 or more."
    if not arguments.hang_limit_s > 0:
        yield (
            f"hang_limit_s={arguments.hang_limit_s} is not a time to wait; use a number of seconds "
            "above 0."
        )
    yield from _memory_problems(arguments, mesh)
    partition = arguments.partition
    if partition is not None and (not partition or min(partition) < 1):
        yield f"partition={partition} has an empty stage; give every stage a segment or more."
    if partition is not None and len(partition) % mesh.pp:
        yield (
            f"partition={partition} names {len(partition)} stages, which cannot be laid out over "
            f"pp={mesh.pp} positions; name {mesh.pp} stages, or a multiple."
        )
    if arguments.segment_times is not None and not os.path.isfile(arguments.segment_times):
        yield f"segment_times={arguments.segment_times!r} is not a file; name a JSON file of times."


def _memory_problems(arguments: MerakArguments, mesh: Mesh) -> Iterator[str]:
    budget = arguments.memory_budget
    if budget is not None and budget < 1:
        yield f"memory_budget={budget} is not a size; use a number of bytes above 0."
    try:
        wish = parse_recompute(arguments.recompute)
    except PlanError as error:
        yield str(error)
        return
    if wish.mode is Mode.AUTO and budget is None and mesh.device.type == "cpu":
        yield "recompute='auto' needs to know the memory of a rank; set memory_budget in bytes."


def _read_json(name: str, path: str, kind: type) -> Any:
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ArgumentsError(f"{name}={path!r} cannot be read as JSON: {cause}.") from cause
    if not isinstance(loaded, kind):
        raise ArgumentsError(
            f"{name}={path!r} holds a {type(loaded).__name__}; it should hold a {kind.__name__}."
        )
    return loaded
