"""Placed tensors: each has values on some ranks of a pipeline, and only a size on the others.

Every rank of a pipeline runs the same Python code of a model that none of them has whole. A
function of placed tensors is computed on the ranks that have all it reads, beginning with the
parameters, which never move; other values are sent to those first. The other ranks know the sizes
of results without computing them. So whatever a model keeps, such as keys and values of earlier
tokens, stays where it was computed, and what its Python code reads of values (`item`, `bool`) is
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from merak.engine.inference.pipeline import Pipeline

_META = torch.device("meta")


class Gather(Protocol):
    """Gives a parameter whole on the ranks that hold a part of it, which call it together."""

    def __call__(self) -> torch.Tensor:
        """The parameter."""


class Runner(Protocol):
    """Runs functions of placed tensors, as `calls.Calls` does."""

    pipeline: Pipeline

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, in which placed tensors are plain ones."""


class Placed(torch.Tensor):
    """A tensor that has values on some ranks of a pipeline, and no memory on the others.

    Attributes:
        calls: what runs functions of it.
        holders: the pp ranks that have its values.
        shown_device: the device that it has on those.
        number: of the placed tensor among all, in the order in which they were made.
        gathered: gives a parameter of which its holders have parts; None for other tensors.
        copies: the same values, once sent to further ranks, and the writes before.
    """

    calls: Runner
    holders: frozenset[int]
    shown_device: torch.device
    number: int
    gathered: Gather | None
    copies: tuple[int, Placed] | None

    @property
    def pipeline(self) -> Pipeline:
        """The ranks."""
        return self.calls.pipeline

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function where the values of its arguments are."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if not isinstance(first, Placed):
            first = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Placed))
        with torch._C.DisableTorchFunctionSubclass():
            return first.calls.run(func, args, kwargs)


def place(
    value: torch.Tensor,
    calls: Runner,
    holders: frozenset[int],
    device: torch.device,
    gather: Gather | None = None,
) -> Placed:
    """A placed tensor of what a rank has of it.

    Args:
        value: its values, or a tensor on the meta device of its size.
        calls: what runs functions of it.
        holders: the pp ranks that have its values.
        device: that it has on those.
        gather: of a parameter of which each holder has a part.
    """
    made = value.detach().as_subclass(Placed)
    made.calls, made.holders, made.shown_device = calls, holders, device
    made.gathered, made.copies = gather, None
    calls.pipeline.num_made += 1
    made.number = calls.pipeline.num_made
    return made


def whole(value: Any) -> Any:
    """What a function gives, with placed tensors as plain ones on every rank; all call it together.

    Args:
        value: a tensor, or tuples, lists and mappings of them; others stay as they are.
    """
    if isinstance(value, Placed):
        with torch._C.DisableTorchFunctionSubclass():
            return whole_tensor(value)
    if isinstance(value, Mapping):
        for key in list(value):
            found = whole(value[key])
            if found is not value[key]:
                value[key] = found  # type: ignore[index]  # outputs of transformers, and dicts
        return value
    if type(value) in (tuple, list):
        return type(value)(whole(one) for one in value)
    return value


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """A tensor that is plain on every rank; all call it together."""
    if not isinstance(value, Placed):
        return value
    pipeline, root = value.pipeline, min(value.holders)
    own = values_of(value) if pipeline.mesh.pp_rank in value.holders else None
    if value.holders == pipeline.everyone:
        assert own is not None
        return own
    found = pipeline.broadcast(own if pipeline.mesh.pp_rank == root else None, value, root)
    return found.to(value.shown_device) if own is None else own


def values_of(value: Placed) -> torch.Tensor:
    """The plain tensor of a placed one, on a rank that has its values."""
    if value.gathered is not None:
        return value.gathered()
    return value.as_subclass(torch.Tensor)


class Conversions(TorchFunctionMode):
    """Mode in which functions that make tensors take placed ones, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; of those that copy what they are given, on values that all ranks have."""
        if func in _COPY and any(isinstance(leaf, Placed) for leaf in leaves(args)):
            with torch._C.DisableTorchFunctionSubclass():
                args = map_tensors(whole_tensor, args)
        return func(*args, **(kwargs or {}))


_COPY = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
"""Functions that make a tensor of anything, which no class of tensors can change."""


def bring(tree: Any, target: frozenset[int]) -> Any:
    """Arguments of a module, with values on all ranks that have its parameters.

    Args:
        tree: the arguments; those that one of the ranks has already stay as they are.
        target: the pp ranks that have all of its parameters.
    """

    def brought(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, Placed) or value.holders & target:
            return value
        with torch._C.DisableTorchFunctionSubclass():
            made: torch.Tensor = moved_to(value, target)
        return made

    return map_tensors(brought, tree)


def moved_to(tree: Any, target: frozenset[int]) -> Any:
    """Arguments, with values on all ranks of the target."""

    def moved(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, Placed) or target <= value.holders:
            return value
        now = value.pipeline.num_writes
        if value.copies is not None and value.copies[0] == now:
            value = value.copies[1]
            if target <= value.holders:
                return value
        made = _sent(value, target)
        value.copies = (now, made)
        return made

    return map_tensors(moved, tree)


def _sent(value: Placed, target: frozenset[int]) -> Placed:
    """The same values, on further ranks."""
    pipeline, root = value.pipeline, min(value.holders)
    rank = pipeline.mesh.pp_rank
    own = values_of(value) if rank in value.holders else None
    found = pipeline.send(own if rank == root else None, value, root, target - value.holders)
    if own is not None:
        shown = own
    elif found is not None:
        shown = found.to(value.shown_device)
    else:
        shown = torch.empty(value.shape, dtype=value.dtype, device=_META)
    return place(shown, value.calls, value.holders | target, value.shown_device)


def map_tensors(function: Callable[[Any], Any], tree: Any, of: type = torch.Tensor) -> Any:
    """Arguments or results with a function of each tensor, or other thing, in its place."""
    kind = type(tree)
    if isinstance(tree, of):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, one, of) for one in tree])
    if kind is dict:
        return {name: map_tensors(function, one, of) for name, one in tree.items()}
    if isinstance(tree, tuple):  # several named results, such as those of `max`
        made = [map_tensors(function, one, of) for one in tree]
        return kind(*made) if hasattr(kind, "_fields") else kind(made)
    return tree


def leaves(tree: Any) -> list[Any]:
    """What arguments or results consist of."""
    found: list[Any] = []
    _add_leaves(tree, found)
    return found


def _add_leaves(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, (tuple, list)):
        for one in tree:
            _add_leaves(one, found)
    elif isinstance(tree, dict):
        for one in tree.values():
            _add_leaves(one, found)
    else:
        found.append(tree)
