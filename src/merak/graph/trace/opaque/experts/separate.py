"""Experts that are modules, or have parameters, of their own: which weights correspond."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from merak.graph.trace.opaque.operator import OpaqueCall

Separate = Mapping[int, tuple[int, tuple[int, ...]]]
"""Of a parameter that every expert has one of: the expert, and all of these, in their order."""


def separate_weights(
    call: OpaqueCall, parameters: Sequence[torch.Tensor], num_experts: int | None = None
) -> Separate:
    """Parameters of a module that differ in one number of their names, and in nothing else.

    Whether they are of experts is seen where rows are multiplied by them.

    Args:
        call: of the module.
        parameters: of the module, as the call has them.
        num_experts: the number of experts, one more where a choice may be of none; if it is known,
            weights with other numbers than these count only where a name is a number alone.
    """
    deepest = max((names[0].count(".") for names in call.states[: call.parameters]), default=0)
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for level in range(deepest + 1):  # the outermost number is the expert's
        groups: dict[object, list[int]] = {}
        for number, own in enumerate(call.states[: call.parameters]):
            likeness = _without_number(own, level) if number not in found else None
            if likeness is not None:
                weight = parameters[number]
                key = (likeness, tuple(weight.shape), weight.dtype)
                groups.setdefault(key, []).append(number)
        for numbers in groups.values():
            is_list = call.states[numbers[0]][0].split(".")[level].isdecimal()
            is_other = num_experts is not None and num_experts - len(numbers) not in (0, 1)
            if len(numbers) > 1 and (is_list or not is_other):
                found |= {n: (expert, tuple(numbers)) for expert, n in enumerate(numbers)}
    return found


def _without_number(names: tuple[str, ...], level: int) -> tuple[str, ...] | None:
    """The steps of a name without the number in one of them; None where there is none."""
    steps = names[0].split(".")
    if len(names) > 1 or len(steps) <= level:
        return None
    numbered = re.fullmatch(r"(.*?)\d+", steps[level])
    return None if numbered is None else (*steps[:level], numbered[1], *steps[level + 1 :])
