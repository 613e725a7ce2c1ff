"""Fields of training arguments: those of transformers, of `ParallelOptions`, and of the trainer."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self, get_type_hints

from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from transformers.debug_utils import DebugOption

from merak.arguments.former import ARGUMENTS, accepted_arguments
from merak.core.errors import keyword_names, refuse_unknown, takes_any_name
from merak.core.units import read_bytes
from merak.engine.step.loss_scale import MAX_SKIPPED_STEPS
from merak.engine.step.replica_check import REPLICA_CHECK_STEPS
from merak.plan.options import PARALLEL_OPTIONS, READS, taken, takes_options

AUTO = "auto"
"""The microbatch that is chosen when the model and its batches are known."""

_USUAL_SAMPLES = 8


class AutoBatch(int):
    """Samples of a microbatch that are still to be chosen; until then transformers' default.

    The number counts for the samples of a step, which the choice leaves as they are.
    """

    is_left_out: bool

    def __new__(cls, is_left_out: bool = False) -> AutoBatch:
        """Make transformers' default number of samples.

        Args:
            is_left_out: whether the user has said nothing; else it is "auto".
        """
        made = super().__new__(cls, _USUAL_SAMPLES)
        made.is_left_out = is_left_out
        return made

    def __repr__(self) -> str:
        """Show what the user has said, so that it can be compared."""
        return super().__repr__() if self.is_left_out else repr(AUTO)

    def __getnewargs__(self) -> tuple[bool]:
        """Arguments for a copy, which says the same."""
        return (self.is_left_out,)


LEFT_OUT = AutoBatch(is_left_out=True)
"""The default of `per_device_train_batch_size`."""

if TYPE_CHECKING:
    BatchSize = int | Literal["auto"]
else:

    class BatchSize(int):
        """A number of samples or "auto", as `HfArgumentParser` reads it from a command line."""

        def __new__(cls, text: Any) -> int:
            """Read a number; "auto" becomes an `AutoBatch`."""
            return AutoBatch() if text == AUTO else int(text)


if TYPE_CHECKING:
    NumBytes = int
    BytesPerSecond = float
else:

    class NumBytes(int):
        """A size or a rate, as `HfArgumentParser` reads it from a command line."""

        def __new__(cls, text: Any) -> int:
            """Read a number of bytes, such as "80GB"."""
            return int(read_bytes(text))

    BytesPerSecond = NumBytes


_FIELDS = "__dataclass_fields__"
_GIVEN = "_given"
"""Attribute of arguments: the names of those that are given."""


def given_arguments(arguments: TrainingFields) -> frozenset[str]:
    """Names of the arguments that a user gives, at their default or not.

    Args:
        arguments: made by keywords, a recipe, or `transformers.HfArgumentParser` of the command
            line.
    """
    given: frozenset[str] = vars(arguments).get(_GIVEN, frozenset())
    return given


_OF_CHECKPOINT = frozenset(keyword_names(checkpoint)) | {"preserve_rng_state"}
"""Keywords of torch's checkpoint, which change nothing in what it computes."""

_NO_REQUESTS = (("every_n_layers", 1), ("offload", False))
"""Keywords of transformers at values that ask for nothing else."""


def take_checkpointing(arguments: TrainingFields) -> None:
    """Turn transformers' request to checkpoint modules into one to recompute segments.

    Keywords of torch's checkpoint say nothing to that; what else is asked for stays, to be refused.

    Args:
        arguments: of a job; `recompute` stays as it is where it is given.
    """
    names = ("gradient_checkpointing", "activation_checkpointing")
    for name in (f"{name}_kwargs" for name in names):
        if isinstance(given := _parsed(getattr(arguments, name, None)), dict):
            requests = {key: value for key, value in given.items() if key not in _OF_CHECKPOINT}
            rest = {key: v for key, v in requests.items() if (key, v) not in _NO_REQUESTS}
            setattr(arguments, name, rest or None)
    # Of the two names, the newer one holds where it is given; TRL's default is of the older.
    newest_first = (getattr(arguments, name, None) for name in reversed(names))
    if next((value for value in newest_first if value is not None), False) is not True:
        return
    given = given_arguments(arguments)
    if "recompute" not in given:
        arguments.recompute = "full"
        vars(arguments)[_GIVEN] = given | {"recompute"}
    for name in names:
        if hasattr(arguments, name):  # transformers would change the model's modules
            setattr(arguments, name, False)


def read_texts(arguments: TrainingFields) -> None:
    """Read the arguments that people write as text, such as memory_budget="80GB".

    Args:
        arguments: of a job; changed in place.
    """
    for name, read in READS.items():
        setattr(arguments, name, read(getattr(arguments, name)))


def _parsed(value: object) -> object:
    """A value of a command line, which may be JSON; any other as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value  # which transformers refuses


def take_debug(arguments: TrainingFields) -> None:
    """Turn transformers' request to look for overflows into one to locate them.

    Args:
        arguments: of a job; `locate_nan` stays as it is where it is given.
    """
    looks = DebugOption.UNDERFLOW_OVERFLOW in arguments.debug
    if looks and "locate_nan" not in given_arguments(arguments):
        arguments.locate_nan = True


def _on_command_line() -> set[str]:
    options = (word[2:].partition("=")[0] for word in sys.argv[1:] if word.startswith("--"))
    return {option.replace("-", "_") for option in options}


def own(default: Any, help: str, **metadata: Any) -> Any:
    """Field with a default, a sentence for people, and what else a parser reads."""
    return field(default=default, metadata={"help": help, **metadata})


def _degree(kind: str) -> Any:
    return own(
        None,
        f"{kind} parallel degree, which `merak.init()` reads from the command line where the "
        "script gives it no degrees. Else it must be that of merak.init.",
    )


def _declared_elsewhere(cls: type) -> Iterator[tuple[str, Any, Field[Any]]]:
    """Fields that a base declares, and that `dataclass` would take from another: name, type, it."""
    bases = cls.__mro__[1:]
    known = [vars(base).get(_FIELDS, {}) for base in bases]
    for name in dict.fromkeys(chain.from_iterable(known)):
        taken_from = next(fields[name] for fields in known if name in fields)
        declaring = (base for base in bases if name in inspect.get_annotations(base))
        base = next((base for base in declaring if _FIELDS in vars(base)), None)
        if base is not None and (own := vars(base)[_FIELDS][name]) is not taken_from:
            yield name, get_type_hints(base)[name], own


@dataclass(repr=False)  # transformers' own repr hides tokens
@takes_options(*PARALLEL_OPTIONS)
class TrainingFields(TrainingArguments):
    """Fields of a training job, without what `MerakArguments` does with them.

    `merak.plan.options` has the defaults and the help of those that are taken from there. They
    stand here for editors, with types that `transformers.HfArgumentParser` can parse.
    """

    def __init_subclass__(cls, **of_bases: Any) -> None:
        """Give a class the fields of all of its bases, with the defaults that it inherits.

        `dataclass` takes a field from the first base that has it, though that base has it of
        transformers and another one declares it; a class without the decorator has those of one
        base alone.
        """
        super().__init_subclass__(**of_bases)
        own = inspect.get_annotations(cls)
        others = [found for found in _declared_elsewhere(cls) if found[0] not in own]
        cls.__annotations__ = {name: kind for name, kind, _ in others} | own
        for name, _, inherited in others:
            setattr(cls, name, copy.copy(inherited))
        if not own:  # else a decorator may come
            dataclass(repr=False)(cls)

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Make arguments that know which of them are given, for `given_arguments`.

        Raises:
            ArgumentsError: a name that the class does not have; its `__init__` is not called.
        """
        if _FIELDS not in vars(cls):  # nobody has decorated it: its own annotations are no fields
            own = inspect.get_annotations(cls)
            inherited = [name for name in own if isinstance(vars(cls).get(name), Field)]
            cls.__annotations__ = {name: own[name] for name in inherited}
            dataclass(repr=False)(cls)
            cls.__annotations__ = own
        if not takes_any_name(cls.__init__):
            known = keyword_names(cls.__init__)
            suggested = accepted_arguments(known)
            refuse_unknown(cls.__name__, named, known, suggested=suggested, former=ARGUMENTS)
        made = super().__new__(cls)
        names = [own.name for own in fields(cls) if own.init]
        given = {*names[: len(values)], *named}
        # transformers.HfArgumentParser gives all, with the defaults of what a command line lacks.
        vars(made)[_GIVEN] = frozenset(_on_command_line() if given.issuperset(names) else given)
        return made

    # Fields that the command line may give as a JSON string; transformers parses them.
    _VALID_DICT_FIELDS = [  # noqa: RUF012
        *TrainingArguments._VALID_DICT_FIELDS,
        "feature_dict",
        "schedule_options",
    ]

    dp: int | None = _degree("Data")
    tp: int | None = _degree("Tensor")
    pp: int | None = _degree("Pipeline")
    cp: int | None = _degree("Context")
    ep: int | None = _degree("Expert")
    plan: str | None = field(
        default=None,
        metadata={
            "help": "File that `merak plan --output` has written: microbatch, accumulation steps, "
            "schedule, partition, recomputation, ZeRO and the rest of the layout are set from it, "
            "and what is set besides may not contradict it. merak.init(plan=…) takes its degrees "
            "from the same file. Not for another model or another number of ranks. Or 'auto': the "
            "trainer searches the fastest plan for the devices that are there; what is given "
            "stays as it is."
        },
    )
    replan: bool = own(
        False,
        "With plan='auto', whether the job goes on in another layout behind its next checkpoint "
        "where its first steps show that this would be more than 5 % faster. Without, it says so.",
    )
    cluster: str | None = own(
        None,
        "With 'auto' for plan or per_device_train_batch_size, the devices, as of `merak plan "
        "--cluster`: such as h100:8x4, a cluster file, or a file of `merak profile`. If unset, a "
        "profile of these devices in the cache, else their data sheets, else a short measurement.",
    )
    global_batch: int | None = own(
        None,
        "Samples of one step of the whole job. gradient_accumulation_steps follows: global_batch ÷ "
        "(per_device_train_batch_size × dp). If unset, a step has per_device_train_batch_size × "
        "gradient_accumulation_steps × dp samples.",
    )
    per_device_train_batch_size: BatchSize = field(  # type: ignore[assignment]
        default=LEFT_OUT,
        metadata={
            "help": "Samples of one microbatch of one replica. 'auto' for the fastest of 1, 2, 4, "
            "8, … that fits the memory, with as many samples a step as if it were left out."
        },
    )
    schedule: str = taken("schedule")
    schedule_options: dict[str, Any] | str | None = taken("schedule_options")
    partition: list[int] | None = taken("partition")
    segment_times: str | None = taken("segment_times")
    feature_dict: dict[str, Any] | str | None = taken("feature_dict")
    trace_cache: str | None = own(
        None,
        "Folder of cached traces of models. If unset, $MERAK_CACHE or ~/.cache/merak; "
        "if empty, or with MERAK_CACHE=off, nothing is cached.",
    )
    async_save: bool = own(
        True,
        "Whether training goes on while a checkpoint is written: the ranks copy what "
        "they save into host memory, which takes that memory, and write it in the background.",
    )
    checkpoint_url: str | None = own(
        None,
        "URL of the folder in which checkpoints are kept on storage that fsspec knows, such as "
        "s3://bucket/run or gs://bucket/run, in the place of output_dir. Each rank uploads what it "
        "has written, and the manifest comes last; hosts need not share a file system.",
    )
    save_last_weights: bool = own(
        True,
        "Whether train() leaves the last weights in the folder last-weights of output_dir, where "
        "each rank has a part of them and no checkpoint of the last step is there. state_dict() "
        "and save_pretrained() of the model read them from there, on any rank alone; without, "
        "they are refused.",
    )
    allow_pickled_checkpoint: bool = own(
        False,
        "Whether to resume from checkpoints of earlier versions of Merak, whose index "
        "is a pickle: reading it can run code that somebody put there.",
    )
    nan_policy: str = own(
        "stop",
        "What becomes of a step whose loss or gradient is NaN or infinite: 'stop' "
        "ends the job with a sentence, 'skip' leaves the parameters as they are on all ranks, "
        "'rollback' loads the last checkpoint of this run and goes on with the data after the "
        "step.",
        choices=["stop", "skip", "rollback"],
    )
    max_skipped_steps: int = own(
        MAX_SKIPPED_STEPS,
        "With nan_policy='skip', the number of consecutive steps that may be skipped; "
        "one more ends the job, since the model has diverged. An overflow of fp16 is not "
        "counted while its loss scale is above 1.",
    )
    max_rollbacks: int = own(
        3,
        "With nan_policy='rollback', the number of rollbacks of a run; the next step "
        "that is not finite ends the job.",
    )
    locate_nan: bool = own(
        False,
        "Run a step whose loss or gradient is NaN or infinite once more, and name the "
        "microbatch, segment, operator and source line where that first appeared. It costs "
        "nothing in other steps.",
    )
    check_replicas_steps: int = own(
        REPLICA_CHECK_STEPS,
        "Steps after which all copies of each parameter are compared by a digest: "
        "those of replicas, of tied parameters, and those that tensor parallel ranks do not "
        "split. The job ends if they differ. 0 for never.",
    )
    sigterm_limit_s: float = own(
        25.0,
        "Seconds from SIGTERM (preemption) in which all ranks finish a step, save a "
        "checkpoint and exit with code 143; then the job ends without it. Below the 30 s that "
        "torchrun waits. 0 ends the job at once.",
    )
    run_record: bool = own(
        True,
        "Whether rank 0 writes a small record of the run into the folder _merak of output_dir: the "
        "layout and its forecast, every training log, and the measured actions of a few steps. "
        "`merak report` shows it.",
    )
    profile_steps: str | None = own(
        None,
        "Steps whose traces every rank writes, such as '3-5', or '3': torch's profiler into "
        "profile/rank0.json.gz of output_dir, with the schedule's actions as named ranges, and on "
        "GPUs a snapshot of the allocator into memory/rank0.pickle. Steps are slower meanwhile.",
    )
    bucket_bytes: NumBytes | None = taken("bucket_bytes", default=None)
    master_weights: bool = taken("master_weights")
    gradient_sums: str = taken("gradient_sums")
    zero: int = taken("zero")
    zero_group_size: int = taken("zero_group_size")
    local_steps: int = taken("local_steps")
    outer_optimizer: str = taken("outer_optimizer")
    outer_learning_rate: float = taken("outer_learning_rate")
    outer_momentum: float = taken("outer_momentum")
    tied_gradients: str = taken("tied_gradients")
    gradient_compression: str = taken("gradient_compression")
    powersgd_rank: int = taken("powersgd_rank")
    topk_fraction: float = taken("topk_fraction")
    hierarchical_reductions: str = taken("hierarchical_reductions")
    layer_keep: float = taken("layer_keep")
    layer_keep_decay: float = taken("layer_keep_decay")
    hang_limit_s: float = taken("hang_limit_s")
    max_shapes: int = taken("max_shapes")
    sub_pipelining: str = taken("sub_pipelining")
    sequence_parallel: bool = taken("sequence_parallel")
    recompute: str | None = taken("recompute")
    offload_activations: str | None = taken("offload_activations")
    offload_optimizer: str | None = taken("offload_optimizer")
    delay_optimizer_update: bool = taken("delay_optimizer_update")
    ema_decay: float | None = taken("ema_decay")
    ema_evaluation: bool = own(
        False,
        "Whether evaluate and predict, also during training, run the averages of ema_decay in the "
        "parameters' place. `merak export --average` exports them of a checkpoint.",
    )
    host_bytes_per_s: BytesPerSecond | None = taken("host_bytes_per_s")
    memory_budget: NumBytes | None = taken("memory_budget")


OWN_FIELDS = frozenset(f.name for f in fields(TrainingFields)) - frozenset(
    f.name for f in fields(TrainingArguments)
)
"""The fields that `MerakArguments` adds."""
