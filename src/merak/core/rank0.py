"""Decisions and warnings of rank 0: what one rank of a job decides or says for all of them."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from merak.core import errors
from merak.core.errors import MerakError
from merak.core.health.status import waiting_for_rank0

Decision = TypeVar("Decision")

AT_ONCE = "at_once"
"""Attribute of a log's record that is of use while a model is traced, not only behind it."""

REHEARSAL = "rehearsal"
"""Backend of a job that has one rank only, which stands for all others (`merak.rehearse`)."""


class Ranks(Protocol):
    """The grid of ranks, as far as a decision needs it; `merak.core.mesh.Mesh` is one."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def device_mesh(self) -> Any:
        """torch's mesh over the ranks; None in a single process."""


class Rank0Error(RuntimeError):
    """An exception on rank 0 that is no `MerakError`, as the other ranks raise it."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on rank 0, as it is sent: exceptions of libraries may not pickle.

    Args:
        kind: the class that is raised elsewhere.
        message: its message.
        note: the traceback on rank 0; empty where the message says all.
    """

    kind: type[Exception]
    message: str
    note: str = ""

    def raised(self) -> Exception:
        """The exception, to be raised on another rank."""
        error = self.kind(self.message)
        if self.note:
            error.add_note(self.note)
        return error


def decide_on_rank0(mesh: Ranks, what: str, decide: Callable[[], Decision]) -> Decision:
    """Decide something on rank 0 and broadcast the decision; a collective of all ranks.

    Measured times, free memory and environment variables differ from rank to rank: whatever follows
    from them and must be equal everywhere goes this way.

    Args:
        mesh: the grid of ranks.
        what: the decision as a noun, which the watchdog names while ranks wait for it.
        decide: gives the decision, which must pickle; called on rank 0 only.

    Raises:
        MerakError: `decide` raised it; every rank raises it with the same message.
        Rank0Error: `decide` raised another exception, which rank 0 raises itself.
    """
    if not has_peers(mesh):
        return decide()
    made: list[Decision | _Failure | None] = [None]
    error: Exception | None = None
    if mesh.rank == 0:
        try:
            made = [decide()]
        except Exception as caught:
            error, made = caught, [_failure(f"decide {what}", caught)]
    with waiting_for_rank0(what):
        dist.broadcast_object_list(made, src=0)
    if error is not None:
        raise error
    decision: Any = made[0]
    if isinstance(decision, _Failure):
        raise decision.raised()
    return decision  # type: ignore[no-any-return]


@contextmanager
def failing_together(mesh: Ranks, action: str) -> Iterator[None]:
    """Context in which rank 0 does what no other rank does; a collective of all ranks.

    Args:
        mesh: the grid of ranks.
        action: of rank 0, as a verb and its object.

    Raises:
        MerakError: rank 0 has raised it inside; every rank raises it with the same message.
        Rank0Error: rank 0 has raised another exception, which it raises itself.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as caught:
        own = caught
    found = [None if own is None else _failure(action, own)]
    if has_peers(mesh):
        with waiting_for_rank0(f"the attempt to {action}"):
            dist.broadcast_object_list(found, src=0)
    if own is not None:
        raise own
    if found[0] is not None:
        raise found[0].raised()


def has_peers(mesh: Ranks) -> bool:
    """Whether other ranks run: not in a single process, nor where one rank is rehearsed.

    Args:
        mesh: the grid of ranks.
    """
    is_rehearsal = dist.is_initialized() and dist.get_backend() == REHEARSAL
    return mesh.device_mesh is not None and not is_rehearsal


def _failure(action: str, error: Exception) -> _Failure:
    if isinstance(error, MerakError):
        kind = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
        return _Failure(kind, str(error))
    note = "On rank 0:\n" + "".join(traceback.format_exception(error))
    return _Failure(Rank0Error, f"rank 0 could not {action}: {error!r}", note)


def is_rank0() -> bool:
    """Whether this is rank 0, which logs what every rank knows; true in a single process."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def warn_on_rank0(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a warning that concerns the whole job, on rank 0 only.

    Args:
        logger: of the calling module.
        message: with `%s` for each of the values, as of `logging`.
        *values: for the message.
    """
    if is_rank0():
        logger.warning(message, *values, stacklevel=2)


@lru_cache(maxsize=1024)
def warn_once(logger: logging.Logger, message: str, *values: object) -> None:
    """Log a warning on rank 0, once in this process for the same message and values.

    Args:
        logger: as for `warn_on_rank0`.
        message: as for `warn_on_rank0`.
        *values: as for `warn_on_rank0`; hashable.
    """
    if is_rank0():
        logger.warning(message, *values, stacklevel=2)
