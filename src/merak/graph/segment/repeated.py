"""Graphs of a model at many microbatch sizes, with its repeated blocks traced once.

A model of hundreds of equal blocks is traced whole at one microbatch. At others a shorter model of
its first blocks is, and every segment of the whole one is a copy of the shorter one's that equals
it at the first microbatch. So the differences between blocks are those that a trace has found.
Where no shorter model has all of them, the whole one is traced. Such graphs are for planning:
layers that are equal at one microbatch are taken to be equal at every other.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, ModelGraph, Segment
from merak.graph.ir.structure import structural_key
from merak.graph.segment.build import GraphSource, build_graph

logger = logging.getLogger(__name__)

Columns = Mapping[str, TensorMeta]

_FEWEST = 2
"""Blocks of a list that are traced at the least, so that one follows another."""

_WORTH = 0.5
"""A shorter model that has a larger fraction of the segments saves too little."""


_INNER = "inner_"
"""Begin of the names of values inside a prologue."""


_NUMBER = re.compile(r"\.\d+\.")
"""Number of a block, in the name of a parameter."""


class NotRepeated(Exception):
    """No shorter model has all the segments; the message says why."""


class RepeatedGraphs:
    """Graphs of a model in training, by microbatch, for planning.

    Args:
        source: the model.
        columns: the columns of a microbatch of so many samples.
    """

    def __init__(self, source: GraphSource, columns: Callable[[int], Columns]) -> None:
        self._source = source
        self._columns = columns
        self._shorter: _Shorter | None = None
        self._is_hopeless = not any(
            isinstance(module, nn.ModuleList) and len(module) > _FEWEST / _WORTH
            for module in source.model.modules()
        )

    @property
    def repeats(self) -> bool:
        """Whether a shorter model has been found that has all the segments."""
        return self._shorter is not None

    def __call__(self, microbatch: int) -> ModelGraph:
        """Graph for a microbatch of so many samples.

        Raises:
            TraceError: the model cannot be traced at this shape.
        """
        if self._shorter is None and not self._is_hopeless:
            # With one sample, sizes that follow the batch are like those that are always 1.
            whole = self._trace(max(microbatch, 2))
            try:
                self._shorter = _Shorter(self._source, whole)
            except Exception as error:  # the model's code, without some of its blocks
                self._is_hopeless = True
                logger.debug("no shorter model: %s", error)
            if microbatch > 1:
                return whole
        if self._shorter is not None:
            try:
                return self._shorter.at(self._columns(microbatch))
            except Exception as error:
                logger.debug("no shorter trace for microbatches of %d: %s", microbatch, error)
        return self._trace(microbatch)

    def _trace(self, microbatch: int) -> ModelGraph:
        return build_graph(
            self._source, self._columns(microbatch), training=True, copies_blocks=True
        )


class _Shorter:
    """A model without most of its repeated blocks, whose segments are those of the whole model.

    Args:
        source: the model.
        whole: its graph at some shape.

    Raises:
        NotRepeated: there is no such model.
    """

    def __init__(self, source: GraphSource, whole: ModelGraph) -> None:
        opaque = source.opaque
        if opaque.modules or opaque.functions or whole.parameter_writes:
            raise NotRepeated("it has opaque modules, or writes into parameters")
        self._source, self._whole = source, whole
        keys = [_key(segment) for segment in whole.segments]
        self._kept = _blocks_to_keep(source.model, whole, keys)
        self._base = self._trace(whole.columns)
        if len(self._base.segments) > _WORTH * len(whole.segments):
            raise NotRepeated("its blocks differ")
        own = [_key(segment) for segment in self._base.segments]
        places = {key: index for index, key in reversed(list(enumerate(own)))}
        missing = [s.name for s, key in zip(whole.segments, keys, strict=True) if key not in places]
        if missing:
            raise NotRepeated(f"the shorter model has nothing like {missing[0]}")
        self._like = [places[key] for key in keys]

    def at(self, columns: Columns) -> ModelGraph:
        """Graph of the whole model for a batch of some shape.

        Raises:
            NotRepeated: the shorter model has another structure at this shape.
        """
        other, base, whole = self._trace(columns), self._base, self._whole
        if (
            not _same_constants(base, other)
            or not _same_constants(other, whole)
            or len(base.segments) != len(other.segments)
        ):
            raise NotRepeated("it has other segments or constants at this shape")
        for ours, theirs in zip(base.segments, other.segments, strict=True):
            _check_interface(ours, theirs)
        values: dict[str, TensorMeta] = {}
        likes = [other.segments[like] for like in self._like]
        prologue = _prologue(other.prologue, likes, whole, values)
        segments = tuple(
            _named(like, segment, values)
            for like, segment in zip(likes, whole.segments, strict=True)
        )
        _check_values(segments, values)
        return replace(
            whole, segments=segments, prologue=prologue, values=values, columns=dict(columns)
        )

    def _trace(self, columns: Columns) -> ModelGraph:
        source = self._source
        with _shortened(source.model, self._kept):
            shorter = GraphSource(
                source.model,
                source.loss_fn,
                source.loss_columns,
                source.fixed,
                source.device,
                None,
                source.autocast,
                example=source.example,
            )
            shorter.opaque, shorter.warned = copy.deepcopy(source.opaque), source.warned
            return build_graph(shorter, columns, training=True, copies_blocks=True)


@contextmanager
def _shortened(model: nn.Module, kept: Mapping[str, int]) -> Iterator[None]:
    """Context in which lists of modules have their first ones alone.

    Args:
        model: the model.
        kept: how many, by the path of the list.
    """
    lists = [(model.get_submodule(path), count) for path, count in kept.items()]
    whole = [dict(blocks._modules) for blocks, _ in lists]
    try:
        for (blocks, count), members in zip(lists, whole, strict=True):
            for name in list(members)[count:]:
                del blocks._modules[name]
        yield
    finally:
        for (blocks, _), members in zip(lists, whole, strict=True):
            blocks._modules.clear()
            blocks._modules.update(members)


def _blocks_to_keep(model: nn.Module, whole: ModelGraph, keys: list[Any]) -> dict[str, int]:
    """By path of a list of blocks, how many of its first ones have every kind of segment.

    Raises:
        NotRepeated: no list has more of them.
    """
    first: dict[Any, Segment] = {}
    for key, segment in zip(keys, whole.segments, strict=True):
        first.setdefault(key, segment)
    kept = {}
    for path, blocks in model.named_modules():
        if not isinstance(blocks, nn.ModuleList) or len(blocks) <= _FEWEST:
            continue
        found = [own for segment in first.values() if (own := _blocks_of(segment, path))]
        # What comes after the last block is after another one in the shorter model.
        within = [max(own) for own in found if min(own) < len(blocks) - _FEWEST]
        count = max(_FEWEST, 2 + max(within, default=-1))  # one more, which the last is followed by
        if within and count < len(blocks):
            kept[path] = count
    if not kept:
        raise NotRepeated("it has no repeated blocks")
    return kept


def _key(segment: Segment) -> Any:
    """Key of segments that are equal, and run the same parts of blocks of one list."""
    names = (_NUMBER.sub(".#.", f"{name}.", count=1) for name in segment.parameters)
    return tuple(names), structural_key(segment.graph)


def _blocks_of(segment: Segment, path: str) -> set[int]:
    """Numbers of the blocks of a list that a segment runs."""
    prefix = f"{path}."
    nodes = segment.graph.find_nodes
    paths = {str(n.meta.get("module", "")) for n in segment.graph.nodes if n.op != "placeholder"}
    paths |= {n.meta["name"] for n in nodes(op="placeholder") if n.meta["kind"] is Kind.PARAMETER}
    numbers = {p.removeprefix(prefix).partition(".")[0] for p in paths if p.startswith(prefix)}
    return {int(number) for number in numbers if number.isdecimal()}


def _is_same(one: Segment, other: Segment) -> bool:
    """Whether two graphs of a segment run the same operators, at whatever sizes."""
    keys = {structural_key(segment.graph, sizes=False) for segment in (one, other)}
    return len(keys) == 1 and one.outputs == other.outputs


def _check_interface(one: Segment, other: Segment) -> None:
    """Check that a segment reads and yields the same at two shapes.

    Raises:
        NotRepeated: it may not.
    """
    ours, theirs = (
        (s.parameters, s.buffers, s.columns, len(s.inputs), len(s.batch_only), len(s.outputs))
        for s in (one, other)
    )
    # Values of other graphs have other names: with several of a kind, only the order tells them.
    is_plain = max(len(one.inputs), len(one.batch_only), len(one.outputs)) <= 1
    if ours != theirs or not (is_plain or _is_same(one, other)):
        raise NotRepeated(f"{one.name} is another segment at this shape")


def _named(like: Segment, segment: Segment, values: dict[str, TensorMeta]) -> Segment:
    """A segment of the whole model with the graph of another.

    Args:
        like: the segment with the graph.
        segment: the one whose names it gets.
        values: gains what it yields.
    """
    old = list(segment.graph.nodes)
    names = [node.name for node in old] if len(old) == len(like.graph.nodes) else None
    read = labels(segment.graph)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(like.graph.nodes):
        name = node.name if names is None else names[place]
        env[node] = new = _copied(graph, node, env, name)
        if node.op == "placeholder":
            new.target = read[place] if names is None else old[place].target
            new.meta["name"] = read[place]
        elif names is not None and "module" in old[place].meta:
            new.meta["module"] = old[place].meta["module"]
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    assert isinstance(results, tuple)
    for label, result in zip(segment.outputs, results, strict=True):
        if isinstance(result.meta["tensor"], TensorMeta):
            values[label] = result.meta["tensor"]
    return replace(segment, graph=graph)


def labels(graph: fx.Graph) -> list[str]:
    """Names of what a segment reads, in the order of its graph."""
    return [node.meta["name"] for node in graph.find_nodes(op="placeholder")]


def renamed(graph: fx.Graph, names: Mapping[str, str]) -> fx.Graph:
    """Copy of a segment's graph that reads other values and parameters.

    Args:
        graph: of a segment; left as it is.
        names: new names of what it reads, by the old ones; others stay.
    """
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new = _copied(copy, node, env, node.name)
        if node.op == "placeholder":
            name = node.meta["name"]
            new.target, new.meta["name"] = node.target, names.get(name, name)
    return copy


def _prologue(
    shorter: Segment,
    likes: Sequence[Segment],
    whole: ModelGraph,
    values: dict[str, TensorMeta],
) -> Segment:
    """Prologue of the whole model: batch-only values that equal segments read are alike.

    Args:
        shorter: prologue of the shorter model.
        likes: for each segment, the one with its graph, which reads values of `shorter`.
        whole: the model, at another shape.
        values: gains what the prologue yields.

    Raises:
        NotRepeated: a value is like two different ones.
    """
    names: dict[str, str] = {}
    for like, segment in zip(likes, whole.segments, strict=True):
        for name, other in zip(segment.batch_only, like.batch_only, strict=True):
            if names.setdefault(name, other) != other:
                raise NotRepeated(f"{name} is like {names[name]} and {other}")
    # The first to be like a value is it; others repeat its last operator.
    mains = {other: name for name, other in reversed(names.items())}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in shorter.graph.nodes:
        if node.op == "output":
            continue
        env[node] = _copied(graph, node, env, mains.get(node.name, f"{_INNER}{node.name}"))
        if node.op == "placeholder":
            env[node].target = node.target
    made = {new.name: (old, new) for old, new in env.items()}
    results = []
    for name in whole.prologue.outputs:
        old, new = made[mains[names[name]]]
        result = new if new.name == name else _copied(graph, old, env, name)
        if result.name != name:
            raise NotRepeated(f"{name} is the name of another value")
        values[name] = result.meta["tensor"]
        results.append(result)
    graph.output(tuple(results))
    return Segment.of(-1, whole.prologue.name, graph, whole.prologue.outputs)


def _copied(graph: fx.Graph, node: fx.Node, env: Mapping[fx.Node, fx.Node], name: str) -> fx.Node:
    args: Any = fx.map_arg(node.args, lambda n: env[n])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: env[n])
    new = graph.create_node(node.op, node.target, args, kwargs, name)
    new.meta = dict(node.meta)
    return new


def _check_values(segments: tuple[Segment, ...], values: Mapping[str, TensorMeta]) -> None:
    """Check that segments read what others yield.

    Raises:
        NotRepeated: one does not.
    """
    for segment in segments:
        for node in segment.graph.find_nodes(op="placeholder"):
            meta = node.meta["tensor"]
            if node.meta["kind"] not in (Kind.VALUE, Kind.BATCH_ONLY):
                continue
            if isinstance(meta, TensorMeta) and values.get(node.meta["name"]) != meta:
                raise NotRepeated(f"{segment.name} reads {meta} that no segment yields")


def _same_constants(one: ModelGraph, other: ModelGraph) -> bool:
    """Whether another graph has the constants of one."""
    return all(
        name in other.constants and torch.equal(value, other.constants[name])
        for name, value in one.constants.items()
    )
