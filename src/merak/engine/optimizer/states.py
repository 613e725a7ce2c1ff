"""States of an optimizer in a script's hands: found by the model's parameters, as in one process.

An optimizer has states of what it steps: shards, rows, masters, or whole parameters for other
ranks. Between steps a script gets them by the parameters of the model, and what it computes of them
is followed as it is for the parameters themselves. States that another rank has are absent tensors.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from merak.core.errors import TrainingError
from merak.graph.weights.absent import AbsentTensor
from merak.graph.weights.sharded import ShardLayout, ShardTensor, marked

Stepped = Callable[[torch.Tensor], "torch.Tensor | None"]
"""What steps a parameter of the model here: itself, another tensor, or None for another rank."""


class OptimizerStates(defaultdict[Any, Any]):
    """The states of one optimizer, by what it steps and by the parameters of the model.

    Args:
        states: by what it steps.
        stepped: what steps a parameter here.
    """

    def __init__(self, states: dict[Any, Any], stepped: Stepped) -> None:
        super().__init__(dict, states)
        self._stepped = stepped

    def __getitem__(self, key: Any) -> Any:
        found = self._key(key)
        return super().__getitem__(found) if found is not None else self._absent(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if (found := self._key(key)) is not None:
            super().__setitem__(found, value)

    def __delitem__(self, key: Any) -> None:
        if (found := self._key(key)) is not None:
            super().__delitem__(found)

    def __contains__(self, key: Any) -> bool:
        found = self._key(key)
        return super().__contains__(found) if found is not None else bool(self._absent(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """The states of a parameter, or the default where there are none."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the states of a parameter on this rank; other ranks remove theirs."""
        found = self._key(key)
        return super().pop(found, *default) if found is not None else self._absent(key)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return defaultdict(dict, copy.deepcopy(dict(self), memo))

    def _key(self, key: Any) -> Any:
        """What has the states of a parameter here; None where another rank has them."""
        is_own = super().__contains__(key) or not isinstance(key, torch.Tensor)
        return key if is_own else self._stepped(key)

    def _absent(self, parameter: torch.Tensor) -> dict[str, Any]:
        """States that another rank has: those of the shape of their parameter, and numbers."""
        made: dict[str, Any] = {}
        for tensor, own in self.items() if parameter.requires_grad else ():
            for name, value in own.items() if isinstance(own, dict) else ():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    made[name] = value
                elif value.shape == tensor.shape:
                    empty = torch.empty(parameter.shape, dtype=value.dtype, device="meta")
                    source = "a state of the optimizer: another rank has it"
                    made[name] = AbsentTensor(empty, source)
            if made:
                break
        return made


def show_states(optimizer: torch.optim.Optimizer, stepped: Stepped) -> None:
    """Key the states by the model's parameters for a script, and follow those that are shards.

    Args:
        optimizer: between two steps.
        stepped: what steps a parameter of the model here.
    """
    if type(optimizer.state) is defaultdict:
        optimizer.state = OptimizerStates(optimizer.state, stepped)
    for tensor, layout, value in _of_shards(optimizer):
        if layout.dims and value.shape == tensor.shape:
            marked(value, replace(layout, source=f"a state of the optimizer: {layout.source}"))


def hide_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states plain tensors, for a step.

    Raises:
        TrainingError: a script has put one there that has the shape of the whole parameter.
    """
    for tensor, layout, value in _of_shards(optimizer):
        if value.shape != tensor.shape and value.shape == layout.whole_shape(tensor.shape):
            raise TrainingError(
                f"a state of the optimizer has the whole shape {tuple(value.shape)}, and "
                f"{layout.source}; make it like one that is there: "
                "torch.zeros_like(optimizer.state[parameter][key])."
            )
        if type(value) is ShardTensor:
            value.__class__ = torch.Tensor  # type: ignore[assignment]


def _of_shards(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, ShardLayout, torch.Tensor]]:
    """Shards that an optimizer steps, each with its layout and one of the tensors of its states."""
    for tensor, own in optimizer.state.items():
        layout = getattr(tensor, "sharding", None)
        if isinstance(layout, ShardLayout) and isinstance(own, dict):
            for value in own.values():
                if isinstance(value, torch.Tensor):
                    yield tensor, layout, value
