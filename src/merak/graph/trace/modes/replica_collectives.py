"""Collectives in a model's forward or loss, as operators over the replicas.

The default group is there the group of the replicas, which have samples of their own, in their
order: the meaning is that of one process with the larger batch. A collective becomes an operator of
`merak.graph.ir.replicas`, in place of the calls of torch that run one; its gradient is torch's:
what `torch.distributed.nn` and functional collectives have, and none of what writes into a tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import getattr_static
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as with_gradients
from torch.overrides import TorchFunctionMode

from merak.core.source_lines import model_line, with_text
from merak.graph.ir.replicas import REPLICA_ROWS, REPLICA_SUM
from merak.graph.trace.autograd.calls import applying
from merak.graph.trace.opaque.collectives import CollectiveError
from merak.graph.trace.state.rank_reads import (
    RankReads,
    ReplicaWorld,
    is_default,
    reading_line,
)

_c10d: Any = dist.distributed_c10d
_LEAVE_OUT = "Leave it out, or use torch.distributed.nn.functional.all_gather"


def replica_collectives(ranks: RankReads) -> AbstractContextManager[Any]:
    """Context in which this thread's collectives are operators; nothing where there is no mesh.

    Args:
        ranks: what the model finds of them.
    """
    return nullcontext() if ranks.world is None else ReplicaCollectives(ranks, ranks.world)


class _Done:
    """Stands for a collective that was started, and is over when it is waited for."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class ReplicaCollectives(TorchFunctionMode):
    """Function mode that makes operators of functional collectives, and of torch's other ones.

    Args:
        ranks: gains whether a collective has been called.
        world: the replicas; in an evaluation, whose batches are one replica's alone, this one.
    """

    def __init__(self, ranks: RankReads, world: ReplicaWorld) -> None:
        super().__init__()
        self._ranks = ranks
        self._world = world
        self._thread = threading.get_ident()
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        """Enter the mode, and replace functions that are no calls of operators."""
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        for name, function in _IN_PLACE.items():
            if hasattr(dist, name):
                self._stack.enter_context(self._replaced(getattr(dist, name), function))
        self._stack.enter_context(self._applied())
        return entered

    def __exit__(self, *error: Any) -> None:
        """Leave the mode."""
        self._stack.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make an operator of a functional collective; all else is called as it is."""
        function = None
        if getattr(func, "namespace", getattr(func, "_qualified_op_name", "")).startswith(_OF_C10D):
            function = _FUNCTIONAL.get(func.__name__.partition(".")[0])
        if function is None:
            return func(*args, **(kwargs or {}))
        return function(self, *args, **(kwargs or {}))

    @contextmanager
    def _replaced(self, function: Any, stand_in: Callable[..., Any]) -> Iterator[None]:
        """Replace a function of torch under all its names: what its decorator calls."""
        cell = function.__closure__[function.__code__.co_freevars.index("func")]
        own = cell.cell_contents

        def called(*args: Any, **kwargs: Any) -> Any:
            is_models = threading.get_ident() == self._thread and reading_line(sys._getframe(1))
            return stand_in(self, *args, **kwargs) if is_models else own(*args, **kwargs)

        cell.cell_contents = called
        try:
            yield
        finally:
            cell.cell_contents = own

    @contextmanager
    def _applied(self) -> Iterator[None]:
        """Replace the autograd functions of `torch.distributed.nn`."""
        before: Any = getattr_static(torch.autograd.function._SingleLevelFunction, "apply")

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            is_models = threading.get_ident() == self._thread
            if is_models and cls.__module__ == with_gradients.__name__:
                function = _WITH_GRADIENTS.get(cls.__name__) or _refused("of another kind")
                return function(self, *args)
            return before.__get__(None, cls)(*args, **kwargs)

        # Which it says of a trace: `is_compiling` is true there.
        allowed = partial(mock.patch.object, with_gradients, "_not_supported_under_compile")
        with applying(apply), allowed(lambda *_, **__: None, create=True):
            yield

    # ---- what collectives are made of ----

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Tensors of all replicas, (replicas, …)."""
        rows = tensor.unsqueeze(0)
        if self._world.size == 1:
            return rows.clone()
        found: torch.Tensor = REPLICA_ROWS(rows, self._world.size)
        return found

    def reduced(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """A tensor of all replicas, reduced."""
        kind = _kind(op)
        if kind in ("max", "min"):
            extreme = torch.amax if kind == "max" else torch.amin
            return extreme(self.rows(tensor), 0)
        if kind not in ("sum", "avg"):
            raise refusal(f"reduces by {kind}", "SUM, AVG, MAX and MIN are followed")
        total = tensor.clone() if self._world.size == 1 else REPLICA_SUM(tensor)
        return total if kind == "sum" else total / self._world.size

    def check(self, group: Any) -> None:
        """Refuse a process group that is not that of the replicas.

        Raises:
            CollectiveError: it is not.
        """
        self._ranks.are_met = True
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        elif isinstance(group, str):
            group = _c10d._resolve_process_group(group)
        if group is None or is_default(group):
            return
        ranks: tuple[int, ...] = ()
        if isinstance(group, dist.ProcessGroup):
            ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if ranks != self._world.ranks:
            named = f"of ranks {', '.join(map(str, ranks))}" if ranks else "without this rank"
            raise refusal(
                f"uses a process group {named}",
                "inside forward and loss only the replicas may meet, which the default group "
                f"stands for (here ranks {', '.join(map(str, self._world.ranks))}); leave `group` "
                "out",
            )

    def check_number(self, number: int, what: str) -> None:
        """Refuse a number of tensors other than that of the replicas.

        Raises:
            CollectiveError: it is another one.
        """
        if number != self._world.size:
            raise refusal(
                f"gathers {what} of {number} ranks",
                f"{self._world.size} replicas have samples of their own here (ranks of one "
                "pipeline or tensor parallel group have the same; an evaluation's batch is one "
                "replica's alone); ask dist.get_world_size() inside forward or the loss, which "
                "gives the number of replicas there, or set it by mesh.dp, and the rank by "
                "mesh.dp_rank, of the mesh that merak.init returns",
            )


def refusal(what: str, instead: str) -> CollectiveError:
    """The error of a collective that cannot be followed, with the line of the model's code.

    Args:
        what: it does, as a clause without its subject.
        instead: what is wrong with that and what to do, as a clause.
    """
    return CollectiveError(f"{with_text(model_line())} {what} while the model runs; {instead}.")


def _kind(op: Any) -> str:
    if isinstance(op, str):
        return op.lower()
    for kind in ("SUM", "AVG", "MAX", "MIN"):
        if op == getattr(dist.ReduceOp, kind):
            return kind.lower()
    return str(op)


# ---- collectives that write into tensors, which have no gradient ----


def _write(tensor: torch.Tensor, value: torch.Tensor, is_async: bool, what: str) -> _Done | None:
    """Write a result into a tensor of the model's.

    Raises:
        CollectiveError: torch would take the gradient of what was there before.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise refusal(
            f"writes into a tensor that has a gradient ({what})",
            f"torch has none for that; use torch.distributed.nn.functional.{what}, or detach() it",
        )
    tensor.copy_(value)
    return _Done() if is_async else None


def _all_reduce(
    mode: ReplicaCollectives,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    mode.check(group)
    return _write(tensor, mode.reduced(tensor.detach(), op), async_op, "all_reduce")


def _all_gather(
    mode: ReplicaCollectives,
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    mode.check(group)
    mode.check_number(len(tensor_list), "a list")
    for output, found in zip(tensor_list, mode.rows(tensor.detach()).unbind(), strict=True):
        _write(output, found, async_op, "all_gather")
    return _Done() if async_op else None


def _all_gather_into_tensor(
    mode: ReplicaCollectives,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> _Done | None:
    mode.check(group)
    mode.check_number(output_tensor.numel() // max(input_tensor.numel(), 1), "a tensor")
    found = mode.rows(input_tensor.detach()).view(output_tensor.shape)
    return _write(output_tensor, found, async_op, "all_gather")


def _broadcast(
    mode: ReplicaCollectives,
    tensor: torch.Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> _Done | None:
    mode.check(group)
    found = _from_one(mode, tensor.detach(), src if group_src is None else group_src)
    return _write(tensor, found, async_op, "broadcast")


def _from_one(mode: ReplicaCollectives, tensor: torch.Tensor, source: int | None) -> torch.Tensor:
    rows = mode.rows(tensor)
    if source is None or not 0 <= source < len(rows):
        raise refusal(
            f"broadcasts from rank {source}",
            f"inside forward and loss ranks are those of the {len(rows)} replicas",
        )
    return rows[source]


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise refusal(f"communicates with other ranks ({name})", _LEAVE_OUT)

    return refuse


_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
_IN_PLACE: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_single": _all_gather_into_tensor,
    "_all_gather_base": _all_gather_into_tensor,
    "broadcast": _broadcast,
    **{name: _refused(name) for name in _OBJECTS},
}
"""Functions of `torch.distributed`, by name."""


# ---- collectives with gradients ----


def _reduce_with_gradient(mode: ReplicaCollectives, op: Any, group: Any, tensor: Any) -> Any:
    mode.check(group)
    if _kind(op) not in ("sum", "avg") and tensor.requires_grad:
        raise refusal(f"takes the gradient of an all_reduce by {_kind(op)}", "detach() its input")
    return mode.reduced(tensor, op)


def _gather_with_gradient(mode: ReplicaCollectives, group: Any, tensor: Any) -> Any:
    mode.check(group)
    return mode.rows(tensor).unbind()


def _gather_one_with_gradient(
    mode: ReplicaCollectives, output: torch.Tensor, tensor: torch.Tensor, group: Any
) -> torch.Tensor:
    mode.check(group)
    mode.check_number(output.numel() // max(tensor.numel(), 1), "a tensor")
    return mode.rows(tensor).view(output.shape)


def _broadcast_with_gradient(mode: ReplicaCollectives, src: int, group: Any, tensor: Any) -> Any:
    mode.check(group)
    return _from_one(mode, tensor, src)


_WITH_GRADIENTS: dict[str, Callable[..., Any]] = {
    "_AllReduce": _reduce_with_gradient,
    "_AllGather": _gather_with_gradient,
    "_AllGatherBase": _gather_one_with_gradient,
    "_Broadcast": _broadcast_with_gradient,
}
"""Autograd functions of `torch.distributed.nn.functional`, by name."""


# ---- functional collectives ----


def _functional_reduce(mode: ReplicaCollectives, tensor: Any, op: str, group: Any) -> Any:
    return _reduce_with_gradient(mode, op, group, tensor)


def _functional_gather(mode: ReplicaCollectives, tensor: Any, size: int, group: Any) -> Any:
    mode.check(group)
    mode.check_number(size, "a tensor")
    return mode.rows(tensor).flatten(0, 1)


def _functional_broadcast(mode: ReplicaCollectives, tensor: Any, src: int, group: Any) -> Any:
    return _broadcast_with_gradient(mode, src, group, tensor)


_OF_C10D = "_c10d_functional"
_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "all_reduce": _functional_reduce,
    "all_gather_into_tensor": _functional_gather,
    "broadcast": _functional_broadcast,
    "wait_tensor": lambda mode, tensor: tensor,
}
"""Operators of functional collectives, by name."""
