"""Branches on random conditions, such as layer drop: both branches in one graph.

The model is traced with several answers to its conditions. Where one skips something, the trace
must be the one with everything in, with what was skipped replaced by a value from before it;
`graph_diff` checks that operator by operator. In the graph there is then a `where` that takes
the one or the other, and a draw of the microbatch's own that decides (`rng_stream`).

The answers are a covering array: of every two conditions all four combinations are traced, so that
a layer that depends on whether another one ran is found out.

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
"""The model's trace with these answers to its choices."""


def merge_branches(first: Trace, retrace: Retrace) -> Trace:
    """One trace that makes a model's choices by chance while it runs.

    Args:
        first: the trace with every answer False; its graph is consumed.
        retrace: traces with other answers.

    Raises:
        TraceError: a choice does more than to leave operators out.
    """
    num = first.num_conditions
    known = {(False,) * num: first}

    def traced(answers: tuple[bool, ...]) -> Trace:
        if answers not in known:
            known[answers] = _same_choices(retrace(answers), first)
        return known[answers]

    leaving = _leaving_out(first, traced((True,) * num))
    run = traced(tuple(not answer for answer in leaving))
    others = [
        (traced(tuple(a == (i in dropped) for i, a in enumerate(leaving))), dropped)
        for dropped in covering(num)
    ]
    write_branches(run, diff_graphs(run, others), leaving)
    sources = frozenset[str]().union(*(trace.sources for trace in known.values()))
    return replace(run, sources=sources, num_conditions=0)


def covering(num: int) -> Iterator[frozenset[int]]:
    """Sets of things to drop so that of every two things each alone, and both, are dropped once.

    Source: Kleitman and Spencer, Families of k-independent sets (1973).
    """
    rows = 1  # beside the one in which nothing is dropped
    while comb(rows, rows // 2 + 1) < num:
        rows += 1
    # Sets of one size, more than half of the rows: every two of them differ and overlap.
    columns = list(islice(combinations(range(rows), rows // 2 + 1), num))
    for row in range(rows):
        dropped = frozenset(i for i, column in enumerate(columns) if row in column)
        if dropped:
            yield dropped


def _same_choices(trace: Trace, first: Trace) -> Trace:
    if trace.num_conditions != first.num_conditions:
        where = conditions_of(first)[0].meta["source"] if first.num_conditions else ""
        raise TraceError(
            f"the choices that the model makes by random draws at {where} change how many more it "
            "makes, so that they cannot be traced one by one; draw once for each layer, whether "
            "it runs or not, or switch the feature off in the model's config."
        )
    return trace


def _leaving_out(no: Trace, yes: Trace) -> tuple[bool, ...]:
    """Per choice, with which answer less runs; choices of one line in the code have one answer."""
    sizes: list[Counter[str]] = []
    for trace in (no, yes):
        regions = regions_of(trace)
        sources = [choice.meta["source"] for choice in conditions_of(trace)]
        operators = [n for n in trace.graph.nodes if n.op == "call_function"]
        sizes.append(Counter(sources[regions[n] - 1] for n in operators if regions[n]))
    return tuple(sizes[1][s] < sizes[0][s] for s in map(_line, conditions_of(no)))


def _line(choice: fx.Node) -> str:
    return str(choice.meta["source"])
