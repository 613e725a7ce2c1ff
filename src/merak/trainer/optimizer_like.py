"""Optimizers of a trainer: for this rank's parameters, and others like its own.

Those tell the size of its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import nn
from transformers import Trainer

from merak.core.errors import keyword_names, takes_any_name
from merak.trainer.unsupported import in_one_sentence

_PARAMETERS = ("params", "model", "optimizer_dict")
"""Arguments of an optimizer by which a trainer gives the parameters, as transformers takes them."""


def similar_optimizer(
    trainer: Trainer, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the trainer's class and arguments, for other parameters.

    Args:
        trainer: any; it is left as it is.
        parameters: what the optimizer is to step.
    """
    if trainer.optimizer is not None and not getattr(trainer, "is_as_in_first_step", False):
        given = trainer.optimizer
        inner = given.optimizer if isinstance(given, AcceleratedOptimizer) else given
        similar, defaults = type(inner), inner.defaults
        if not takes_any_name(similar.__init__):  # AdamW's defaults are Adam's
            defaults = {n: defaults[n] for n in keyword_names(similar.__init__) if n in defaults}
        own: torch.optim.Optimizer = similar(parameters, **defaults)
        return own
    model: Any = trainer.model  # of any module, whatever transformers declares
    chosen = trainer.optimizer_cls_and_kwargs
    cls, kwargs = chosen or trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    plain = {name: value for name, value in kwargs.items() if name not in _PARAMETERS}
    made: torch.optim.Optimizer = cls(parameters, **plain)
    return made


def refuse_missing_optimizer(trainer: Trainer) -> None:
    """Refuse an optimizer of transformers that cannot be had here, before the model is traced.

    Args:
        trainer: new.

    Raises:
        ArgumentsError: its package is missing, or its arguments are none.
    """
    model: Any = trainer.model  # of any module, whatever transformers declares
    made = type(trainer).get_optimizer_cls_and_kwargs
    is_given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
    if is_given or made is not Trainer.get_optimizer_cls_and_kwargs or model is None:
        return
    with in_one_sentence(f"optim={optim_of(trainer)!r} cannot be made"):
        made(trainer.args, model)


def optim_of(trainer: Trainer) -> str:
    """Name of a trainer's optimizer, as its arguments have it."""
    return str(getattr(trainer.args.optim, "value", trainer.args.optim))


class LocalParameters(nn.Module):
    """A view of a model with this rank's parameters alone, under their own names.

    Args:
        parameters: by name, as the engine has them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._local = dict(parameters)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters; arguments as of torch's, without effect on a flat view."""
        for name, parameter in self._local.items():
            yield prefix + name, parameter
