"""Keep shares for the backward in place of what was gathered from them.

What is gathered before a split product is needed again for the gradient of its weight. Kept whole,
it would take as much memory on every rank as without shares; so the share is kept, and gathered
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


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


_around: ContextVar[tuple[Pack, Unpack]] = ContextVar("around", default=(_itself, _itself))


@contextmanager
def saved_by(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Inside, autograd keeps what `pack` gives, also of the shares that are kept of gathered ones.

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
    """What was gathered, and how to gather it again.

    Args:
        share: the rank's share.
        gather: gives the whole of a share.
        hooks: what keeps the share, once somebody will read it.
    """

    def __init__(
        self,
        share: torch.Tensor,
        gather: Callable[[torch.Tensor], torch.Tensor],
        hooks: tuple[Pack, Unpack],
    ) -> None:
        self._share: Any = share.detach()
        self._gather = gather
        self._pack, self._unpack = hooks
        self._num_readers = 0
        self._whole: torch.Tensor | None = None

    def expect_reader(self) -> None:
        """One more operator's backward will read it."""
        if self._num_readers == 0:
            self._share = self._pack(self._share)
        self._num_readers += 1

    def whole(self) -> torch.Tensor:
        """Gather it again; held from the first reader to the last."""
        whole = self._gather(self._unpack(self._share)) if self._whole is None else self._whole
        self._num_readers -= 1
        self._whole = whole if self._num_readers > 0 else None
        return whole


class Keeper:
    """What has been gathered while a function runs, by the memory it lies in."""

    def __init__(self) -> None:
        self.hooks = _around.get()
        self._known: dict[int, tuple[Gathered, weakref.ref[Any]]] = {}

    def add(self, whole: torch.Tensor, gathered: Gathered) -> None:
        """Keep the share alone where this is to be kept."""
        storage = whole.untyped_storage()
        # By weak reference, since another tensor may come to lie where this one was.
        self._known[storage._cdata] = (gathered, weakref.ref(storage))

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps in the place of a tensor."""
        gathered, storage = self._known.get(tensor.untyped_storage()._cdata, (None, None))
        if gathered is None or storage is None or storage() is None:
            return None, self.hooks[0](tensor)
        gathered.expect_reader()
        return gathered, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpacker(self) -> Unpack:
        """Gives the tensors that autograd asks for; holds nothing of what was gathered."""
        return partial(_unpack, self.hooks[1])


def _unpack(unpack: Unpack, kept: Any) -> torch.Tensor:
    gathered, *view = kept
    if gathered is None:
        return unpack(*view)
    with torch.no_grad():
        tensor: torch.Tensor = gathered.whole().as_strided(*view)
    return tensor


def saving_shards(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose autograd graph keeps shares of what it gathers."""

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
    whole: torch.Tensor, share: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Tell a function that keeps shares, if one is running, what has been gathered from which."""
    keeper = _keeper.get()
    if keeper is not None and torch.is_grad_enabled():
        keeper.add(whole, Gathered(share, gather, keeper.hooks))
