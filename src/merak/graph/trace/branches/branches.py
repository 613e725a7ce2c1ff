"""Branches on random conditions, such as layer drop: both branches in one graph.

The model is traced with several answers to its conditions. A trace that skips a layer must equal
the full trace, with the layer's result replaced by a value from before it; `graph_diff` checks that
operator by operator. The merged graph has a `where` that selects one of the two values by a random
boolean, drawn for each microbatch (`rng_stream`).

The answers are a covering array: of every two conditions all four combinations are traced, to find
layers that depend on each other's conditions.

Source: arXiv:1909.11556 (LayerDrop); arXiv:2010.13369 (progressive layer dropping), section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, islice
from math import comb

from torch import fx

from merak.core.errors import TraceError
from merak.graph.trace.branches.graph_diff import conditions_of, diff_graphs, regions_of
from merak.graph.trace.branches.merge import write_branches
from merak.graph.trace.traced import Trace

Retrace = Callable[[tuple[bool, ...]], Trace]
"""Traces the model with these answers to its conditions."""


def merge_branches(first: Trace, retrace: Retrace) -> Trace:
    """Merge the branches of a model's random conditions into one trace.

    Args:
        first: the trace with every answer False; its graph is consumed.
        retrace: traces with other answers.

    Raises:
        TraceError: a condition does more than skip operators.
    """
    num = first.num_conditions
    known = {(False,) * num: first}

    def traced(answers: tuple[bool, ...]) -> Trace:
        if answers not in known:
            known[answers] = _same_conditions(retrace(answers), first)
        return known[answers]

    leaving = _leaving_out(first, traced((True,) * num))
    run = traced(tuple(not answer for answer in leaving))
    others = [
        (traced(tuple(a == (i in dropped) for i, a in enumerate(leaving))), dropped)
        for dropped in covering_array(num)
    ]
    write_branches(run, diff_graphs(run, others), leaving)
    sources = frozenset[str]().union(*(trace.sources for trace in known.values()))
    return replace(run, sources=sources, num_conditions=0)


def covering_array(num: int) -> Iterator[frozenset[int]]:
    """Sets of conditions, so that of every two each alone, and both, are in some set.

    Source: Kleitman and Spencer, Families of k-independent sets (1973).
    """
    rows = 1  # beside the row in which nothing is skipped
    while comb(rows, rows // 2 + 1) < num:
        rows += 1
    # Sets of one size, more than half of the rows: every two of them differ and overlap.
    columns = list(islice(combinations(range(rows), rows // 2 + 1), num))
    for row in range(rows):
        dropped = frozenset(i for i, column in enumerate(columns) if row in column)
        if dropped:
            yield dropped


def _same_conditions(trace: Trace, first: Trace) -> Trace:
    if trace.num_conditions != first.num_conditions:
        where = conditions_of(first)[0].meta["source"] if first.num_conditions else ""
        raise TraceError(
            f"the random conditions that the model evaluates at {where} change how many more it "
            "evaluates, so that they cannot be traced one by one; draw once for each layer, "
            "whether it runs or not, or switch the feature off in the model's config."
        )
    return trace


def _leaving_out(no: Trace, yes: Trace) -> tuple[bool, ...]:
    """Per condition, the answer with which less runs; conditions of one source line share it."""
    sizes: list[Counter[str]] = []
    for trace in (no, yes):
        regions = regions_of(trace)
        sources = [node.meta["source"] for node in conditions_of(trace)]
        operators = [n for n in trace.graph.nodes if n.op == "call_function"]
        sizes.append(Counter(sources[regions[n] - 1] for n in operators if regions[n]))
    return tuple(sizes[1][s] < sizes[0][s] for s in map(_line, conditions_of(no)))


def _line(condition: fx.Node) -> str:
    return str(condition.meta["source"])
