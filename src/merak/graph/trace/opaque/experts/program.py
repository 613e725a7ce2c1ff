"""Computation around a module's loop over experts, as calls of functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from merak.graph.trace.opaque.experts.steps import Template
from merak.graph.trace.opaque.pytree import fill, flatten

TOTAL = -1
"""The number of the sum over experts, once they have been added up."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function of torch on whole tensors.

    Args:
        target: the function.
        arguments: its (args, kwargs), with slots in place of tensors.
        operands: numbers of these tensors.
        results: numbers of the tensors that it returns.
        writes: whether it writes into one of its operands.
        is_after: whether the sum over experts goes into it.
    """

    target: Any
    arguments: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    writes: bool
    is_after: bool


@dataclass(frozen=True, slots=True)
class Applied:
    """An autograd function, as a function of what it is applied to."""

    function: type[Function]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self.function.apply(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Program:
    """Program of a module that loops over experts: calls before, steps of each, calls after.

    Args:
        before: calls that lead to what the loop reads.
        after: calls on what it gives.
        choices: number of the experts that every token has chosen.
        start: number of the zeros that rows are added to, or of what they are put into; None where
            they are concatenated.
        in_rows: whether the loop gives the rows of all experts, one expert's behind the other's.
        outputs: numbers of the tensors that the module returns.
        kinds: their shapes and dtypes.
        templates: what each expert does with its rows.
        result: what the module returns, with slots in place of tensors.
    """

    before: tuple[Call, ...]
    after: tuple[Call, ...]
    choices: int
    start: int | None
    in_rows: bool
    outputs: tuple[int, ...]
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    templates: Mapping[int, Template]
    result: Any


def call_again(calls: Iterable[Call], values: dict[int, torch.Tensor]) -> None:
    """Call recorded functions on other tensors.

    Args:
        calls: in order.
        values: tensors by number; gains the results.
    """
    for call in calls:
        args, kwargs = fill(call.arguments, [values[number] for number in call.operands])
        device = kwargs.get("device")
        # What is made where choices are, which had values on the host, is made where they are now.
        is_new = device is not None and not call.operands
        if is_new or (device is not None and torch.device(device).type == "meta"):
            kwargs = {**kwargs, "device": next(iter(values.values())).device}
        found, _ = flatten(call.target(*args, **kwargs))
        values.update(zip(call.results, found, strict=True))
