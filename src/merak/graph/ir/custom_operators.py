"""Merak's own operators in traced graphs: one library, and one registry of what each stands for.

Three of them stand for a call of Python code that no ATen operators describe. They stay apart since
each runs, and may be sharded, in another way:

- `opaque_call`: a module, a function, or a data-dependent region. What is called is in the node's
  meta, and takes the operator's place when a segment's code is generated (`graph.program.codegen`).
- `autograd_function`: a `torch.autograd.Function`, called by name wherever the operator runs. It
  has a sharding rule of its own: an elementwise function may be called on shards.
- `host_random`: a function that draws with NumPy or Python, called by name before a microbatch's
  segments run. It is never differentiated, and needs a fake kernel, since it runs on no fake
  tensor.

The others are markers that a trace writes out before its graph is complete, and kernels of torch
whose outputs have sizes that depend on values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads


class Role(Enum):
    """The role of one of Merak's own operators in a graph."""

    OPAQUE_CALL = "opaque call"
    AUTOGRAD_FUNCTION = "autograd function"
    HOST_RANDOM = "host random function"
    AUTOGRAD_CALL = "call of torch.autograd.grad"
    GRADIENT_SWITCH = "requires_grad_()"
    KERNEL = "kernel"
    COLLECTIVE = "kernel of a rank's shard that sends to others"
    MASK_OF_DOCUMENTS = "mask of causality and documents"


@dataclass(frozen=True, slots=True)
class CustomOperator:
    """An operator of Merak's own.

    Args:
        role: what it stands for.
        is_deterministic: whether it draws no random numbers but those of its tag.
        callee: position of the argument that names a function, "module:name"; None if none does.
    """

    role: Role
    is_deterministic: bool
    callee: int | None


_LIBRARY = torch.library.Library("merak", "DEF")
_REGISTRY: dict[torch._ops.OpOverload, CustomOperator] = {}


def register(
    schema: str,
    role: Role,
    implementation: Callable[..., Any],
    *,
    fake: Callable[..., Any] | None = None,
    is_deterministic: bool = False,
    is_seeded: bool = False,
    callee: int | None = None,
) -> torch._ops.OpOverload:
    """Define an operator in the library "merak".

    Args:
        schema: its name, arguments and results, as of `torch.library`.
        role: what it stands for in a graph.
        implementation: computes it; differentiated by torch, unless there is a fake one.
        fake: computes it for fake tensors; by default the implementation does that as well.
        is_deterministic: as of `CustomOperator`.
        is_seeded: whether it may draw from torch's generators, as its tag then says.
        callee: as of `CustomOperator`.
    """
    name = schema.partition("(")[0]
    tags = (torch.Tag.nondeterministic_seeded,) if is_seeded else ()
    _LIBRARY.define(schema, tags=tags)
    key = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
    _LIBRARY.impl(name, implementation, key)
    if fake is not None:
        torch.library.register_fake(f"merak::{name}", fake, lib=_LIBRARY)
    overload: torch._ops.OpOverload = getattr(torch.ops.merak, name).default
    _REGISTRY[overload] = CustomOperator(role, is_deterministic, callee)
    return overload


def custom_operator(target: Any) -> CustomOperator | None:
    """The registered operator of a node's target; None for those of torch and other libraries."""
    return _REGISTRY.get(target) if isinstance(target, torch._ops.OpOverload) else None


def role_of(node: fx.Node) -> Role | None:
    """The role of a node's operator; None for one that is not Merak's own."""
    found = custom_operator(node.target)
    return None if found is None else found.role


_TENSOR = ["tensor"]
"""Stands for a tensor among a call's arguments, as JSON."""


def pack_arguments(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], str] | None:
    """A call's tensors, and all its arguments as JSON; None if some are no plain values.

    Args:
        args: positional arguments: tensors, numbers, strings, None, and containers of these.
        kwargs: arguments by name.
    """
    leaves, spec = tree_flatten((tuple(args), kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if not all(leaf is None or isinstance(leaf, (bool, int, float, str)) for leaf in others):
        return None
    plain = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tensors, json.dumps([plain, treespec_dumps(spec)])


def unpack_arguments(tensors: Iterable[torch.Tensor], text: str) -> tuple[Any, dict[str, Any]]:
    """The arguments that `pack_arguments` was given.

    Args:
        tensors: the call's tensors, in order.
        text: its arguments as JSON.
    """
    leaves, spec = json.loads(text)
    left = iter(tensors)
    plain = [next(left) if leaf == _TENSOR else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(plain, treespec_loads(spec))
    return args, kwargs
