"""Ranks and numbers of ranks that a script has read for a model or a loss, outside of both.

Inside a forward and a loss the default group is that of the replicas. What is read before is of all
ranks, and is found by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from merak.core.errors import TraceError
from merak.core.mesh import current_mesh
from merak.graph.trace.opaque.collectives import names_distributed
from merak.graph.trace.state.rank_reads import RankReads

_SIZES = re.compile("world|gpu|process|replica|nproc|num_ranks|devices", re.IGNORECASE)
"""In names of numbers of ranks."""

_RANKS = re.compile("rank$", re.IGNORECASE)
_DEEPEST = 4
"""Objects in objects that a loss is looked for names in."""


def refuse_outer_reads(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    reads: RankReads,
    described: Callable[[RankReads], object],
) -> None:
    """Refuse a number of ranks that was read outside of a model, where it computes with it.

    That a rank is the replica's is seen where the ranks of a replica compare their graphs.

    Args:
        model: that has been traced.
        loss_fn: of it.
        reads: of the trace.
        described: as of `refuse_by_rank`.

    Raises:
        TraceError: it is another one than that of the replicas, and what is computed depends on it.
    """
    if reads.world is None or not (reads.are_met and reads.training):
        return
    size, mine = reads.world.size, None
    for place in _places(model, loss_fn):
        if place.is_rank or place.value == size or place.value != current_mesh().world_size:
            continue
        mine = described(reads) if mine is None else mine
        try:
            with place.holding(size):
                is_used = described(reads) != mine
        except TraceError:
            is_used = True
        if is_used:
            raise TraceError(
                f"{type(model).__name__} or its loss computes with {place.label}={place.value}, "
                f"but collectives meet {size} replica{'s' * (size > 1)} here; ask "
                "dist.get_world_size() inside forward or the loss, or set it by mesh.dp of the "
                "mesh that merak.init returns."
            )


@contextmanager
def evaluated_alone(
    model: nn.Module, loss_fn: Callable[..., Any] | None, reads: RankReads
) -> Iterator[None]:
    """Context in which an evaluation's numbers of ranks are 1, and ranks 0, as it is traced.

    Args:
        model: that is traced.
        loss_fn: of it.
        reads: of the trace.
    """
    with ExitStack() as stack:
        for place in () if reads.world is None or reads.training else _places(model, loss_fn):
            if place.is_rank:
                stack.enter_context(place.holding(0))
            elif place.value in (current_mesh().dp, current_mesh().world_size):
                stack.enter_context(place.holding(1))
        yield


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a number.

    Args:
        label: its name, for people.
        value: the number.
        set: sets another one.
    """

    label: str
    value: int
    set: Callable[[Any], None]

    @property
    def is_rank(self) -> bool:
        """Whether it is a rank, and no number of them."""
        return _RANKS.search(self.label) is not None

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Context in which another number is there."""
        self.set(number)
        try:
            yield
        finally:
            self.set(self.value)


def _places(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[_Place]:
    """Numbers of such names in modules and a loss whose files name `torch.distributed`."""
    seen: set[int] = set()
    for module in model.modules():
        yield from _in_object(module, seen)
    if loss_fn is not None:
        yield from _held(loss_fn, seen, 0)


def _numbered(
    owner: str, held: Mapping[str, Any], put: Callable[[str, Any], None]
) -> Iterator[_Place]:
    for name, value in list(held.items()):
        if type(value) is int and (_SIZES.search(name) or _RANKS.search(name)):
            yield _Place(f"{owner}.{name}", value, partial(put, name))


def _in_object(value: Any, seen: set[int]) -> Iterator[_Place]:
    cls = type(value)
    if id(value) not in seen and any(names_distributed(each) for each in cls.__mro__):
        held = vars(value)
        yield from _numbered(cls.__name__, held, held.__setitem__)
    seen.add(id(value))


def _held(value: Any, seen: set[int], depth: int) -> Iterator[_Place]:
    """Numbers in what a function or an object of a loss holds."""
    if depth > _DEEPEST or id(value) in seen or isinstance(value, type):
        return
    if isinstance(value, MethodType):
        yield from _held(value.__self__, seen, depth)
        yield from _held(value.__func__, seen, depth)
    elif isinstance(value, partial):
        yield from _numbered("partial", value.keywords, value.keywords.__setitem__)
        yield from _held(value.func, seen, depth)
    elif isinstance(value, FunctionType):
        seen.add(id(value))
        names, read = value.__code__.co_freevars, value.__globals__
        cells = dict(zip(names, value.__closure__ or (), strict=True))
        inner = {name: cell.cell_contents for name, cell in cells.items()}
        yield from _numbered(
            value.__name__, inner, lambda name, new: setattr(cells[name], "cell_contents", new)
        )
        used = {n: read[n] for n in value.__code__.co_names if n in read}
        yield from _numbered(value.__module__, used, read.__setitem__)
        for each in inner.values():
            yield from _held(each, seen, depth + 1)
    elif type(getattr(value, "__dict__", None)) is dict:
        yield from _in_object(value, seen)
        for each in (*vars(value).values(), *vars(value).get("_modules", {}).values()):
            yield from _held(each, seen, depth + 1)
