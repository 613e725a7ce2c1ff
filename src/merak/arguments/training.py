"""`MerakArguments`: the arguments of `transformers.Trainer`, and a few of Merak's own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partialmethod
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from merak.arguments.checks import own_problems
from merak.arguments.features import write_features
from merak.arguments.fields import (
    OWN_FIELDS,
    TrainingFields,
    given_arguments,
    read_texts,
    take_checkpointing,
    take_debug,
)
from merak.arguments.kinds import kind_problems
from merak.arguments.planned import apply_plan, set_accumulation
from merak.arguments.ranges import range_problems
from merak.arguments.rules import problems, raise_sentences, shared_values
from merak.arguments.single_process import configured_state, fresh_state
from merak.arguments.table import RULES, SEQ2SEQ
from merak.core.errors import ArgumentsError, MerakError, caused_by
from merak.core.files.json_file import UnreadableFile, read_json
from merak.core.health.status import phase, waiting, waiting_for_all
from merak.core.mesh import Mesh, current_mesh
from merak.core.precision import check_autocast
from merak.engine.rank_arguments import refuse_differences
from merak.graph.ir.torch_compiler import INDUCTOR, Compilation
from merak.graph.tensor_parallel.features import parse_features
from merak.plan.options import BUCKET_BYTES

CACHE_VARIABLE = "MERAK_CACHE"
"""The environment variable that names the folder of traced models."""


def default_trace_cache() -> str:
    """Return the folder of cached traces: $MERAK_CACHE, or ~/.cache/merak (XDG_CACHE_HOME).

    It is empty where MERAK_CACHE is empty or `off`: nothing is cached.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return "" if named.lower() == "off" else named
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.join(os.path.expanduser(home), "merak")


@dataclass(repr=False)  # transformers' own repr hides tokens
class MerakArguments(TrainingFields):
    """The arguments of `transformers.Trainer` for a job of dp × tp × pp ranks.

    Every field of `transformers.TrainingArguments` keeps its meaning or is refused with a
    sentence; docs/arguments.md says which. Call `merak.init` before building it.

    Merak's own fields are those of `merak.plan.options.ParallelOptions`, and those of
    `merak.arguments.fields.TrainingFields`, such as `trace_cache` and `nan_policy`.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument cannot be honoured.
    """

    looks_at_device: ClassVar[bool] = True
    _layout: ClassVar[Mapping[str, int | str]] = {}

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured, then fill in defaults as transformers does."""
        mesh = current_mesh()
        read_texts(self)
        take_checkpointing(self)
        apply_plan(self, mesh)
        found = [
            *problems(self, RULES | SEQ2SEQ, OWN_FIELDS, _least(mesh)),
            *kind_problems(self, TrainingFields),
        ]
        named = {sentence.partition("=")[0] for sentence in found}
        raise_sentences([*found, *range_problems(self, named)])
        if self.looks_at_device:
            check_autocast(self.autocast, mesh.device)  # before transformers looks at device 0
        if mesh.device.type == "cpu" and self.bf16:
            self.use_cpu = True  # transformers would look for a GPU that has it
        if self.report_to is None:
            self.report_to = "none"  # which transformers would take for a logger
        self._post_init_of_transformers()
        take_debug(self)
        set_accumulation(self, mesh)
        check_arguments(self)
        self._fill_defaults()

    def _post_init_of_transformers(self) -> None:
        """Fill in defaults; transformers refuses by all kinds of exceptions."""
        try:
            super().__post_init__()  # type: ignore[no-untyped-call]
        except MerakError:
            raise
        except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as cause:
            message = " ".join(str(cause).split()).rstrip(".")
            raise caused_by(cause, f"these arguments do not go together: {message}.") from cause

    def _fill_defaults(self) -> None:
        if current_mesh().device.type == "cpu":
            self.dataloader_pin_memory = False  # as transformers does with use_cpu
        if "log_level_replica" not in given_arguments(self):
            self.log_level_replica = "error"  # rank 0 warns of what they would, too
        if self.trace_cache is None:
            self.trace_cache = default_trace_cache()
        self.trace_cache = os.path.expanduser(self.trace_cache)
        if isinstance(self.feature_dict, str):
            self.feature_dict = _read_json("feature_dict", self.feature_dict, dict)
        if isinstance(self.schedule_options, str):
            self.schedule_options = _read_json("schedule_options", self.schedule_options, dict)
        if isinstance(self.feature_dict, Mapping):
            parse_features(self.feature_dict)  # raises where one is wrong
        if self.bucket_bytes is None:
            cap_mb = self.ddp_bucket_cap_mb
            self.bucket_bytes = BUCKET_BYTES if cap_mb is None else cap_mb * 2**20

    def to_dict(self) -> dict[str, Any]:
        """Convert the arguments to plain values; a feature dict as a JSON file has it."""
        plain: dict[str, Any] = super().to_dict()  # type: ignore[no-untyped-call]
        if isinstance(self.feature_dict, Mapping):
            plain["feature_dict"] = write_features(self.feature_dict)
        return {**plain, **self._layout}

    @contextmanager
    def with_layout(self, layout: Mapping[str, int | str]) -> Iterator[None]:
        """Context in which `to_dict` has the job's layout, which loggers write to a run's config.

        Args:
            layout: its values by key.
        """
        vars(self)["_layout"] = layout
        try:
            yield
        finally:
            del vars(self)["_layout"]

    @cached_property
    def _setup_devices(self) -> torch.device:
        """Return this rank's device, with Accelerate in single-process mode."""
        mesh = current_mesh()
        config: Any = self.accelerator_config
        is_configured = getattr(config, "use_configured_state", False)
        self.distributed_state = configured_state() if is_configured else fresh_state()
        self._n_gpu = 1 if mesh.device.type == "cuda" else 0
        return mesh.device

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of the autocast of the model's forward; None for its own precision."""
        if self.bf16:
            return torch.bfloat16
        return torch.float16 if self.fp16 else None

    @property
    def compilation(self) -> Compilation | None:
        """How `torch.compile` compiles the operators of segments; None where it does not."""
        if not self.torch_compile:
            return None
        return Compilation(self.torch_compile_backend or INDUCTOR, self.torch_compile_mode)

    @property
    def world_size(self) -> int:
        """Number of replicas, which batch sizes are multiplied by: the degree of dp."""
        return current_mesh().dp

    @property
    def process_index(self) -> int:
        """Global rank; 0 logs and saves."""
        return current_mesh().rank

    @property
    def local_process_index(self) -> int:
        """Local rank on this node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def should_log(self) -> bool:
        """Whether this is rank 0, which logs."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this is rank 0, which saves."""
        return self.process_index == 0

    @property
    def place_model_on_device(self) -> bool:
        """Always False: the engine creates this rank's segments, and only those, on the device."""
        return False

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Run the work inside on rank 0 (of each node, where `local`) before the others.

        Args:
            local: the first rank of each node rather than that of the job.
            desc: what is done, as in transformers.
        """
        if current_mesh().world_size == 1:
            yield
            return
        first = (self.local_process_index if local else self.process_index) == 0
        if not first:
            with waiting(f"{desc} of the first rank of its host, or", (0,)):
                dist.barrier()
        try:
            with phase(f"at {desc}, alone,") if first else nullcontext():
                yield
        finally:
            if first:
                with waiting_for_all(f"{desc} to be seen by"):
                    dist.barrier()


@dataclass(repr=False)
class MerakSeq2SeqArguments(MerakArguments, Seq2SeqTrainingArguments):
    """The arguments of `transformers.Seq2SeqTrainer`, for `merak.MerakSeq2SeqTrainer`.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument cannot be honoured.
    """


@cache
def arguments_for(config: type[Any]) -> type[MerakArguments]:
    """Make one class of arguments that has the fields of another one and Merak's.

    Defaults are those of the class that is given.

        Arguments = merak.arguments_for(trl.SFTConfig)

    Args:
        config: any subclass of `transformers.TrainingArguments`; the same gives the same class.

    Returns:
        A dataclass of that name, a subclass of both, which `HfArgumentParser` takes too.

    Raises:
        ArgumentsError: it is no such subclass.
    """
    if not (isinstance(config, type) and issubclass(config, TrainingArguments)):
        raise ArgumentsError(
            f"merak.arguments_for takes a subclass of transformers.TrainingArguments, not {config}."
        )
    if issubclass(config, MerakArguments):
        return config
    doc = f"`{config.__module__}.{config.__qualname__}` with the fields of `merak.MerakArguments`."
    names = {"__doc__": doc, "__module__": __name__, "__reduce__": partialmethod(_reduced, config)}
    made: type[MerakArguments] = type(config.__name__, (MerakArguments, config), names)
    return made


def _reduced(arguments: MerakArguments, config: type[TrainingArguments]) -> tuple[Any, ...]:
    """Pickle arguments of a class that no module has, by the one that it was made for."""
    return _emptied, (config,), vars(arguments)


def _emptied(config: Any) -> MerakArguments:
    cls = arguments_for(config)
    return cls.__new__(cls)


def check_arguments(arguments: TrainingFields) -> None:
    """Refuse arguments that this job cannot honour; call it again where they may have changed.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: arguments cannot be honoured; a line for each.
    """
    mesh = _least(current_mesh())
    raise_sentences(problems(arguments, RULES | SEQ2SEQ, OWN_FIELDS, mesh))
    raise_sentences(kind_problems(arguments, TrainingFields))
    raise_sentences(own_problems(arguments, mesh))


def refuse_different_arguments(arguments: TrainingFields, **further: object) -> None:
    """Refuse arguments that differ by rank, but for those of one rank; a collective of all ranks.

    Args:
        arguments: of a job.
        **further: what else all ranks must have alike.

    Raises:
        ArgumentsError: they differ; on all ranks, with the values of all of them.
    """
    refuse_differences({**shared_values(arguments, RULES | SEQ2SEQ, OWN_FIELDS), **further})


def argument_problem(arguments: TrainingFields, mesh: Mesh) -> str | None:
    """The reason why arguments cannot be honoured in a layout; None where they can.

    Args:
        arguments: of a job.
        mesh: a layout that it might have.
    """
    own = problems(arguments, RULES | SEQ2SEQ, OWN_FIELDS, mesh)
    return next(chain(own, own_problems(arguments, mesh)), None)


def _least(mesh: Mesh) -> Mesh:
    """The degrees that arguments are checked for: the smallest, until a plan is chosen."""
    return mesh if mesh.given is None else replace(mesh, dp=1)


def _read_json(name: str, path: str, kind: type) -> Any:
    try:
        loaded = read_json(path)
    except UnreadableFile as cause:
        raise ArgumentsError(f"{name}={path!r} {cause}; name a file of JSON.") from cause
    if not isinstance(loaded, kind):
        raise ArgumentsError(
            f"{name}={path!r} holds a {type(loaded).__name__}; it should hold a {kind.__name__}."
        )
    return loaded
