"""The rank of this process as Python state: where a model's code reads it, and with what effect."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist
from accelerate import PartialState  # type: ignore[import-untyped]

from merak.core.errors import TraceError
from merak.core.mesh import Mesh
from merak.core.rank0 import warn_on_rank0
from merak.core.source_lines import MERAK, is_library, with_text
from merak.graph.weights.rank_agreement import is_distributed

logger = logging.getLogger(__name__)

_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"})
"""Variables of the environment that launchers give each process another value of."""
_LISTING = frozenset({"__iter__", "copy"})
_OF_ACCELERATE = ("process_index", "local_process_index")
_PASSING_ON = (__file__, os.__file__, *(sys.modules[m].__file__ for m in (Mesh.__module__,)))
"""Files of code that reads the rank for its caller, beside those of libraries."""


class RankReads:
    """Reads of the rank by a model's own code.

    Args:
        instead: the rank that this code finds; None for the true one.

    Attributes:
        lines: that read it, as "file:number".
    """

    def __init__(self, instead: int | None = None) -> None:
        self._instead = instead
        self._thread = threading.get_ident()
        self.lines: dict[str, None] = {}

    def _found(self, rank: Any) -> Any:
        """What a read finds: Merak's own, and other threads', the true rank."""
        if threading.get_ident() != self._thread or not (line := _reading_line()):
            return rank
        self.lines[line] = None
        return rank if self._instead is None else type(rank)(self._instead)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which reads of this thread are recorded."""
        rank_of, value_of = dist.ProcessGroup.rank, os._Environ.__getitem__
        own: Any = vars(Mesh)["rank"]

        def variable(environment: Any, name: Any) -> Any:
            value = value_of(environment, name)
            is_listed = sys._getframe(1).f_code.co_name in _LISTING  # of all variables
            return value if name not in _VARIABLES or is_listed else self._found(value)

        with ExitStack() as stack:
            for owner, name, value in (
                (dist.ProcessGroup, "rank", lambda group: self._found(rank_of(group))),
                (os._Environ, "__getitem__", variable),
                (Mesh, "rank", property(lambda mesh: self._found(own.__get__(mesh)))),
                *((PartialState, n, self._attribute(n)) for n in _OF_ACCELERATE),
            ):
                stack.enter_context(mock.patch.object(owner, name, value, create=True))
            yield

    def _attribute(self, name: str) -> property:
        return property(lambda state: self._found(vars(state)[name]))


def _reading_line() -> str:
    """The line of a model or a script that reads the rank; "" where Merak's own code does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_merak = file.startswith(MERAK) and file not in _PASSING_ON
        if is_merak or not (file in _PASSING_ON or "/accelerate/" in file or is_library(file)):
            return "" if is_merak else f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def refuse_by_rank(reads: RankReads, described: Callable[[], object]) -> bool:
    """Refuse a model that computes something else on other ranks; what only prints may do so.

    Args:
        reads: of a trace on this rank.
        described: traces the model, and describes what it computes.

    Returns:
        Whether anything is warned of.

    Raises:
        TraceError: it does.
    """
    if not reads.lines or not is_distributed():
        return False
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    lines = ", ".join(map(with_text, reads.lines))
    try:
        mine = described()
        for other in sorted({0, 1, num_ranks - 1} - {rank}):
            with RankReads(other).recorded():
                differs = described() != mine
            if differs:
                raise _Refusal(
                    f"{lines} reads the rank of the process, and rank {other} would compute "
                    f"something else than rank {rank}: pipeline ranks run pieces of one graph, "
                    "tensor parallel ranks have the same samples, and replicas share one model. "
                    "Leave it out; what only prints may stay, under `if dist.get_rank() == 0`."
                )
    except _Refusal as error:
        raise TraceError(str(error)) from None
    except TraceError as error:
        warn_on_rank0(
            logger,
            "%s reads the rank of the process, and whether other ranks compute something else "
            "cannot be told (%s).",
            lines,
            error,
        )
        return True
    return False


class _Refusal(TraceError):
    """Other ranks compute something else."""
