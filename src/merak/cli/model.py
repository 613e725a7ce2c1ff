"""The model of a request: `--model`, `--config`, `--seq` and the types, as all commands take them.

The options of two commands may differ in what they leave open; what is made of them does not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from merak.launch.errors import CommandError

if TYPE_CHECKING:
    import torch

    from merak.plan.cost.optimizer_memory import OptimizerFactory
    from merak.plan.price.workload import Workload
    from merak.zoo.model_source import ModelSource

logger = logging.getLogger(__name__)


class NamedModel(Protocol):
    """Request that names a model."""

    @property
    def model(self) -> Any:
        """As `--model`."""

    @property
    def config(self) -> str | None:
        """As `--config`."""

    @property
    def sequence(self) -> int | None:
        """As `--seq`."""

    @property
    def trust_remote_code(self) -> bool:
        """As `--trust-remote-code`."""


class TypedModel(NamedModel, Protocol):
    """Request that names a model, and the types that it trains in."""

    @property
    def dtype(self) -> str:
        """As `--dtype`."""

    @property
    def autocast(self) -> str | None:
        """As `--autocast`."""


def recipe_model(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return a model's name and changes of its config, as a recipe has them if the name is one's.

    Args:
        name: as `--model`: a recipe or one that comes with Merak; anything else names a model.

    Raises:
        CommandError: the recipe is wrong.
    """
    from merak.cli.recipe.recipe import model_of_recipe

    recipe = model_of_recipe(name)
    return (name, {}) if recipe is None else (recipe.name, recipe.config)


def model_source(request: NamedModel) -> ModelSource:
    """Find the model of a request; a sequence that it has no use for is warned of.

    Args:
        request: with the model and its config; the model may be that of a recipe.

    Raises:
        CommandError: there is no such model, or no such field of its config.
    """
    from merak.zoo.configs.fields import merged
    from merak.zoo.model_source import check_inner_fields, parse_overrides, resolve_model
    from merak.zoo.workload import reads_sequence

    name, config = recipe_model(request.model)
    changes = merged(config, parse_overrides(request.config))
    source = resolve_model(name, changes, trust_remote_code=request.trust_remote_code)
    check_inner_fields(source.config, changes)
    if request.sequence is not None and not reads_sequence(source):
        logger.warning(
            "--seq %d changes nothing: the batches of %s have no sequence of a free length.",
            request.sequence,
            source.name,
        )
    return source


def model_workload(
    request: TypedModel,
    source: ModelSource,
    *,
    global_batch: int,
    device: torch.device | None = None,
    optimizer: OptimizerFactory | None = None,
    master_weights: bool = False,
) -> Workload:
    """Make the workload of a request: its model on example batches, with its trace in the cache.

    Args:
        request: with the sequence and the types.
        source: its model.
        global_batch: samples of a step of the whole job.
        device: type of the devices; the CPU where it is None.
        optimizer: makes the optimizer; None forecasts no state.
        master_weights: whether parameters of a lower precision have float32 masters.

    Raises:
        CommandError: sizes or types that do not fit the model.
    """
    from merak.arguments import default_trace_cache
    from merak.zoo.workload import example_workload

    dtype, autocast = types_of(request.dtype, request.autocast)
    folder = default_trace_cache()
    return example_workload(
        source,
        global_batch=global_batch,
        sequence=request.sequence,
        dtype=dtype,
        autocast=autocast,
        device=device,
        cache_dir=Path(folder) if folder else None,
        optimizer=optimizer,
        master_weights=master_weights,
    )


def types_of(dtype: str, autocast: str | None) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the types of the parameters and of autocast.

    Args:
        dtype: as `--dtype`.
        autocast: as `--autocast`.

    Raises:
        CommandError: one of them is no such type.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise CommandError(
            f"--dtype {dtype} is no type of parameters; use one of {', '.join(known)}."
        )
    if autocast is None:
        return known[dtype], None
    if autocast not in ("bfloat16", "float16"):
        raise CommandError(f"--autocast {autocast} is none; use bfloat16 or float16.")
    return known[dtype], known[autocast]


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
        raise CommandError(f"--optimizer {name} is no class of torch.optim; use such as AdamW.")
    return lambda parameters: cls(parameters, lr=1e-3)  # type: ignore[call-arg]
