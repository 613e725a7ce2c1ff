"""The model of a request: `--model`, `--config`, `--seq` and the types, as all commands take them.

The options of two commands may differ in what they leave open; what is made of them does not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from merak.core.errors import CommandError, did_you_mean
from merak.core.health.stderr import write_line
from merak.core.precision import PARAMETER_TYPES, read_type

if TYPE_CHECKING:
    import torch

    from merak.cli.options import ModelRequest, TypedRequest
    from merak.cli.recipe.planned_job import JobDraft, PlannedJob
    from merak.plan.cost.optimizer_memory import OptimizerFactory
    from merak.plan.options import ParallelOptions
    from merak.plan.price.workload import Workload
    from merak.zoo.model_source import ModelSource

logger = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Any)


def recipe_job(request: ModelRequest) -> PlannedJob | None:
    """Return the job of the recipe that a request names as its model; None where it is none.

    Args:
        request: with the model, and changes of the recipe.

    Raises:
        CommandError: the recipe is wrong.
    """
    from merak.cli.recipe.recipe import names_recipe

    if not names_recipe(request.model) and not request.settings:
        return None
    from merak.cli.recipe.planned_job import planned_job

    return planned_job(request.model, request.settings)


def filled(request: Request, values: Mapping[str, Any]) -> Request:
    """Return a request with the values of a recipe, where the command line gives none.

    Args:
        request: whose options these are.
        values: by the names of its fields, or of the options in them; others are left out.
    """
    is_other = "schedule" in request.given
    left = {name: value for name, value in values.items() if name not in request.given}
    left = {n: value for n, value in left.items() if not (is_other and n == "schedule_options")}
    changed = {}
    for one in fields(request):
        own = getattr(request, one.name)
        if isinstance(own, dict):  # several options
            changed[one.name] = own | {name: left[name] for name in own.keys() & left.keys()}
        elif one.name in left:
            changed[one.name] = left[one.name]
    return replace(request, **changed)


def named_model(
    request: ModelRequest, job: PlannedJob | None
) -> tuple[str, Mapping[str, Any], bool]:
    """Return a model's name, a recipe's changes of its config, and whether its code may run.

    Args:
        request: with the model.
        job: of the recipe that it names as its model; None where it names none.
    """
    if job is None:
        return request.model, {}, request.trust_remote_code
    own = job.model
    return own.name, own.config, request.trust_remote_code or own.trust_remote_code


def model_source(request: Request, job: PlannedJob | None) -> tuple[Request, ModelSource]:
    """Find the model of a request, and the samples of the recipe that it may name.

    What stands for a recipe's samples is said on standard error; a sequence that the model has no
    use for is warned of. Parameters have the type of the recipe, or of the model's config, where
    the command line names none.

    Args:
        request: with the model and its config.
        job: of the recipe that it names as its model; None where it names none.

    Returns:
        The request with the samples, and the model.

    Raises:
        CommandError: there is no such model, or no such field of its config.
    """
    from merak.zoo.configs.fields import merged
    from merak.zoo.model_source import check_inner_fields, parse_overrides, resolve_model
    from merak.zoo.workload import reads_sequence

    name, config, trusted = named_model(request, job)
    changes = merged(config, parse_overrides(request.config))
    source = resolve_model(name, changes, trust_remote_code=trusted)
    check_inner_fields(source.config, changes)
    if request.sequence is not None and not reads_sequence(source):
        logger.warning(
            "--seq %d changes nothing: the batches of %s have no sequence of a free length.",
            request.sequence,
            source.name,
        )
    if job is not None:
        request = filled(request, job.samples(source))
        write_line(f"merak: {job.sample(source, request.sequence)}.")
    if getattr(request, "dtype", "") is None:
        if source.dtype not in PARAMETER_TYPES:
            raise CommandError(
                f"the config of {source.name} has dtype={source.dtype}, which is not trained; add "
                f"--dtype {PARAMETER_TYPES[0]} or another."
            )
        request = replace(request, dtype=source.dtype)
    return request, source


def precision_of(workload: Workload, request: TypedRequest, job: PlannedJob | None) -> str:
    """Return in words the types that a workload is priced in, and who says so.

    Args:
        workload: of a model.
        request: as the command line gives it.
        job: of the recipe that it names as its model; None where it names none.
    """
    given, config = request.given, "the model's config"
    says = "--dtype" if "dtype" in given else config if job is None else "the recipe"
    own = f"parameters in {str(workload.dtype).removeprefix('torch.')} ({says})"
    if workload.autocast is None:
        return f"{own}, no autocast"
    says = "--autocast" if "autocast" in given else "the recipe"
    return f"{own}, autocast to {str(workload.autocast).removeprefix('torch.')} ({says})"


def model_workload(
    request: TypedRequest,
    source: ModelSource,
    *,
    global_batch: int,
    device: torch.device | None = None,
    optimizer: OptimizerFactory | None = None,
    common: ParallelOptions | None = None,
    draft: JobDraft | None = None,
) -> Workload:
    """Make the workload of a request: its model on example batches, with its trace in the cache.

    Args:
        request: with the sequence and the types.
        source: its model.
        global_batch: samples of a step of the whole job.
        device: type of the devices; the CPU where it is None.
        optimizer: makes the optimizer; None forecasts no state.
        common: the options that all of its layouts have; None for the defaults.
        draft: of the recipe's job, which has further options, and adapters; None without a recipe.

    Raises:
        CommandError: sizes or types that do not fit the model.
        TraceError: the model has no blocks to drop.
    """
    from merak.arguments import default_trace_cache
    from merak.zoo.workload import example_workload

    dtype, autocast = types_of(request.dtype or source.dtype, request.autocast)
    assert dtype is not None
    folder = default_trace_cache()
    workload = example_workload(
        source,
        global_batch=global_batch,
        sequence=request.sequence,
        dtype=dtype,
        autocast=autocast,
        device=device,
        cache_dir=Path(folder) if folder else None,
        optimizer=optimizer,
        common=common,
    )
    if draft is not None:
        draft.give_options(workload)
    return workload


def types_of(
    dtype: str | None, autocast: str | None
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the types of the parameters and of autocast; None for none.

    Args:
        dtype: as `--dtype`.
        autocast: as `--autocast`.

    Raises:
        CommandError: one of them is no such type.
    """
    own = None if dtype is None else parameter_type("--dtype", dtype)
    if autocast in (None, "off", "none"):
        return own, None
    cast = read_type(autocast)
    if cast not in ("bfloat16", "float16"):
        raise CommandError(f"--autocast {autocast} is none; use bf16, fp16 or off.")
    return own, parameter_type("--autocast", str(cast))


def parameter_type(flag: str, written: str) -> torch.dtype:
    """Return a type of parameters by its name, as people write it.

    Args:
        flag: of the option.
        written: such as bf16, bfloat16 or torch.bfloat16.

    Raises:
        CommandError: it is none.
    """
    import torch

    name = read_type(written)
    if name not in PARAMETER_TYPES:
        known = ", ".join(PARAMETER_TYPES)
        raise CommandError(f"{flag} {written} is no type of parameters; use one of {known}.")
    found: torch.dtype = getattr(torch, str(name))
    return found


def optimizer_factory(name: str) -> OptimizerFactory:
    """Return what makes the optimizer of a class of torch.optim.

    Args:
        name: as `--optimizer`.

    Raises:
        CommandError: there is no such class.
    """
    import torch

    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        meant = did_you_mean(name, torch.optim.__all__)
        fix = "; use such as AdamW." if meant == "." else meant
        raise CommandError(f"--optimizer {name} is no class of torch.optim{fix}")
    return lambda parameters: cls(parameters, lr=1e-3)  # type: ignore[call-arg]


def request_optimizer(request: Any, draft: JobDraft | None) -> OptimizerFactory:
    """Return what makes the optimizer of a request: the recipe's, unless the command line has one.

    Args:
        request: with `--optimizer`.
        draft: of the recipe's job; None where there is none.

    Raises:
        CommandError: torch.optim has no such class.
    """
    if draft is None or "optimizer" in request.given:
        return optimizer_factory(request.optimizer)
    return draft.optimizer()
