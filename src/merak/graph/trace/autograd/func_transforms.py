"""`torch.func` transforms, computed with plain autograd while a model is traced.

`torch.func.grad`, `vjp`, `jvp` and transforms built on them wrap tensors in levels of their own,
which no operator of a graph represents. Outside of `vmap` autograd itself computes the same: a
level is then a view of the argument, with respect to which gradients are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from operator import itemgetter
from typing import Any
from unittest import mock

import torch
from torch._functorch import eager_transforms
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from merak.graph.trace.autograd.calls import is_recording, refuse_call

_MOST_ROWS = 32
"""A Jacobian has a backward for each row; one of more rows is refused."""

_FUNC: Any = eager_transforms


def func_by_autograd() -> AbstractContextManager[Any]:
    """Run `torch.func.grad`, `vjp`, `jvp` and Jacobians through autograd, which a trace records."""
    by: dict[str, Callable[..., Any]] = {
        "grad_increment_nesting": _no_level,
        "_wrap_all_tensors": _views,
        "_create_differentiable": _with_gradient,
        "_undo_create_differentiable": _as_it_is,
        "_jvp_with_argnums": _jvp,
        "vmap": _row_by_row,
    }
    chosen: Any = {name: _where_recorded(new, getattr(_FUNC, name)) for name, new in by.items()}
    patches: AbstractContextManager[Any] = mock.patch.multiple(_FUNC, **chosen)
    return patches


def _where_recorded(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of a function of torch, used only where calls of autograd are recorded.

    They are not recorded in probes of modules, nor inside of `torch.vmap`.
    """

    @wraps(own)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        within = torch._C._are_functorch_transforms_active()
        return (function if is_recording() and not within else own)(*args, **kwargs)

    return chosen


@contextmanager
def _no_level() -> Iterator[int]:
    yield 0


def _views(values: Any, level: int) -> Any:
    """Views of all tensors, in place of a level's wrappers."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.view_as(tensor), values)


def _with_gradient(values: Any, level: int | None = None) -> Any:
    def differentiable(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"expected all inputs to be tensors, got {type(value).__name__}")
        return value if value.requires_grad else value.requires_grad_()

    return tree_map(differentiable, values)


def _as_it_is(values: Any, level: int | None = None) -> Any:
    return values


def _jvp(
    func: Callable[..., Any],
    primals: Any,
    tangents: Any,
    argnums: Any,
    *,
    strict: bool = False,
    has_aux: bool,
) -> Any:
    """Jacobian-vector product by a double backward, linear in the gradients given to it."""
    output, pull, *aux = _FUNC._vjp_with_argnums(func, *primals, argnums=argnums, has_aux=has_aux)
    with torch.enable_grad():
        flat, spec = tree_flatten(output)
        given = [torch.zeros_like(one).requires_grad_() for one in flat]
        back = tree_leaves(pull(tree_unflatten(given, spec), create_graph=True))
        pairs = zip(back, tree_leaves(tangents), strict=True)
        live = [(one, along) for one, along in pairs if one.requires_grad]
        found: Any = [torch.zeros_like(one) for one in flat]
        if live:
            ones, alongs = zip(*live, strict=True)
            found = torch.autograd.grad(
                ones, given, alongs, create_graph=True, materialize_grads=True
            )
    return output, tree_unflatten(found, spec), *aux


def _row_by_row(
    function: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """`vmap` over the first dim as a loop; Jacobians need no other."""

    def rows(basis: Any) -> Any:
        size = next(leaf for leaf in tree_leaves(basis) if isinstance(leaf, torch.Tensor)).shape[0]
        if in_dims != 0 or out_dims != 0 or size > _MOST_ROWS:
            refuse_call(f"takes a Jacobian of {size} rows")
        each = []
        for i in range(size):
            each.append(function(tree_map_only(torch.Tensor, itemgetter(i), basis)))
        return tree_map(lambda *found: torch.stack(found), *each)

    return rows
