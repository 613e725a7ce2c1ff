"""Weight versions: the parameters that a stage computes with, now or before an update.

Synchronous schedules compute with the parameters themselves. Asynchronous ones update them while
microbatches are under way: a microbatch's backward uses the weights of its forward, so a version
stays for as long as a microbatch needs it.

Source: arXiv:1806.03377 (PipeDream), section 3.3; arXiv:2006.09503 (PipeDream-2BW), section 3.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from merak.core.gradients import add_gradient, gradient_dtype
from merak.engine.tensors_by_name import ParamLeaves
from merak.engine.zero.param_all_gather import AwaitedParams, ParamAllGather


class LiveWeights:
    """The parameters themselves, for synchronous schedules.

    Args:
        parameters: by name, at least those that the stage's segments read.
        shared: names of tied parameters, which several segments read.
        param_all_gather: is waited for before a parameter is read; None for none.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        shared: Collection[str],
        param_all_gather: ParamAllGather | None = None,
    ) -> None:
        # A shared parameter enters each stage as a leaf of its own over the same memory.
        self.shared = {
            name: parameters[name].detach().requires_grad_(parameters[name].requires_grad)
            for name in parameters
            if name in shared
        }
        for name, leaf in self.shared.items():
            leaf.grad_dtype = parameters[name].grad_dtype
        leaves = {**parameters, **self.shared}
        self.live: ParamLeaves = (
            leaves if param_all_gather is None else AwaitedParams(leaves, param_all_gather)
        )

    def for_microbatch(self, number: int) -> ParamLeaves:
        """The parameters that a microbatch computes with."""
        return self.live

    def forget(self) -> None:
        """Free the gradients of a step that failed."""
        for leaf in self.shared.values():
            leaf.grad = None


class StashedWeights:
    """Versions of a stage's parameters, for as long as a microbatch needs them.

    Only when the parameters are updated while a microbatch still needs the present version do they
    move to new memory: there are never more copies than versions in use.

    Args:
        parameters: of the stage, by name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.live: ParamLeaves = parameters
        self._parameters = parameters
        self._current = 0
        self._version_of: Sequence[int] = ()
        self._needed: Counter[int] = Counter()
        self._leaves: dict[int, ParamLeaves] = {}

    def start_step(self, version_of: Sequence[int]) -> None:
        """Start a run with the present parameters as version 0.

        Args:
            version_of: the version that each microbatch of the run uses.
        """
        self._current = 0
        self._version_of = version_of
        self._needed = Counter(version_of)
        self._leaves = {0: self._alias()}

    def for_microbatch(self, number: int) -> ParamLeaves:
        """The parameters that a microbatch computes with."""
        return self._leaves[self._version_of[number]]

    def release(self, number: int) -> None:
        """Add a microbatch's gradients to the parameters', and free unused versions."""
        version = self._version_of[number]
        for name, leaf in self._leaves[version].items():
            if leaf.grad is not None:
                add_gradient(self._parameters[name], leaf.grad)
                leaf.grad = None
        self._needed[version] -= 1
        if not self._needed[version] and version != self._current:
            del self._leaves[version]

    def before_update(self) -> None:
        """Save the present version, which the optimizer is about to overwrite."""
        if self._needed[self._current]:
            for parameter in self._parameters.values():
                if parameter.requires_grad:  # what is frozen is the same in all versions
                    parameter.data = parameter.data.clone()
        else:
            del self._leaves[self._current]
        self._current += 1
        self._leaves[self._current] = self._alias()

    def forget(self) -> None:
        """Free the versions of a step that failed."""
        self._leaves.clear()

    def _alias(self) -> ParamLeaves:
        """Leaves over the parameters' memory, whose graphs do not see the optimizer's writes."""
        leaves = {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }
        for name, leaf in leaves.items():
            leaf.grad_dtype = gradient_dtype(self._parameters[name])
        return leaves


Weights = LiveWeights | StashedWeights
