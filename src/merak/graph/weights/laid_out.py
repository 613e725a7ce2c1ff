"""Models that are laid out over the ranks: what a rank cannot do with its own part is refused.

A rank has some parameters on the meta device (pipeline parallelism), or shards of them (tensor
parallelism, ZeRO-3). Methods that need all of them would save or compute nonsense.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from merak.core.errors import WeightsError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard

_GATHER = (
    "call gather_state_dict() of MerakTrainer, or of what merak.parallelize returns, on all ranks"
)
_SAVE = "save it with trainer.save_model(folder) on all ranks"
_INSTEAD = {
    "state_dict": f"{_GATHER}: rank 0 gets all weights",
    "save_pretrained": f"{_SAVE}; rank 0 and others write one folder together",
    "push_to_hub": f"{_SAVE}, and push the folder from one rank",
    "load_state_dict": "load it before the trainer (or merak.parallelize) gets the model",
    "generate": f"{_SAVE}, and load the folder with from_pretrained where it is to generate",
    "forward": f"evaluate with trainer.evaluate or trainer.predict, or {_SAVE} and load the folder "
    "with from_pretrained",
}
"""Methods that need the whole model, and the way to do what they do."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that this rank has.

    Args:
        held: names of the parameters that it holds, and of the buffers that it answers for.
        shards: over tp, of those of which it has only some.
        mesh: the grid of ranks.
        is_sharded: whether replicas have shards of parameters (ZeRO-3).
        engine: gives the engine that trains it; None once there is none any more.
    """

    held: frozenset[str]
    shards: Mapping[str, ParameterShard]
    mesh: Mesh
    is_sharded: bool
    engine: Callable[[], Any] = lambda: None

    @property
    def degrees(self) -> str:
        """Degrees that cut the model into parts, for people to read."""
        axes = (("pp", self.mesh.pp), ("tp", self.mesh.tp), ("ep", self.mesh.ep))
        return ", ".join(f"{axis}={degree}" for axis, degree in axes if degree > 1) or "zero=3"


class Refusal:
    """Takes the place of a method that needs the whole model.

    Args:
        method: its name.
        part: of the model on this rank.
        signature: of the method, which others may look at.
    """

    def __init__(self, method: str, part: Part, signature: inspect.Signature) -> None:
        self.method = method
        self.part = part
        self.__signature__ = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call.

        Raises:
            WeightsError: always.
        """
        raise WeightsError(
            f"{self.method} of the model needs all of its weights, and each rank has a part of "
            f"them ({self.part.degrees}); {_INSTEAD[self.method]}."
        )


def is_in_parts(part: Part) -> bool:
    """Whether ranks have different parts of the model; else each has everything."""
    return part.mesh.pp > 1 or bool(part.shards) or part.is_sharded


def mark_laid_out(model: nn.Module, part: Part, *, runs_whole: bool) -> None:
    """Refuse methods of a model that need more than this rank's part of it.

    Args:
        model: the user's, laid out.
        part: what this rank has of it; nothing is refused where that is everything on all ranks.
        runs_whole: whether the engine calls its forward as a whole.
    """
    if not is_in_parts(part):
        return
    for name in _INSTEAD:
        method = getattr(type(model), name, None)
        if callable(method) and not (name == "forward" and runs_whole):
            bound = inspect.signature(getattr(model, name))
            vars(model)[name] = Refusal(name, part, bound)


def part_of(model: nn.Module) -> Part | None:
    """What this rank has of a model that is laid out; None for a whole model."""
    found = vars(model).get("state_dict")
    return found.part if isinstance(found, Refusal) else None


@contextmanager
def methods_allowed(model: nn.Module) -> Iterator[None]:
    """Context in which a laid out model has its own methods, for Merak to trace or to save it."""
    refused = remove_refusals(model)
    try:
        yield
    finally:
        vars(model).update(refused)


def remove_refusals(model: nn.Module) -> dict[str, Refusal]:
    """Give a model its own methods back; returns what was in their place."""
    refused = {n: v for n, v in vars(model).items() if isinstance(v, Refusal)}
    for name in refused:
        del vars(model)[name]
    return refused
