"""Refusals: requests that a trainer on many ranks cannot honour, refused before it begins."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
import transformers
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.hyperparameter_search import default_hp_search_backend

from merak.arguments import MerakArguments, MerakSeq2SeqArguments
from merak.core.errors import (
    ArgumentsError,
    MerakError,
    caused_by,
    keyword_names,
    takes_any_name,
)
from merak.plan.optimizer import home
from merak.schedule import registry

_THEIRS = tuple(
    os.path.dirname(str(module.__file__)) + os.sep
    for module in (transformers, accelerate, torch.optim)
)
"""Where those live that look at arguments for Merak."""


@contextmanager
def in_one_sentence(what: str) -> Iterator[None]:
    """Context that turns errors of transformers, not of users' code, into an `ArgumentsError`.

    Args:
        what: is refused, for people to read.

    Raises:
        ArgumentsError: transformers, accelerate or torch's optimizers have refused it.
    """
    try:
        yield
    except MerakError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError) as cause:
        frames = traceback.extract_tb(cause.__traceback__)
        if not frames[-1].filename.startswith(_THEIRS):
            raise
        message = " ".join(str(cause).split()).rstrip(".")
        raise caused_by(cause, f"{what}: {message}.") from cause


def refuse_what_needs_all_gradients(args: MerakArguments, pp: int) -> None:
    """Refuse arguments that need all gradients of a step under an asynchronous schedule.

    Args:
        args: of the job, with the microbatches of a step.
        pp: pipeline degree.

    Raises:
        ScheduleError: the schedule is not defined for these counts.
        ArgumentsError: an argument that looks at all gradients of a step.
    """
    count, chosen = args.gradient_accumulation_steps, args.schedule_options
    options = chosen if isinstance(chosen, Mapping) else {}
    if registry.traits(args.schedule, pp, count, options).is_synchronous:
        return
    if args.max_grad_norm:
        raise ArgumentsError(
            f"schedule={args.schedule!r} updates stages at different times, so there is no norm of "
            f"all gradients to clip, but max_grad_norm={args.max_grad_norm}; set max_grad_norm=0."
        )
    if args.fp16:
        raise ArgumentsError(
            f"schedule={args.schedule!r} updates stages before a step's last gradient is known, so "
            "no rank can tell whether fp16=True has overflowed; use bf16=True."
        )
    if args.nan_policy == "skip":
        raise ArgumentsError(
            f"schedule={args.schedule!r} updates stages before a step's last loss is known, so "
            "nan_policy='skip' cannot leave the step out; use nan_policy='stop' or 'rollback'."
        )
    if args.locate_nan:
        raise ArgumentsError(
            f"schedule={args.schedule!r} updates weights inside a step, so locate_nan=True cannot "
            "run it once more on the same weights; use a synchronous schedule such as '1f1b'."
        )


def steps_beside_backward(args: MerakArguments, *, delays: bool = False) -> bool:
    """Whether an optimizer in host memory may step before all gradients of a step are known.

    Args:
        args: of the job.
        delays: whether it steps those of the step before.
    """
    return home.steps_beside_backward(
        clips=bool(args.max_grad_norm) and not delays,
        scales=args.fp16,
        skips=args.nan_policy == "skip",
        locates=args.locate_nan,
    )


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model behind `torch.compile`, whose forward does not say which columns it takes.

    Raises:
        ArgumentsError: it is one.
    """
    own = getattr(model, "_orig_mod", None)
    if own is not None:
        raise ArgumentsError(
            f"the model is torch.compile({type(own).__name__}), whose forward takes any arguments, "
            "so that the trainer cannot tell which columns of the dataset it reads; give the model "
            "itself, with torch_compile=True, which compiles what each rank runs of it."
        )


def set_use_cache(model: nn.Module, use_cache: bool) -> None:
    """Set `use_cache` of a model's config, as the constructor of transformers' Trainer does.

    Args:
        model: with any config, or none.
        use_cache: the argument of that name.

    Raises:
        ArgumentsError: the config takes no attributes.
    """
    config = getattr(model, "config", None)
    if config is None:
        return
    try:
        config.use_cache = use_cache
    except Exception as cause:  # whatever the user's own class raises
        name = type(model).__name__
        raise ArgumentsError(
            f"{name}.config is a {type(config).__name__}, which takes no attributes, and "
            f"transformers' Trainer sets use_cache there ({type(cause).__name__}: {cause}); give "
            "it another name, such as settings, or make it a types.SimpleNamespace."
        ) from cause


def refuse_no_steps(args: MerakArguments) -> None:
    """Refuse a training without steps, which nobody would notice in its checkpoint.

    Raises:
        ArgumentsError: it has none.
    """
    if args.max_steps == 0:
        raise ArgumentsError(
            "max_steps=0 trains nothing; use 1 or more, or -1 for num_train_epochs passes over "
            "the dataset."
        )
    if args.max_steps < 0 and not args.num_train_epochs > 0:
        raise ArgumentsError(
            f"num_train_epochs={args.num_train_epochs} trains nothing; use a number above 0, or "
            "set max_steps."
        )


def refuse_search(backend: object, world_size: int) -> None:
    """Refuse a search for hyperparameters whose trials several ranks cannot share.

    Args:
        backend: of the search; None for transformers' default.
        world_size: the number of ranks.

    Raises:
        ArgumentsError: they cannot.
    """
    if world_size == 1:
        return
    kind = getattr(backend, "value", backend) or default_hp_search_backend()
    if kind != "optuna":
        raise ArgumentsError(
            f"backend={kind!r} would run its search in each of the {world_size} ranks, with "
            "different trials; use backend='optuna', or run it in a job of one rank."
        )


def refuse_other_arguments(cls: type, args: object) -> None:
    """Refuse arguments that are of another trainer.

    Args:
        cls: of the trainer.
        args: its arguments.

    Raises:
        ArgumentsError: they are.
    """
    generates = issubclass(cls, Seq2SeqTrainer)
    is_seq2seq = isinstance(args, Seq2SeqTrainingArguments)
    takes = getattr(cls, "takes", None)  # of a library's trainer, which would make its own
    is_ours = isinstance(args, MerakArguments) or not (args is not None or generates or takes)
    if not is_ours or (generates and not is_seq2seq):
        kind = "nothing" if args is None else f"a {type(args).__name__}"
        usual = MerakSeq2SeqArguments if generates or is_seq2seq else MerakArguments
        takes = takes or f"merak.{usual.__name__}"
        raise ArgumentsError(
            f"args is {kind}; {cls.__name__} takes {takes}, which has the same fields."
        )


def steps_other_tensors(args: object) -> bool:
    """Whether the optimizer of one process steps other tensors than the model's parameters.

    Args:
        args: of the trainer; None for the defaults.
    """
    return bool(getattr(args, "master_weights", False) or getattr(args, "fp16", False))


def given_by_name(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a trainer that are given: those that are not at their defaults.

    Args:
        cls: the class of the constructor, whose `model` and `args` are left out.
        values: of the constructor's arguments, by name, with further ones and names of its own.
    """
    declared = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    further = values.get("further", {})
    named = {n: v for n, v in values.items() if n in declared and n not in _OF_CONSTRUCTOR}
    given = {n: v for n, v in named.items() if v is not declared[n].default}
    return {**given, **further}


_OF_CONSTRUCTOR = ("self", "model", "args", "further")


def names_after(cls: type, base: type) -> list[str]:
    """Names that a trainer takes beside those of a class's own `__init__`, from its bases.

    Args:
        cls: the class of the trainer.
        base: the class that hands them on.
    """
    names: list[str] = []
    for owner in cls.__mro__[cls.__mro__.index(base) + 1 :]:
        if "__init__" not in vars(owner):
            continue
        names += keyword_names(vars(owner)["__init__"])[1:]
        if not takes_any_name(vars(owner)["__init__"]):
            break
    return names
