"""Cutting of a traced model into segments that hand few values on.

Merak's Algorithms 1 and 2 walk the graph in order and end a subgraph where a node depends on
nothing older than the last node but on common nodes. Put differently: a cut may fall where only one
value lives on, common ones aside. This file says it that way, with one sweep over the lifetimes of
all values, so the time is linear in the graph.

Source: Merak (IEEE TPDS), section 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from itertools import accumulate

from torch import fx

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta, known_masks
from merak.graph.ir.ir import Kind, ModelGraph, Segment, returned_nodes
from merak.graph.ir.mutation import eliminate_dead_code, has_mutable_schema, live_nodes
from merak.graph.ir.operators import (
    DROPOUTS,
    SAME_VALUES,
    family,
    is_embedding,
    is_weight_gemm,
    reads_parameter,
)
from merak.graph.segment.functionalize import functionalize_buffers, release_accumulators
from merak.graph.segment.liveness import (
    Liveness,
    Span,
    analyze_liveness,
    computed_weights,
    is_detached_parameter,
)
from merak.graph.trace.branches.rng_stream import refuse_late_conditions
from merak.graph.trace.traced import Trace

_MAX_GEMMS_PER_BLOCK = 8
"""A block with more weight GEMMs, adapters aside, is searched for values that only pass through."""

_MAX_CARRIED = 6
"""How many values may be set aside at once to find cuts inside one block, and how often."""


def cut_into_segments(trace: Trace, *, outputs: Iterable[str] | None = None) -> ModelGraph:
    """Cut a trace into segments: embedding, attention block, feed-forward block, …, head.

    Args:
        trace: the whole model; its graph is consumed.
        outputs: names of the model outputs to keep; ("loss",) for training. All by default.

    Returns:
        The segments, and the prologue that computes what depends on the batch alone.

    Raises:
        TraceError: an output that the model does not give, or a draw that comes too late.
    """
    outputs_by_name = _keep_outputs(trace, tuple(outputs) if outputs is not None else trace.outputs)
    release_accumulators(trace.graph)
    _detach_where_read(trace.graph)
    _compute_weights_where_read(trace.graph)
    flow = analyze_liveness(trace.graph)
    refuse_late_conditions(flow.main)
    starts = _segment_starts(flow)
    bounds = zip(starts, (*starts[1:], len(flow.main)), strict=True)
    nodes = functionalize_buffers(trace.graph, [list(flow.main[a:b]) for a, b in bounds])
    segment_of = {node: i for i, own in enumerate(nodes) for node in own}
    builder = _Builder(flow, segment_of, outputs_by_name, len(starts) - 1)
    segments = tuple(builder.segment(i, own) for i, own in enumerate(nodes))
    return ModelGraph(
        segments=segments,
        prologue=builder.prologue(segments),
        values=builder.values,
        parameters=trace.parameters,
        tied=trace.tied,
        constants=trace.constants,
        columns=dict(known_masks(tuple(trace.columns.items()), trace.queried, trace.queried)),
        outputs={name: node.name for name, node in outputs_by_name.items()},
        loss=outputs_by_name["loss"].name if "loss" in outputs_by_name else None,
        parameter_writes=trace.parameter_writes,
        reads=trace.reads,
        queried=trace.queried,
        replay=trace.replay,
    )


def _keep_outputs(trace: Trace, names: tuple[str, ...]) -> dict[str, fx.Node]:
    missing = [name for name in names if name not in trace.outputs]
    if missing:
        given = ", ".join(trace.outputs) or "nothing"
        what = "no loss" if "loss" in missing else f"no {missing[0]}"
        raise TraceError(
            f"the model returns {what} for the columns {', '.join(trace.columns)}; it returns "
            f"{given}. Give it labels (a `labels` column) or pass a loss function."
        )
    by_name = dict(zip(trace.outputs, returned_nodes(trace.graph), strict=True))
    trace.graph.output_node().args = (tuple(by_name[name] for name in names),)
    eliminate_dead_code(trace.graph)
    return {name: by_name[name] for name in names}


def _detach_where_read(graph: fx.Graph) -> None:
    """Detach parameters anew for each reader: no segment is then given a weight by another one.

    As of blocks that a model runs several times without gradients, whose weights are detached once.
    """
    for source in filter(is_detached_parameter, list(graph.nodes)):
        readers = list(source.users)
        if any(n.op == "output" or has_mutable_schema(n) for n in readers):
            continue
        for reader in readers:
            with graph.inserting_before(reader):
                own = graph.node_copy(source, lambda n: n)
            own.meta["module"] = reader.meta["module"]
            reader.replace_input_with(source, own)
        graph.erase_node(source)


def _compute_weights_where_read(graph: fx.Graph) -> None:
    """Move what is computed of parameters alone, such as a scaled weight, to its first reader."""
    for node in sorted(computed_weights(graph), reverse=True):
        if node.users:
            min(node.users).prepend(node)


def _segment_starts(flow: Liveness) -> list[int]:
    """Positions in `flow.main` where segments begin.

    A segment begins with a block that does GEMMs, or with embeddings after such a block (a
    decoder's), or with a second block that has weights of another use; lighter blocks (norms,
    dropout) go with what they follow.
    """
    embeddings = {i for i, node in enumerate(flow.main) if is_embedding(node)}
    gemms = (0, *accumulate(is_weight_gemm(node) for node in flow.main))
    others = (0, *accumulate(_uses_weights(node) for node in flow.main))
    adapters = (0, *accumulate(2 * _is_low_rank(node) for node in flow.main))
    starts = [0]
    gemms_so_far = others_so_far = 0
    for block in _blocks(flow, gemms, adapters):
        num_gemms, num_others = (n[block.stop] - n[block.start] for n in (gemms, others))
        has_embedding = any(i in embeddings for i in range(block.start, block.stop))
        is_another = bool(num_others and others_so_far)
        begins = num_gemms > 0 or is_another or (has_embedding and gemms_so_far > 0)
        if begins and block.start > 0:
            starts.append(block.start)
            gemms_so_far = others_so_far = 0
        gemms_so_far += num_gemms
        others_so_far += num_others
    return starts


def _uses_weights(node: fx.Node) -> bool:
    """Whether an operator uses a matrix of weights otherwise: elementwise, or in opaque code."""
    if family(node.target) not in ("mul", "opaque_call"):
        return False
    parameters = [n for n in node.all_input_nodes if n.meta.get("kind") is Kind.PARAMETER]
    return any(sum(size > 1 for size in n.meta["tensor"].shape) > 1 for n in parameters)


def _is_low_rank(node: fx.Node) -> bool:
    """Whether a weight GEMM takes the result of another as it is, as the second one of LoRA does.

    Such a pair is one product of low rank, beside the layer that it adapts.
    """
    if not is_weight_gemm(node):
        return False
    before = node.all_input_nodes[0]
    while family(before.target) in SAME_VALUES | DROPOUTS and len(before.all_input_nodes) == 1:
        before = before.all_input_nodes[0]
    return is_weight_gemm(before)


def _blocks(flow: Liveness, gemms: Sequence[int], adapters: Sequence[int]) -> list[Span]:
    """Spans between cuts; large blocks are cut where few values live on.

    These are long-lived ones that are set aside, or those of two streams side by side, where fewer
    values then cross the cuts.

    Args:
        flow: the graph's values.
        gemms: how many weight GEMMs come before each position.
        adapters: how many of these are adapters'.
    """
    layers = [every - own for every, own in zip(gemms, adapters, strict=True)]
    blocks = []
    for part in flow.cut(Span(0, len(flow.main), ()), frozenset()):
        found = _split(flow, part, gemms, layers)
        both = flow.cut(part, frozenset(), most=2)
        sizes = [layers[own.stop] - layers[own.start] for own in (part, *both)]
        if sizes[0] > 2 * _MAX_GEMMS_PER_BLOCK >= max(sizes[1:]):
            found = min(found, both, key=_num_passed_on)
        blocks += found
    return blocks


def _num_passed_on(spans: Sequence[Span]) -> int:
    """Largest number of values that are given from span to span, but for those that most read."""
    crossing = Counter(value for span in spans[1:] for value in span.incoming)
    short = {value for value, count in crossing.items() if 2 * count < len(spans) - 1}
    return max((len(short.intersection(span.incoming)) for span in spans[1:]), default=len(spans))


def _split(flow: Liveness, block: Span, gemms: Sequence[int], layers: Sequence[int]) -> list[Span]:
    """Spans of a block, with long-lived values set aside where it is large."""
    blocks = []
    todo = [(block, frozenset[int](), _MAX_CARRIED + 1)]
    while todo:
        span, carried, tries = todo.pop()
        parts = flow.cut(span, carried)
        if len(parts) == 1 and tries <= _MAX_CARRIED:
            blocks.append(span)
            continue
        for part in reversed(parts):
            is_large = layers[part.stop] - layers[part.start] > _MAX_GEMMS_PER_BLOCK
            aside = _set_aside(flow, part, carried, gemms) if is_large and tries else None
            todo.append((part, carried, 0) if aside is None else (part, aside, tries - 1))
    return blocks


def _set_aside(
    flow: Liveness, block: Span, carried: frozenset[int], gemms: Sequence[int]
) -> frozenset[int] | None:
    """Longest-lived values of a block whose setting aside splits it, with those in `carried`."""
    inside = (i for i in (*block.incoming, *range(block.start, block.stop)) if i not in carried)
    trial = carried
    for value in nlargest(
        _MAX_CARRIED, inside, key=lambda i: min(flow.last_use[i], block.stop) - max(i, block.start)
    ):
        trial = trial | {value}
        parts = flow.cut(block, trial)
        if sum(gemms[part.stop] > gemms[part.start] for part in parts) > 1:
            return trial
    return None


class _Builder:
    """Builder of segments: copies nodes of the full graph into graphs of their own."""

    def __init__(
        self,
        flow: Liveness,
        segment_of: dict[fx.Node, int],
        outputs_by_name: dict[str, fx.Node],
        last: int,
    ) -> None:
        self.flow = flow
        self.segment_of = segment_of
        self.returned = dict.fromkeys(outputs_by_name.values())
        self.last = last
        self.values: dict[str, TensorMeta] = {}

    def segment(self, index: int, nodes: Sequence[fx.Node]) -> Segment:
        outputs = [n for n in nodes if self._leaves(n, index)]
        if index == self.last:
            # Outputs that no segment makes, such as a column itself, leave with the last one.
            outputs += [n for n in self.returned if n not in self.segment_of]
        return self._copy(index, _name(nodes), nodes, outputs)

    def prologue(self, segments: Sequence[Segment]) -> Segment:
        """Segment of the batch-only nodes that some segment reads."""
        read = {name for segment in segments for name in segment.batch_only}
        batch_only = self.flow.batch_only
        outputs = [n for n in batch_only if n.name in read]
        return self._copy(-1, "prologue", batch_only, outputs)

    def _leaves(self, node: fx.Node, index: int) -> bool:
        later = any(self.segment_of.get(user, index) != index for user in node.users)
        return later or node in self.returned

    def _copy(
        self, index: int, name: str, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> Segment:
        graph = sub_graph(nodes, outputs, self._kind, _label)
        values = {n.name: n.meta["tensor"] for n in outputs}
        for node in graph.find_nodes(op="placeholder"):
            if node.meta["kind"] in (Kind.VALUE, Kind.BATCH_ONLY):
                values[node.meta["name"]] = node.meta["tensor"]
        # Others are numbers, never sent.
        self.values |= {n: meta for n, meta in values.items() if isinstance(meta, TensorMeta)}
        return Segment.of(index, name, graph, (n.name for n in outputs))

    def _kind(self, node: fx.Node) -> Kind:
        return Kind.VALUE if node in self.segment_of else Kind.BATCH_ONLY


def _label(node: fx.Node) -> str:
    return str(node.meta["name"]) if node.op == "placeholder" else node.name


def sub_graph(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    kind_of: Callable[[fx.Node], Kind],
    name_of: Callable[[fx.Node], str],
) -> fx.Graph:
    """Graph of some operators of another one, with placeholders for what they read of the others.

    Args:
        nodes: the operators, in order.
        outputs: the nodes that it returns.
        kind_of: kind of the placeholder for an operator.
        name_of: name of the placeholder for a node.
    """
    inside = set(nodes)
    read = (*(a for n in nodes for a in n.all_input_nodes), *outputs)
    external = dict.fromkeys(node for node in read if node not in inside)
    kinds = {n: n.meta["kind"] if n.op == "placeholder" else kind_of(n) for n in external}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in sorted(external, key=lambda n: list(Kind).index(kinds[n])):
        env[node] = graph.placeholder(node.name)
        env[node].meta = {**node.meta, "kind": kinds[node], "name": name_of(node)}
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] for n in outputs))
    return graph


def _name(nodes: Sequence[fx.Node]) -> str:
    """Module path that holds all of a segment's GEMMs, or else all its parameters or operators.

    Where they share none, the paths of the first and the last; those of the model's own forward
    count by the names of the parameters that they read.
    """
    tests: tuple[Callable[[fx.Node], bool], ...] = (is_weight_gemm, reads_parameter, bool)
    for test in tests:
        chosen = [node for node in nodes if test(node)]
        paths = [node.meta.get("module", "").split(".") for node in chosen]
        shared = [p[0] for p in zip(*paths, strict=False) if len(set(p)) == 1]
        if any(shared):
            return ".".join(shared)
        ends = [name for name in map(_place, chosen) if name]
        if ends:
            return " … ".join(dict.fromkeys((ends[0], ends[-1])))
    return "forward"


def _place(node: fx.Node) -> str:
    """Module path of an operator, or the first parameter that the model's own forward reads."""
    read = (s.meta["name"] for s in _sources(node) if s.meta["kind"] is Kind.PARAMETER)
    return node.meta.get("module", "") or next(read, "")


def _sources(node: fx.Node) -> list[fx.Node]:
    """Placeholders that an operator reads, directly or through one view."""
    read = [s for own in node.all_input_nodes for s in (own, *own.all_input_nodes)]
    return [source for source in read if source.op == "placeholder"]


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
    """Copy of a segment's graph with its meta, and the nodes it returns."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    result = copy.graph_copy(graph, env)
    assert isinstance(result, tuple)
    for old, new in env.items():
        new.meta = dict(old.meta)
    copy.output(result)
    return copy, result


def slice_outputs(segment: Segment, names: Iterable[str]) -> Segment:
    """Slice of a segment that computes some of its outputs (a rank's own prologue)."""
    wanted = set(names)
    results = segment.graph.output_node().args[0]
    assert isinstance(results, tuple)
    chosen = [(n, v) for n, v in zip(segment.outputs, results, strict=True) if n in wanted]
    live = live_nodes(segment.graph, [value for _, value in chosen])
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in segment.graph.nodes:
        if node in live:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[value] for _, value in chosen))
    return Segment.of(segment.index, segment.name, graph, (name for name, _ in chosen))
