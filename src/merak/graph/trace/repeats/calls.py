"""Calls of blocks in a trace, of which one that equals an earlier one is copied.

The code around blocks runs as ever. When it calls a block that equals one that has run, in all that
its forward could read and in its arguments, the operators of that call are recorded again, with
the other block's weights. What cannot be compared runs: calls with objects as arguments, blocks
with hooks, forwards that change attributes or draw conditions. Operators outside that read a value
of a copied call which it has not returned end the trace, which then runs all blocks.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from merak.graph.trace.opaque.loops import Loops
from merak.graph.trace.repeats.block import (
    Block,
    NotRepeatable,
    OuterState,
    State,
    blocks_of,
    following_modes,
    is_constant,
    metadata,
    tensors_like,
)
from merak.graph.trace.repeats.region import (
    Region,
    follow,
    is_followed,
    node_of,
    nodes_after,
    storage_id,
    tracked_like,
)
from merak.graph.trace.state.holders import attributes
from merak.graph.trace.state.kept import is_equal
from merak.graph.trace.state.record import StateReads
from merak.graph.trace.state.snapshot import Snapshot

logger = logging.getLogger(__name__)

_MOST_KINDS = 6
"""Calls of one list that are remembered, each unlike the others; later ones just run."""

_Place = tuple[bool, int]
"""True and the number of an argument; False and the identity of a parameter or buffer."""


class LeftOpen(Exception):
    """A value of a copied call is read outside, though it was not returned."""


@dataclass(frozen=True, slots=True)
class _Values:
    """Nested arguments or results: the tensors, and all that is not one.

    Args:
        tensors: in order.
        rest: the same with their metadata in place of them.
    """

    tensors: tuple[torch.Tensor, ...]
    rest: Any

    @staticmethod
    def of(value: Any) -> _Values:
        """Flatten tuples, lists and dicts.

        Raises:
            NotRepeatable: there are other objects in them.
        """
        tensors: list[torch.Tensor] = []

        def walk(item: Any) -> Any:
            if isinstance(item, FakeTensor):
                tensors.append(item)
                return metadata(item)
            if type(item) in (tuple, list):
                return type(item)(map(walk, item))
            if type(item) is dict:
                return {key: walk(inner) for key, inner in item.items()}
            if isinstance(item, torch.Tensor) or not is_constant(item):
                raise NotRepeatable(f"a {type(item).__name__} among its arguments or results")
            return item

        rest = walk(value)
        return _Values(tuple(tensors), rest)


@dataclass(frozen=True, slots=True)
class _Before:
    """What a call depends on, as it begins.

    Args:
        block: the block that is called.
        state: its attributes and tensors.
        around: the state outside of the block.
        given: arguments.
        versions: of the arguments that are tensors: how often each was written into.
        followed: whether a mode follows each.
        aliases: for each tensor, weights included, the places of the first that is the same, and of
            the first in the same storage.
    """

    block: Block
    state: State
    around: Snapshot
    given: _Values
    versions: tuple[int, ...]
    followed: tuple[bool, ...]
    aliases: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that has run and may be copied.

    Args:
        before: what it depended on.
        region: the operators that it has recorded.
        names: path of the block in the names of the trace.
        sources: nodes outside of the region that it reads, each with the tensor that it stands for.
        moved: tensors that stand for other nodes after the call: those of operators that have
            returned them as they are, such as a conversion to the type that a tensor has.
        result: what it has returned.
        results: of the tensors in it, the node, or the place of the argument that it is.
    """

    before: _Before
    region: Region
    names: str
    sources: tuple[tuple[Any, _Place], ...]
    moved: tuple[tuple[_Place, Any], ...]
    result: Any
    results: tuple[Any, ...]


class RepeatedCalls:
    """Calls of blocks in a trace; those that equal earlier ones are copied.

    Args:
        model: the model that is traced.
        reads: records the attributes that its code reads.
        loops: counts operators in loops.
        notes: what other modes of the trace have noted of the model, to be compared.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: StateReads,
        loops: Loops,
        notes: Callable[[], tuple[Any, ...]],
    ) -> None:
        self._reads, self._loops, self._notes = reads, loops, notes
        self._blocks = blocks_of(model)
        self._outer = OuterState.of(model, reads.loss_fn, reads.holders)
        self._known: dict[str, list[_Call]] = defaultdict(list)
        self._tried: dict[str, int] = defaultdict(int)
        self._copied: dict[int, Region] = {}
        self.num_copied = 0
        """Calls that were copied."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which calls of blocks are recorded, and copied.

        Raises:
            LeftOpen: an operator outside reads what a copied call has not returned.
        """
        original: Any = _ModuleStackTracer.call_module

        def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
            def run() -> Any:
                return original(tracer, module, forward, args, kwargs)

            block = self._blocks.get(id(attributes(module)))
            if block is not None:
                return self._called(block, tracer, module, (args, kwargs), run)
            is_outermost = not tracer.module_stack
            result = run()
            if is_outermost:  # before torch.export rewrites the graph
                self._check_closed()
            return result

        with mock.patch.object(_ModuleStackTracer, "call_module", call_module):
            yield

    def _check_closed(self) -> None:
        for region in self._copied.values():
            for node in region.left_open():
                raise LeftOpen(f"{node} is read outside of its block")

    def _called(
        self, block: Block, tracer: Any, module: Any, given: Any, run: Callable[[], Any]
    ) -> Any:
        known = self._known[block.group]
        if self._tried[block.group] >= _MOST_KINDS and not known:
            return run()
        try:
            before = self._before(block, given)
            names = tracer.path_of_module(module)
            if tracer.num_calls.get(names, 0):
                raise NotRepeatable(f"{block.path} is called again")
            sources = _sources(before, tracer)
        except NotRepeatable as error:
            logger.debug("a call that is not copied: %s", error)
            self._tried[block.group] += 1
            return run()
        for call in known:
            tensors = self._is_like(call, before)
            if tensors is not None:
                return self._copy(call, before, tensors, tracer, names)
        if self._tried[block.group] >= _MOST_KINDS:
            return run()
        self._tried[block.group] += 1
        start, notes = tracer.graph._root.prev, (self._notes(), self._loops.operators)
        result = run()
        try:
            if notes != (self._notes(), self._loops.operators):
                raise NotRepeatable(f"{block.path} decides by values")
            nodes = tuple(nodes_after(start))
            known.append(self._recorded(before, given, result, nodes, sources, tracer, names))
        except NotRepeatable as error:
            logger.debug("a call that is not copied: %s", error)
        return result

    def _before(self, block: Block, given: Any) -> _Before:
        values = _Values.of(given)
        state = State.of(block, self._outer.holds)
        modes = following_modes()
        storages, same = dict[int, int](), dict[int, int]()
        every = (*values.tensors, *state.each_tensor())
        return _Before(
            block,
            state,
            self._outer.now(),
            values,
            tuple(t._version for t in values.tensors),
            tuple(any(follows(t) for follows in modes) for t in values.tensors),
            tuple(
                (same.setdefault(id(t), i), storages.setdefault(storage_id(t), i))
                for i, t in enumerate(every)
            ),
        )

    def _is_like(self, call: _Call, now: _Before) -> dict[int, torch.Tensor] | None:
        """The tensors in place of those of a call that a call now would equal; None for none."""
        then = call.before
        if (
            not is_equal(then.given.rest, now.given.rest)
            or then.followed != now.followed
            or then.aliases != now.aliases
            or then.around.changes()
        ):
            return None
        mine, theirs = then.given.tensors, now.given.tensors
        for i, followed in enumerate(then.followed):
            is_same = mine[i] is theirs[i] and then.versions[i] == now.versions[i]
            if followed and not is_same:
                return None
        return tensors_like((then.block, then.state), (now.block, now.state), self._reads.has_read)

    def _recorded(
        self,
        before: _Before,
        given: Any,
        result: Any,
        nodes: tuple[Any, ...],
        sources: Mapping[_Place, Any],
        tracer: Any,
        names: str,
    ) -> _Call:
        """The call that has just run, to be copied."""
        after = self._before(before.block, given)
        before.state.check_unchanged(before.block, after.state)
        if (
            list(map(id, before.given.tensors)) != list(map(id, after.given.tensors))
            or before.versions != after.versions
            or not is_equal(before.given.rest, after.given.rest)
            or before.around.changes()
        ):
            raise NotRepeatable(f"{before.block.path} changes what it is given")
        arguments = {id(t): i for i, t in reversed(list(enumerate(before.given.tensors)))}
        inside = set(nodes)
        modes = following_modes()
        taken = {storage_id(t) for t in (*before.given.tensors, *before.state.each_tensor())}
        results: list[Any] = []
        values = _Values.of(result)
        for tensor in values.tensors:
            if id(tensor) in arguments:
                results.append(arguments[id(tensor)])
                continue
            node, storage = node_of(tensor, tracer), storage_id(tensor)
            is_plain = tensor.requires_grad != tensor.is_leaf and _is_contiguous(tensor)
            followed = any(follows(tensor) for follows in modes)
            if node not in inside or storage in taken or not is_plain or followed:
                raise NotRepeatable(f"{before.block.path} returns a view, or what modes follow")
            taken.add(storage)
            results.append(node)
        outputs = [own for own in results if not isinstance(own, int)]
        region = Region.of(nodes, outputs)
        places = {node: place for place, node in reversed(list(sources.items()))}
        other = [node for node in region.outside if node not in places]
        if other:
            raise NotRepeatable(f"{before.block.path} reads {other[0]}, which is not its own")
        moved = tuple(
            (place, node)
            for place, node in _sources(before, tracer).items()
            if node is not sources[place]
        )
        if any(node not in inside for _, node in moved):
            raise NotRepeatable(f"{before.block.path} is given what is not followed")
        needed = tuple((node, places[node]) for node in region.outside)
        return _Call(before, region, names, needed, moved, result, tuple(results))

    def _copy(
        self,
        call: _Call,
        now: _Before,
        tensors: Mapping[int, torch.Tensor],
        tracer: Any,
        names: str,
    ) -> Any:
        """Record a call's operators for another block; returns its result."""

        def tensor_at(place: _Place) -> torch.Tensor:
            is_argument, key = place
            return now.given.tensors[key] if is_argument else tensors[key]

        instead = {node: node_of(tensor_at(place), tracer) for node, place in call.sources}
        made = call.region.copy(tracer.graph, instead, (call.names, names))
        for place, node in call.moved:
            follow(tensor_at(place), made[node], tracer)
        for path, count in list(tracer.num_calls.items()):
            if path == call.names or path.startswith(f"{call.names}."):
                tracer.num_calls[names + path[len(call.names) :]] = count
        pairs = zip(call.before.block.modules, now.block.modules, strict=True)
        self._reads.repeat({one: like for (_, one), (_, like) in pairs})
        self._loops.meet_module(now.block.modules[0][1])
        self._copied[id(call)] = call.region
        self.num_copied += 1
        left = iter(call.results)

        def walk(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                own = next(left)
                if isinstance(own, int):
                    return now.given.tensors[own]
                return tracked_like(item, made[own], tracer)
            if type(item) in (tuple, list):
                return type(item)(map(walk, item))
            if type(item) is dict:
                return {key: walk(inner) for key, inner in item.items()}
            return item

        return walk(call.result)


def _sources(before: _Before, tracer: Any) -> dict[_Place, Any]:
    """The nodes that a call's arguments, and the block's tensors, stand for now."""
    found: dict[_Place, Any] = {}
    for place, tensor in enumerate(before.given.tensors):
        found[True, place] = node_of(tensor, tracer)
    for tensor in before.state.each_tensor():
        if is_followed(tensor, tracer):
            found[False, id(tensor)] = node_of(tensor, tracer)
    return found


def _is_contiguous(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_contiguous()
