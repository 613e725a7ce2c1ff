"""Callbacks that look at the parameters of a model of which each rank has a part.

What they write into parameters is right, since every rank writes into its own. What they compute of
the values of parameters is right or refused, by `graph.weights.absent` and `sharded`; sizes that
they add up are of one rank's part alone, and nobody would notice.
"""

from __future__ import annotations

import copy
import logging
import sys
import traceback
import types
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import TrainerCallback

from merak.arguments import MerakArguments
from merak.core.errors import TrainingError
from merak.core.rank0 import warn_once
from merak.core.source_lines import is_installed, users_line, with_text
from merak.engine.parameters.gathered import gathered_parameters
from merak.engine.parameters.held import held_parameters
from merak.graph.weights.absent import INSTEAD, read_by
from merak.graph.weights.laid_out import Part, StandIn, engine_of, part_of
from merak.graph.weights.sharded import ShardTensor
from merak.trainer.subclass.methods import codes_of

logger = logging.getLogger(__name__)

_GRADIENTS = frozenset({"grad", "clip_grad_norm_", "clip_grad_value_"})
"""Names in code that reads or writes gradients."""

_WALKS = ("named_parameters", "parameters")
_REPLACED = (*_WALKS, "__deepcopy__")


_OF_TRAINED = ("update_and_allocate",)
"""Methods of modules that compute with all trained parameters and their gradients: AdaLoRA's."""


class _Reported(partial[Any], StandIn):
    """Method of a model whose calls are reported."""


@contextmanager
def reporting_parts(model: object) -> Iterator[None]:
    """Context of callbacks: people are told what they see of a model that ranks have parts of.

    Args:
        model: of the trainer.

    Raises:
        TrainingError: a callback has read a value that this rank does not have.
    """
    part = part_of(model) if isinstance(model, nn.Module) else None
    if part is None or not isinstance(model, nn.Module):
        yield
        return
    vars(model)["__deepcopy__"] = _Reported(_copy, model, part)
    modules = list(model.modules())
    for module in modules:
        walks = {name: _Reported(_walk, model, part, getattr(module, name)) for name in _WALKS}
        vars(module).update(walks)
    try:
        with read_by("a callback"):
            yield
    except AttributeError as error:
        if "'NoneType'" in str(error):
            error.add_note(
                "The gradients of parameters of other pipeline stages are None on this rank; "
                f"leave out those that are (p.grad is None), or: {INSTEAD}."
            )
        raise
    finally:
        for module in modules:
            for name in _REPLACED:
                vars(module).pop(name, None)


@contextmanager
def gathering_methods(model: object) -> Iterator[None]:
    """Context of callbacks: methods that need all trained parameters have them whole, on all ranks.

    Args:
        model: of the trainer.
    """
    engine = engine_of(model) if isinstance(model, nn.Module) else None
    if engine is None or not isinstance(model, nn.Module):
        yield
        return
    found = [(m, name) for m in model.modules() for name in _OF_TRAINED if hasattr(type(m), name)]
    for module, name in found:
        vars(module)[name] = _Reported(_gathered, model, getattr(module, name))
    try:
        yield
    finally:
        for module, name in found:
            del vars(module)[name]


def _gathered(model: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of a model while its trained parameters are whole; a collective of all ranks.

    Raises:
        TrainingError: none of them has a gradient.
    """
    held = held_parameters(model, engine_of(model))
    trained = [n for n, p in nn.Module.named_parameters(model) if p.requires_grad and n in held]
    with gathered_parameters(model, trained, in_place=True) as whole:
        if all(parameter.grad is None for parameter in whole.values()):
            raise TrainingError(
                f"{method.__name__} reads gradients, and there are none now; call it from a "
                "callback's on_optimizer_step, with a synchronous schedule and without "
                "delay_optimizer_update."
            )
        return method(*args, **kwargs)


def check_gradient_readers(
    model: object, args: MerakArguments, callbacks: Iterable[TrainerCallback]
) -> None:
    """Look for callbacks that read or write gradients which a rank does not have as a whole.

    Those of a model that ranks have parts of are warned of.

    Args:
        model: of the trainer.
        args: of the trainer.
        callbacks: of the trainer, transformers' own ones among them.

    Raises:
        TrainingError: one clips by a norm of which each rank has a part; or the optimizer steps
            other tensors than the parameters, which have no gradients behind the backward pass.
    """
    is_in_parts = isinstance(model, nn.Module) and part_of(model) is not None
    others = f"zero={args.zero}" if args.zero and args.world_size > 1 else ""
    others = others or ("master_weights=True" if args.master_weights else "")
    for reader, names in _gradient_readers(callbacks) if is_in_parts or others else ():
        if others:
            raise TrainingError(
                f"{reader} reads or writes gradients, but with {others} the optimizer steps "
                "tensors of its own, and those of the model have none behind the backward pass; "
                f"leave {others} out, or change gradients in hooks of parameters (register_hook)."
            )
        if "clip_grad_norm_" in names:
            raise TrainingError(
                f"{reader} clips gradients by their norm (clip_grad_norm_), and each rank has "
                "those of its part of the model alone; leave it out, and give max_grad_norm among "
                "the training arguments, which is that of all."
            )
        warn_once(
            logger,
            "%s reads gradients, and each rank has those of its part of the model alone, some as "
            "shards of the whole (%s).",
            reader,
            INSTEAD,
        )


def _gradient_readers(
    callbacks: Iterable[TrainerCallback],
) -> Iterator[tuple[str, Collection[str]]]:
    """The first method of each callback of a script's own that names gradients, and which."""
    for callback in callbacks:
        own = ChainMap(vars(callback), *(dict(vars(cls)) for cls in type(callback).__mro__))
        for method in (getattr(value, "__func__", value) for value in own.values()):
            if not isinstance(method, types.FunctionType):
                continue
            names = {name for code in codes_of(method.__code__) for name in code.co_names}
            if names & _GRADIENTS and not is_installed(method.__code__.co_filename):
                yield method.__qualname__, names & _GRADIENTS
                break


def _walk(model: nn.Module, part: Part, walk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    frame = sys._getframe(1)
    if not is_installed(frame.f_code.co_filename):
        warn_once(
            logger,
            "%s walks the model's parameters, and each rank has a part of them: this one has "
            "values and gradients of %s. What it computes of values is right or refused; sizes and "
            "what it leaves out are of this part alone (%s).",
            frame.f_code.co_qualname,
            _held(model, part),
            INSTEAD,
        )
    return walk(*args, **kwargs)


def _copy(model: nn.Module, part: Part, memo: dict[int, Any]) -> nn.Module:
    warn_once(
        logger,
        "%s copies the model, and each rank has a part of its parameters: this one's copy has "
        "values of %s. Averages that are kept in it are right, part by part; what is computed of "
        "it or saved is of this part alone (%s).",
        with_text(users_line(traceback.extract_stack())),
        _held(model, part),
        INSTEAD,
    )
    shards = [p for _, p in nn.Module.named_parameters(model) if isinstance(p, ShardTensor)]
    memo |= {id(shard): shard.copied(is_followed=True) for shard in shards}
    own = vars(model)
    replaced = {name: own.pop(name) for name in _REPLACED if name in own}
    try:
        return copy.deepcopy(model, memo)
    finally:
        own.update(replaced)


def _held(model: nn.Module, part: Part) -> str:
    """How many parameters this rank has."""
    parameters = [p for _, p in nn.Module.named_parameters(model)]
    held = sum(not p.is_meta for p in parameters)
    sharded = f", {len(part.shards)} of these as shards" if part.shards else ""
    return f"{held} of {len(parameters)}{sharded}"
