"""Options of a parallel training job, each written once: name, type, default, range and help.

`EngineOptions` inherits them; `MerakArguments` and the requests of the command line take single
ones by name (`taken`). What a page, a `--help` or a range check says of an option comes from here.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Protocol, TypeVar, get_type_hints

from merak.core.errors import ArgumentsError
from merak.core.units import read_bytes
from merak.plan.cluster.hierarchy import HIERARCHIES
from merak.plan.gradient_compression import AUTO, COMPRESSIONS, USUAL_FRACTION, USUAL_RANK
from merak.plan.optimizer.home import read_home
from merak.plan.recompute_spec import RECOMPUTES, Recompute
from merak.schedule.ir import USUAL

_Class = TypeVar("_Class", bound=type)

BUCKET_BYTES = 25 * 2**20
"""Bytes of gradients that are reduced together: as in torch's DistributedDataParallel."""


LOSS_CHUNK_BYTES = 512 * 2**20
"""Bytes of float32 logits that a head makes at a time."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of the values that a numeric option may have; NaN is in no range.

    Args:
        least: the smallest.
        most: the largest.
        advice: what to use instead of a value outside.
        problem: what a value outside is, after the option and its value.
    """

    least: float
    most: float
    advice: str
    problem: str = "is out of range"

    def holds(self, value: float | str) -> bool:
        """Whether a number lies in the range; a text does not."""
        return not isinstance(value, str) and self.least <= float(value) <= self.most


_SEARCHED, _GIVEN, _PRICED = "searched", "given", "priced"

LARGEST = sys.float_info.max
SMALLEST = math.nextafter(0, 1)

_BUCKET = Range(1, LARGEST, "use a whole number of 1 or more", "is not a size of a bucket")
_SECONDS = Range(SMALLEST, math.inf, "use a number of seconds above 0", "is not a time to wait")
_SHAPES = Range(1, LARGEST, "use 1 or more", "is no number of shapes to keep")
_RATE = Range(SMALLEST, LARGEST, "use a number of bytes per second above 0", "is no rate")
_BYTES = Range(1, LARGEST, "use a number of bytes above 0", "is not a size")
_CHUNK = Range(0, LARGEST, "use a number of bytes, or 0 for all logits at once", "is not a size")
_LOCAL_STEPS = Range(0, LARGEST, "use 0 or more", "is no number of steps")
_CAPACITY = Range(1, LARGEST, "use a factor of 1 or more, such as 1.25", "is no capacity")
_ZERO_GROUP = Range(0, LARGEST, "use 0 for all replicas, or a number that divides dp × cp")
_FRACTION = Range(SMALLEST, 1.0, "use a fraction such as 0.01", "is no fraction")
_AVERAGE = Range(0, math.nextafter(1, 0), "use a number such as 0.999", "is no part of an average")
_RANK = Range(1, LARGEST, "use 1 or more", "is no rank")
_KEEP = Range(SMALLEST, 1, "use a number above 0 and at most 1", "is no probability to keep blocks")
_DECAY = Range(0, LARGEST, "use a number of 0 or more, such as 0.001", "is no rate")
_OUTER_RATE = Range(SMALLEST, LARGEST, "use a number above 0, such as 0.7", "is no learning rate")
_OUTER_MOMENTUM = Range(
    0, math.nextafter(1, 0), "use a number of 0 or more and below 1", "is no momentum"
)


def option(
    default: Any,
    placeholder: str,
    help: str,
    *,
    choices: Sequence[Any] = (),
    within: Range | None = None,
    reads: Callable[[object], object] | None = None,
    planned: str = "",
    searched: Callable[[Any], Sequence[Any]] | None = None,
    flag: str = "",
) -> Any:
    """Field of an options dataclass.

    Args:
        default: its value where none is given.
        placeholder: what `--help` shows for the value; empty for a flag.
        help: sentence for people, in the documentation and in `--help`.
        choices: the values that it may have; empty for any.
        within: the range of a number.
        reads: reads a value that people write as text, such as "80GB", and leaves others.
        planned: how a plan takes it: "searched" for layouts that differ in it, "given" for layouts
            that have it as it is given, "priced" for what is the job's and changes the time or
            memory of a layout, or "" for not at all.
        searched: the values that a search for plans tries in a candidate with the same degrees.
        flag: of the command line, where that is not the name with dashes.
    """
    metadata = {"help": help, "placeholder": placeholder, "choices": list(choices), "flag": flag}
    planned = planned if searched is None else _SEARCHED
    further = {"range": within, "reads": reads, "planned": planned, "searched": searched}
    return field(default=default, metadata=metadata | further)


def _cuts_blocks(own: Any) -> bool:
    """Whether tensor parallel ranks reduce activations that are whole on each of them."""
    return bool(own.tp > 1 and own.cp == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """Layout and run of a model on many ranks, as users choose them."""

    schedule: str = option(
        USUAL,
        "NAME",
        "The pipeline schedule: a name that `merak schedule --list` shows, or a file that holds "
        "one.",
        planned=_SEARCHED,
    )
    schedule_options: Mapping[str, Any] | None = option(
        None,
        "JSON",
        'Options of the schedule, as a dictionary, such as {"chunks": 4} for the stages of '
        "each pp rank of 'interleaved_1f1b'.",
        planned=_GIVEN,
        flag="--option",
    )
    partition: Sequence[int] | None = option(
        None,
        "N …",
        "Number of segments of every stage, in order, such as 5 7 7 7. If unset, segments are "
        "balanced over the stages by time.",
        planned=_GIVEN,
    )
    segment_times: str | os.PathLike[str] | None = option(
        None,
        "FILE",
        "JSON file with measured seconds per segment, which balancing uses instead of its "
        "estimate.",
    )
    feature_dict: Mapping[str, Any] | None = option(
        None,
        "JSON",
        "Tensor parallel attributes of parameters, as a dictionary or a JSON file of one: names or "
        "patterns of parameters to 'column', 'row', 'vocabulary', 'replicate'. It overrides what "
        "is derived from the model.",
    )
    bucket_bytes: int = option(
        BUCKET_BYTES,
        "BYTES",
        "Bytes of gradients that replicas reduce together, while the backward pass still runs. If "
        "unset, 25 MiB, or ddp_bucket_cap_mb.",
        within=_BUCKET,
        reads=read_bytes,
        planned=_PRICED,
    )
    master_weights: bool = option(
        False,
        "",
        "Keep a float32 master of every parameter of a lower precision, which the optimizer steps.",
        planned=_PRICED,
    )
    gradient_sums: str = option(
        "float32",
        "TYPE",
        "The type in which gradients of parameters of a lower precision are accumulated over "
        "microbatches and reduced over replicas: 'float32', or their 'own' type in half the "
        "memory.",
        choices=("float32", "own"),
        planned=_PRICED,
    )
    zero: int = option(
        0,
        "0|1|2|3",
        "The stage of ZeRO, what replicas shard instead of each holding all of it: 1 the "
        "optimizer's state and update, 2 also the gradients, 3 also the parameters, 0 nothing.",
        choices=(0, 1, 2, 3),
        searched=lambda own: (0, 1, 2, 3) if own.replicas > 1 else (0,),
    )
    zero_group_size: int = option(
        0,
        "RANKS",
        "Replicas that shard by zero between them, neighbours in the order of ranks, such as the "
        "8 of a node; groups of them hold the same shards, and all-reduce their gradients "
        "(PyTorch's HYBRID_SHARD, DeepSpeed's MiCS). If 0, all replicas shard.",
        within=_ZERO_GROUP,
        planned=_GIVEN,
    )
    local_steps: int = option(
        0,
        "STEPS",
        "Local SGD: optimizer steps that every data parallel replica takes on its own before all "
        "replicas average their parameters, as outer_optimizer says. If 0, replicas reduce "
        "gradients in every step. Not with zero, nor asynchronous schedules.",
        within=_LOCAL_STEPS,
        planned=_PRICED,
    )
    outer_optimizer: str = option(
        "average",
        "NAME",
        "What replicas do after local_steps steps: 'average' parameters, or 'nesterov' (DiLoCo), "
        "where an outer SGD with Nesterov momentum steps the parameters they last had in common "
        "by the mean of what the replicas have changed.",
        choices=("average", "nesterov"),
        planned=_PRICED,
    )
    outer_learning_rate: float = option(
        0.7,
        "RATE",
        "Learning rate of outer_optimizer='nesterov'.",
        within=_OUTER_RATE,
    )
    outer_momentum: float = option(
        0.9,
        "MOMENTUM",
        "Momentum of outer_optimizer='nesterov'.",
        within=_OUTER_MOMENTUM,
    )
    tied_gradients: str = option(
        "microbatch",
        "WHEN",
        "When gradients of parameters tied across stages are all-reduced: after every "
        "'microbatch', which is bit-identical to one process, or once a 'step', which sends less.",
        choices=("microbatch", "step"),
        planned=_PRICED,
    )
    gradient_compression: str = option(
        "off",
        "KIND",
        "How replicas compress the gradients that they reduce, for slow links: 'fp16' and 'bf16' "
        "send 16-bit numbers, 'powersgd' two factors of every matrix, '1bit' signs, 'topk' the "
        "largest elements, 'dgc' those of momenta of SGD, all but the first two with error "
        "feedback, 'off' all of it. Needs zero=0 and a synchronous schedule. 'auto' is chosen "
        "with the plan: 'bf16' or 'powersgd' where it saves 5 % of a step by price.",
        choices=(*COMPRESSIONS, AUTO),
        planned=_PRICED,
    )
    powersgd_rank: int = option(
        USUAL_RANK,
        "RANK",
        "Columns of the two factors that gradient_compression='powersgd' sends of a matrix: more "
        "send more, and leave less out.",
        within=_RANK,
        planned=_PRICED,
    )
    topk_fraction: float = option(
        USUAL_FRACTION,
        "FRACTION",
        "Fraction of the elements of each gradient that gradient_compression='topk' and 'dgc' "
        "send.",
        within=_FRACTION,
        planned=_PRICED,
    )
    hierarchical_reductions: str = option(
        "off",
        "off|on|auto",
        "Whether replicas reduce gradients by hierarchy, for slow links between nodes: inside "
        "every node, then between nodes, then inside again; with zero also what they gather. 'on', "
        "'off', or 'auto' for where the cost model finds it faster.",
        choices=HIERARCHIES,
        planned=_PRICED,
    )
    layer_keep: float = option(
        1.0,
        "PROBABILITY",
        "Progressive layer dropping: the probability with which each sublayer (attention, "
        "feed-forward) of the last residual block is kept for a microbatch at the end of training; "
        "those of earlier blocks, and all at first, are kept more often. 0.5 is the paper's; 1 "
        "drops none.",
        within=_KEEP,
    )
    layer_keep_decay: float = option(
        1e-3,
        "RATE",
        "How fast layer_keep is approached, per optimizer step: after t steps sublayers of the "
        "last block are kept with the probability (1 - layer_keep) exp(-layer_keep_decay t) + "
        "layer_keep.",
        within=_DECAY,
    )
    hang_limit_s: float = option(
        600.0,
        "SECONDS",
        "Seconds that a rank may wait for others, or be in one action of the pipeline; after them "
        "every rank prints where it stands, and the job ends. For a rank that traces, builds, "
        "loads or saves, others wait three times as long.",
        within=_SECONDS,
    )
    max_shapes: int = option(
        64,
        "N",
        "Shapes of microbatches whose programs are cached beside the first one's, the most "
        "recently used. Any other shape is traced when a step meets it.",
        within=_SHAPES,
    )
    sub_pipelining: str = option(
        "auto",
        "auto|on|off",
        "Whether tensor parallel ranks run every microbatch as two sub-microbatches, so that the "
        "all-reduces of one run beside the computation of the other: 'on', 'off', or 'auto' for "
        "where it pays, with all-reduces measured on GPUs or between machines.",
        choices=("auto", "on", "off"),
        searched=lambda own: (
            ("off", "on") if own.microbatch > 1 and _cuts_blocks(own) else ("off",)
        ),
    )
    expert_capacity: float | None = option(
        None,
        "FACTOR",
        "Capacity of experts in training: the rows of a replica's microbatch that each expert "
        "computes at most, as a factor, 1 or more, of those that it has where tokens are spread "
        "evenly. Rows are padded to it, so that nothing is counted before they are exchanged; what "
        "exceeds it is dropped, the last tokens first. If unset, no row is padded or dropped.",
        within=_CAPACITY,
        planned=_PRICED,
    )
    loss_chunk_bytes: int = option(
        LOSS_CHUNK_BYTES,
        "BYTES",
        "Bytes of float32 logits that a rank makes at a time, where a cross entropy alone reads "
        "those of a linear head, or a loss that reads a few numbers of each token, also as "
        "'256MiB': a head that makes more runs in chunks of tokens where that takes less memory, "
        "and a cross entropy leaves out ignored ones. If 0, all logits are made and kept; if "
        "unset, 512 MiB.",
        within=_CHUNK,
        reads=lambda given: 0 if given is None else read_bytes(given),  # which meant all, once
        planned=_PRICED,
    )
    fp8: bool = option(
        False,
        "",
        "Products of linear layers and of their gradients in float8, each operand scaled anew by "
        "its largest magnitude: those of trained weights whose sizes are multiples of 16, but for "
        "the head's. GPUs from compute capability 8.9 (Ada, Hopper) on have it; CPUs compute the "
        "same in float32. Evaluations keep the weights' precision.",
        planned=_PRICED,
    )
    sequence_parallel: bool = option(
        False,
        "",
        "Shard the sequence over tensor parallel ranks between the matrix products that they "
        "split, which takes less memory: reduce-scatters and all-gathers replace all-reduces. Not "
        "together with sub_pipelining='on'.",
        searched=lambda own: (False, True) if _cuts_blocks(own) else (False,),
    )
    recompute: Recompute = option(
        None,
        "WHAT",
        "Activations that are recomputed for the backward pass instead of saved: 'off', 'full', "
        "the fraction of every stage's segments (0 to 1), segments by number or name such as "
        "'3,4,7', 'selective' for all but operators that are slow to compute and small to save, or "
        "'auto' for as few as the memory allows. If unset, as the schedule says, which saves all "
        "unless its name says otherwise.",
        searched=lambda own: RECOMPUTES,
    )
    offload_activations: Recompute = option(
        None,
        "WHAT",
        "Saved activations that are offloaded to host memory until the backward pass, copied while "
        "other segments compute: 'off', 'full', the fraction of every stage's segments (0 to 1), "
        "segments by number or name such as '3,4,7', or 'auto' for those that the memory makes "
        "needed; with recompute='auto' the alternative is to recompute, and the shorter iteration "
        "decides. If unset, none. Not together with sub_pipelining='on'.",
        planned=_GIVEN,
        flag="--offload",
    )
    offload_optimizer: str | None = option(
        None,
        "WHERE",
        "Where the optimizer's states, float32 masters and reduced gradients are, and where it "
        "steps: 'cpu' for host memory and the processor, a folder such as /local/states for files "
        "in it, or 'off' for the device. Not with local_steps.",
        reads=read_home,
        planned=_GIVEN,
    )
    delay_optimizer_update: bool = option(
        False,
        "",
        "Whether the optimizer of offload_optimizer steps beside all of the next training step, "
        "whose gradients are then those of the parameters one update earlier. Checkpoints and "
        "evaluations have all updates. Other losses than without it.",
        planned=_PRICED,
    )
    ema_decay: float | None = option(
        None,
        "DECAY",
        "Keep an exponential moving average (EMA) of every trained parameter, beside the "
        "optimizer's states and sharded with them: behind each update, decay * average + (1 - "
        "decay) * parameter, such as 0.999. Checkpoints have it, `merak.averaged_parameters` and "
        "`merak export --average` read it. If unset, none. Not with local_steps.",
        within=_AVERAGE,
        planned=_PRICED,
    )
    host_bytes_per_s: float | None = option(
        None,
        "RATE",
        "Bytes per second that a rank copies to host memory while it copies as many back, for "
        "offload_activations='auto'. If unset, it is measured.",
        within=_RATE,
        reads=read_bytes,
    )
    memory_budget: int | None = option(
        None,
        "BYTES",
        "Bytes that a rank may hold, also as '80GB' or '80GiB'; a job that needs more is refused "
        "before it starts. If unset, the memory of the GPU, and on the CPU no limit.",
        within=_BYTES,
        reads=read_bytes,
        flag="--budget",
    )

    def __post_init__(self) -> None:
        """Refuse values that are out of range or no choice.

        Raises:
            ArgumentsError: one is.
        """
        for name in PARALLEL_OPTIONS:
            value = getattr(self, name)
            if name in READS:
                value = READS[name](value)
                object.__setattr__(self, name, value)
            for problem in option_problems(name, value, f"{name}="):
                raise ArgumentsError(problem)

    def priced(self) -> dict[str, Any]:
        """Options common to a job's layouts that change their time or memory, by name."""
        return {name: getattr(self, name) for name in PRICED}

    @property
    def outer_copies(self) -> int:
        """Copies of the trained parameters that Local SGD holds: its anchor and momentum."""
        return 2 if self.local_steps and self.outer_optimizer == "nesterov" else 0

    @property
    def exact_tied_gradients(self) -> bool:
        """Whether gradients of tied parameters are all-reduced after every microbatch."""
        return self.tied_gradients == "microbatch"

    @property
    def float32_gradients(self) -> bool:
        """Whether gradients of a lower precision are accumulated and reduced in float32."""
        return self.gradient_sums == "float32"


class ZeroOptions(Protocol):
    """Choices of a layout by which replicas shard."""

    @property
    def zero(self) -> int:
        """The stage of ZeRO."""

    @property
    def zero_group_size(self) -> int:
        """Replicas that shard between them; 0 for all."""


def zero_degree(own: ZeroOptions, replicas: int, copies: int = 1) -> int:
    """The number of replicas that shard between them; 1 where each has all.

    Args:
        own: the choices.
        replicas: dp × cp.
        copies: of a stage, that of the schedule.
    """
    return min(own.zero_group_size or replicas * copies, replicas * copies) if own.zero else 1


_FIELDS = {own.name: own for own in fields(ParallelOptions)}

PARALLEL_OPTIONS = tuple(_FIELDS)
"""Names of the options, which `MerakArguments` has as well."""

LAYOUT = tuple(n for n, f in _FIELDS.items() if f.metadata["planned"] in (_SEARCHED, _GIVEN))
"""Names of the options that are part of a layout."""

PRICED = tuple(n for n, f in _FIELDS.items() if f.metadata["planned"] == _PRICED)
"""Names of the options that are the job's, and that change time or memory of its layouts."""

RANGES: Mapping[str, Range] = {
    name: own.metadata["range"] for name, own in _FIELDS.items() if own.metadata["range"]
}
"""Range of every option that is a number."""

READS: Mapping[str, Callable[[object], object]] = {
    name: own.metadata["reads"] for name, own in _FIELDS.items() if own.metadata["reads"]
}
"""Readers of the options that people write as text."""


def taken(name: str, default: Any = MISSING) -> Any:
    """Field of another dataclass that has the default and the help of an option.

    Args:
        name: of the option.
        default: another default.
    """
    own = _FIELDS[name]
    shown = {key: own.metadata[key] for key in ("help", "choices") if own.metadata[key]}
    return field(default=own.default if default is MISSING else default, metadata=shown)


def takes_options(*names: str) -> Callable[[_Class], _Class]:
    """Class decorator, below `dataclass`: fields of the options that the class does not declare.

    Args:
        *names: of the options.
    """

    def decorated(cls: _Class) -> _Class:
        own, hints = inspect.get_annotations(cls), get_type_hints(ParallelOptions)
        further = {name: hints[name] for name in names if name not in own}
        cls.__annotations__ = own | further
        for name in further:
            setattr(cls, name, taken(name))
        return cls

    return decorated


def common_options(arguments: Any) -> ParallelOptions:
    """The options that all layouts of a job have, others at their defaults.

    Args:
        arguments: with the job's options as attributes.
    """
    return ParallelOptions(**{name: getattr(arguments, name) for name in PRICED})


def declared(name: str) -> Field[Any]:
    """The field of an option, with its default and all that `option` was given."""
    return _FIELDS[name]


def is_searched(name: str) -> bool:
    """Whether a search gives an option several values."""
    return str(_FIELDS[name].metadata["planned"]) == _SEARCHED


def searched_values(own: Any) -> dict[str, Sequence[Any]]:
    """Values that a search tries, by option; without schedules, which are the registry's.

    Args:
        own: a candidate with the degrees and the microbatch.
    """
    metadata = {name: _FIELDS[name].metadata["searched"] for name in LAYOUT}
    return {name: searched(own) for name, searched in metadata.items() if searched is not None}


def option_problems(name: str, value: Any, typed: str) -> Iterator[str]:
    """Yield the sentence that refuses a value which is out of range or no choice, if it is.

    Args:
        name: of the option.
        value: the option's.
        typed: the option before its value, as the user has typed it: `zero=` or `--zero `.
    """
    own = _FIELDS[name].metadata
    if own["range"] is not None:
        yield from range_problem(typed, value, own["range"])
    if own["choices"] and value not in own["choices"]:
        shown = str if typed.startswith("-") else repr
        *others, last = map(shown, own["choices"])
        yield f"{typed}{shown(value)} is not a choice; use {', '.join(others)} or {last}."


def range_problem(name: str, value: float | None, allowed: Range) -> Iterator[str]:
    """Yield the sentence that refuses a value outside of its range, if it is.

    Args:
        name: of the option, as the user has typed it, such as `zero=` or `--zero `.
        value: the option's; None, for an option that is unset, is always accepted.
        allowed: the range.
    """
    if value is not None and not allowed.holds(value):
        yield f"{name}{value!r} {allowed.problem}; {allowed.advice}."
