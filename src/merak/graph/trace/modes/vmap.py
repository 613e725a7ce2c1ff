"""`torch.vmap` in a trace: its function as plain operators on whole tensors.

A trace would record what `vmap` runs per sample, on tensors of its own that no operator of a graph
represents. The function is therefore traced by itself, beneath `vmap`, where its operators have the
dims that it maps over; these run in its place, and the trace of the model records them. Masks of
attention are the common case: they are made from positions and padding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export import utils as export_utils
from torch._functorch import apis, vmap
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._pytree import tree_leaves

from merak.graph.ir.operators import draws
from merak.graph.trace.autograd.calls import is_recording


def vmap_by_operators() -> AbstractContextManager[Any]:
    """Run `torch.vmap` as plain operators, where no gradient flows and nothing is random."""
    function = _recordable(vmap.vmap_impl)
    patch: AbstractContextManager[Any] = mock.patch.object(apis, "vmap_impl", function)
    return patch


def _recordable(own: Callable[..., Any]) -> Callable[..., Any]:
    """torch's function, but as plain operators in an outermost call that a trace records."""

    @wraps(own)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if not is_recording() or torch._C._are_functorch_transforms_active():
            return own(*args, **kwargs)
        function, in_dims, out_dims, randomness, chunk_size, *mapped = args
        settings = (function, in_dims, out_dims, randomness, chunk_size)
        operators = _traced(partial(own, *settings, **kwargs), mapped)
        if _has_gradients(operators, mapped) or _is_random(operators.graph):
            return own(*args, **kwargs)  # which is refused behind the trace
        return operators(*mapped)

    return chosen


def _traced(function: Callable[..., Any], args: list[Any]) -> fx.GraphModule:
    """Operators beneath `vmap`; further tensors that the function reads are attributes."""
    # Else the trace of the model would record where vmap begins and ends, around nothing.
    no_mode = mock.patch.object(
        export_utils, "_maybe_find_pre_dispatch_tf_mode_for_export", lambda: None
    )
    with disable_proxy_modes_tracing(), no_mode:
        return make_fx(function)(*args)


def _has_gradients(operators: fx.GraphModule, args: list[Any]) -> bool:
    """Whether gradients may flow through it: a `no_grad` inside would be lost."""
    reads = operators.graph.find_nodes(op="get_attr")
    read = [*tree_leaves(args), *(getattr(operators, str(node.target)) for node in reads)]
    are_tracked = (isinstance(one, torch.Tensor) and one.requires_grad for one in read)
    return torch.is_grad_enabled() and any(are_tracked)


def _is_random(graph: fx.Graph) -> bool:
    return any(draws(node.target) for node in graph.nodes)
