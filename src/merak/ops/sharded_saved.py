"""Sharded saved tensors: a gathered tensor's shard is saved for the backward in its place.

What is gathered before a split product is needed again for the gradient of its weight. Saved whole,
it would take as much memory on every rank as without sharding; so the shard is kept, and gathered
once more when the backward asks for it.

Source: Korthikanti et al. (arXiv 2205.05198, section 4.2.2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

Pack = Callable[[torch.Tensor], Any]
"""Gives what autograd keeps in the place of a tensor."""

Unpack = Callable[[Any], torch.Tensor]
"""Gives the tensor back."""

_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values: an operator that saved its own output as it is would hold itself.

    Where no backward ran, such a graph would never be freed.
    """
    return tensor.detach()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_around: ContextVar[tuple[Pack, Unpack]] = ContextVar("around", default=(_detached, _itself))


@contextmanager
def saved_by(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Saved-tensor hooks that apply to the shards of gathered tensors as well.

    torch asks the innermost hooks alone.

    Args:
        pack: of a tensor that is to be kept.
        unpack: of what it gave.
    """
    token = _around.set((pack, unpack))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        _around.reset(token)


class Gathered:
    """Gathered tensor's shard, and how to gather it again.

    Args:
        shard: the rank's shard.
        gather: gives the whole of a shard.
        hooks: what keeps the shard, once somebody will read it.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor],
        hooks: tuple[Pack, Unpack],
    ) -> None:
        self._shard: Any = shard.detach()
        self._gather = gather
        self._pack, self._unpack = hooks
        self._num_readers = 0
        self._whole: torch.Tensor | None = None

    def expect_reader(self) -> None:
        """Count one more operator whose backward will read the tensor."""
        if self._num_readers == 0:
            self._shard = self._pack(self._shard)
        self._num_readers += 1

    def whole(self) -> torch.Tensor:
        """Gathered tensor once more, held from the first reader to the last."""
        whole = self._gather(self._unpack(self._shard)) if self._whole is None else self._whole
        self._num_readers -= 1
        self._whole = whole if self._num_readers > 0 else None
        return whole


class Keeper:
    """Gathered tensors of a running function, by their storage."""

    def __init__(self) -> None:
        self.hooks = _around.get()
        self._known: dict[int, tuple[Gathered, weakref.ref[Any]]] = {}

    def add(self, whole: torch.Tensor, gathered: Gathered) -> None:
        """Save the shard alone where this tensor is to be saved."""
        storage = whole.untyped_storage()
        # By weak reference, since another tensor may come to lie where this one was.
        self._known[storage._cdata] = (gathered, weakref.ref(storage))

    def pack(self, tensor: torch.Tensor) -> Any:
        """Object that autograd saves in place of a tensor."""
        gathered, storage = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        if gathered is None or storage is None or storage() is None:
            return None, self.hooks[0](tensor)
        gathered.expect_reader()
        return gathered, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpacker(self) -> Unpack:
        """Unpack hook of the saved tensors; it holds nothing of what was gathered."""
        return partial(_unpack, self.hooks[1])


def _unpack(unpack: Unpack, kept: Any) -> torch.Tensor:
    gathered, *view = kept
    if gathered is None:
        return unpack(*view)
    with torch.no_grad():
        tensor: torch.Tensor = gathered.whole().as_strided(*view)
    return tensor


def saving_shards(function: Callable[P, R]) -> Callable[P, R]:
    """Function whose autograd graph saves the shards of what it gathers."""

    def keeping(*args: P.args, **kwargs: P.kwargs) -> R:
        keeper = Keeper()
        token = _keeper.set(keeper)
        try:
            with torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpacker()):
                return function(*args, **kwargs)
        finally:
            _keeper.reset(token)

    return keeping


def note_gathered(
    whole: torch.Tensor, shard: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Register a gathered tensor with the running function of `saving_shards`, if any."""
    keeper = _keeper.get()
    if keeper is not None and torch.is_grad_enabled():
        keeper.add(whole, Gathered(shard, gather, keeper.hooks))
