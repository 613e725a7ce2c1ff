"""Selective recomputation: operators whose results are saved, not computed again.

While the forward runs, what these operators compute is recorded. When the segment runs again for
its backward, they give what they gave before: autograd records them as always, and only the kernels
are left out. An operator that draws random numbers leaves the generator where it left it before, so
that all others draw what they drew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from merak.core.random import random_state, restore_random_state
from merak.graph.ir.ir import Segment
from merak.graph.ir.mutation import is_mutating
from merak.graph.segment.cut import copy_graph
from merak.graph.trace.branches.flags import is_branch_select


@dataclass(slots=True)
class _Result:
    """Result of one kernel, and the generator's state afterwards if it drew from it."""

    value: Any
    state: torch.Tensor | None


@dataclass(slots=True)
class SavedResults:
    """Results of a segment's saved operators for one microbatch.

    Args:
        results: by an operator's name, of its kernels in order.
    """

    results: dict[str, deque[_Result]] = field(default_factory=dict)

    def num_bytes(self, name: str) -> int:
        """Bytes of the storages of the saved results."""
        tensors = [leaf for r in self.results.get(name, ()) for leaf in tree_leaves(r.value)]
        storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
        return sum({s._cdata: s.nbytes() for s in storages}.values())


class SavedOps:
    """Saved operators of one segment, for one microbatch after another."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._recording: SavedResults | None = None
        self._replays = False

    @contextmanager
    def recording(self, device: torch.device) -> Iterator[SavedResults]:
        """Context in which the operators' results are recorded."""
        results = SavedResults()
        with self._calling(results, device, replays=False):
            yield results

    def replaying(
        self, recording: SavedResults, device: torch.device
    ) -> AbstractContextManager[None]:
        """Context in which the operators give their recorded results, once."""
        return self._calling(recording, device, replays=True)

    @contextmanager
    def _calling(
        self, recording: SavedResults, device: torch.device, *, replays: bool
    ) -> Iterator[None]:
        self._device, self._recording, self._replays = device, recording, replays
        try:
            yield
        finally:
            self._recording = None

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call an operator, or give its recorded result."""
        if self._recording is None:
            return function(*args, **kwargs)
        if not self._replays:
            recorder = _Recorder(self._device)
            with recorder:
                made = function(*args, **kwargs)
            if not recorder.writes:
                self._recording.results[name] = recorder.results
            return made
        if name not in self._recording.results:
            return function(*args, **kwargs)
        with _Player(self._recording.results.pop(name), self._device):
            return function(*args, **kwargs)


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records kernels' results, and whether one of them mutates a tensor."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: deque[_Result] = deque()
        self.writes = False
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a kernel."""
        made = func(*args, **(kwargs or {}))
        self.writes |= func._schema.is_mutable
        if _is_pure(func):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            state = random_state(self._device) if draws else None
            self.results.append(_Result(_detached(made), state))
        return made


class _Player(TorchDispatchMode):
    """Dispatch mode that gives kernels' recorded results."""

    def __init__(self, results: deque[_Result], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give the kernel's recorded result; views are taken anew."""
        if not _is_pure(func):
            return func(*args, **(kwargs or {}))
        result = self._results.popleft()
        if result.state is not None:
            restore_random_state(self._device, result.state)
        return _detached(result.value)


def _is_pure(func: Any) -> bool:
    """Whether a kernel yields new tensors, without mutation or aliasing.

    A query such as `prim.device` yields none, and a replay may make others than the recorded call.
    """
    schema = func._schema
    if func.namespace == "prim":
        return False
    return not schema.is_mutable and not any(r.alias_info for r in schema.returns)


def _detached(value: Any) -> Any:
    """Tensors of their own over the same storage, which autograd may mark."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach(), value)


def save_operators(segment: Segment, names: Container[str]) -> tuple[Segment, SavedOps]:
    """Segment of which some operators' results are saved.

    Args:
        segment: the segment; left as it is.
        names: of the operators' nodes in its graph.

    Returns:
        The same computation, and what records and replays those operators.
    """
    graph, _ = copy_graph(segment.graph)
    saved = SavedOps()
    for node in graph.nodes:
        # What writes could not be left out, and what takes one of two ways computes nothing.
        fits = not (is_mutating(node) or is_branch_select(node))
        if node.op == "call_function" and node.name in names and fits:
            node.target = _through(saved, node.name, node.target)
    return replace(segment, graph=graph), saved


def _through(saved: SavedOps, name: str, function: Any) -> Callable[..., Any]:
    def kept_operator(*args: Any, **kwargs: Any) -> Any:
        return saved.call(name, function, *args, **kwargs)

    return kept_operator
