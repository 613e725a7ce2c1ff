"""Tensors by name, as they pass between a stage and its segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from merak.graph.program.program import SegmentProgram

ParamLeaves = Mapping[str, torch.Tensor]
"""The parameters that a segment computes with, as leaves of its autograd graph."""


TensorDict = dict[str, torch.Tensor]
"""Activations or gradients, by the name of the value."""


LeafGradients = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Leaves of an autograd graph, and for each the gradient that later readers have given."""


GiveLeafGradients = Callable[[SegmentProgram, ParamLeaves], LeafGradients]
"""Called before a segment's backward: gives the leaves of parameters that it reads several times
and later segments read as well, with what those have given; see `tied.TiedGradients.begin`."""


def no_leaf_gradients(segment: SegmentProgram, leaves: ParamLeaves) -> LeafGradients:
    """The `GiveLeafGradients` of parameters that are not tied."""
    return ()
