"""`torch.compile` of runs of operators, which equal layers of a model share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import fx

from merak.graph.ir.structure import Structure, structure_of_graph

INDUCTOR = "inductor"
"""torch's default backend, the one that has modes."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """Options with which `torch.compile` compiles segments.

    Args:
        backend: of torch, by name.
        mode: of the backend "inductor"; None for its default.
    """

    backend: str = INDUCTOR
    mode: str | None = None


class TorchCompiler:
    """Compiles modules by `torch.compile`: one for all that have the same structure.

    A module has no tensors: parameters, buffers and constants are arguments of its call.

    Args:
        how: they are compiled.
    """

    def __init__(self, how: Compilation) -> None:
        self.how = how
        self._made: WeakValueDictionary[tuple[Structure, Hashable], torch.nn.Module]
        self._made = WeakValueDictionary()

    def compile(self, module: fx.GraphModule, layouts: Hashable = None) -> torch.nn.Module:
        """Compiled module, as long as somebody has it the same for an equal graph.

        Args:
            module: without tensors, whose graph no longer changes.
            layouts: of what it is called with, where the graph does not say.
        """
        key = structure_of_graph(module.graph), layouts
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _compile(module, self.how)
        return made


def _compile(module: torch.nn.Module, how: Compilation) -> torch.nn.Module:
    made: Any
    if how.backend == INDUCTOR:
        # Draws are those of the layout-independent random state. Tensors of one microbatch outlive
        # the next call, which the memory of CUDA graphs would not allow.
        options = {
            **(_all_modes()[how.mode] if how.mode else {}),
            "fallback_random": True,
            "triton.cudagraphs": False,
        }
        made = torch.compile(module, backend=INDUCTOR, options=options, dynamic=False)
    else:
        made = torch.compile(module, backend=how.backend, dynamic=False)
    return cast("torch.nn.Module", made)


def compile_backends() -> Sequence[str]:
    """Names of the backends of `torch.compile` that are installed."""
    return torch.compiler.list_backends(exclude_tags=())


def compile_modes() -> Sequence[str]:
    """Names of the modes of the backend "inductor"."""
    return sorted(_all_modes())


def _all_modes() -> dict[str, dict[str, Any]]:
    from torch._inductor import list_mode_options  # takes a second, which most jobs do not need

    return list_mode_options()
