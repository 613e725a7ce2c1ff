"""Calls of a model behind its first: whether what one leaves in Python state changes the next.

A trace records one call, and a graph runs it for ever. Where a call leaves something in Python
state, the model is called three times in one trace, each time with a batch of its own, and the
operators of the calls are compared. A table that the first call makes and later ones read is made
by the same operators; what depends on the batch of another call, or on other numbers, is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from merak.core.errors import TraceError
from merak.core.rank0 import warn_on_rank0
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind, returned_nodes
from merak.graph.ir.mutation import find_mutations
from merak.graph.ir.operators import draws
from merak.graph.trace.calls.exported import Exported, lift
from merak.graph.trace.calls.host_reads import READ
from merak.graph.trace.calls.runner import BEGINS, ENDS, plain_name, split_call
from merak.graph.trace.calls.value_keys import KnownValues, ValueKeys, tensor_key
from merak.graph.trace.explain import UntraceableError
from merak.graph.trace.normalize import Rewriting
from merak.graph.trace.passes import PLAIN_PASSES
from merak.graph.trace.state.left import LeftState
from merak.graph.trace.verify import is_fake_or_meta

logger = logging.getLogger(__name__)

Columns = Mapping[str, TensorMeta]

NUM_CALLS = 3
"""Calls that are compared: the first, one that finds what it has left, and one behind that."""

_MOST_NAMED = 3
_ADVICE = (
    "keep it in a tensor of register_buffer, written in place (copy_, add_), choose by it with "
    "torch.where, or let a callback change it between steps"
)


@dataclass(frozen=True, slots=True)
class FurtherCalls:
    """Comparison of the calls of a model with its first.

    Args:
        left: per call, what it has left.
        differs: per call, whether it computes something else than the first.
    """

    left: tuple[tuple[LeftState, ...], ...]
    differs: tuple[bool, ...]


def refuse_left(every: Sequence[LeftState]) -> None:
    """Refuse what a call leaves for all that comes after it, and no step could.

    Args:
        every: what the first call has left.

    Raises:
        TraceError: parameters that it has made, or a setting of torch, naming the line.
    """
    for one in sorted(every, key=lambda one: not one.line):  # settings may have several names
        if one.has_weights:
            raise TraceError(
                f"forward makes {one.label}{one.where}, whose parameters training does not begin "
                "with; make it in __init__, or run one forward before training."
            )
        if one.is_setting:
            raise TraceError(
                f"forward sets {one.label}{one.where}, and leaves it so for all that runs after "
                "it; set it before training."
            )


def check_further_calls(left: Sequence[LeftState], export: Callable[..., Exported]) -> bool:
    """Check that calls of a model behind its first compute the same, whatever one leaves.

    Args:
        left: what the first has left.
        export: traces `num_calls` calls, with `counts` of counters before them.

    Returns:
        Whether anything is warned of.

    Raises:
        TraceError: they do not, or fail.
    """
    try:
        traced = export(num_calls=NUM_CALLS)
        thresholds = traced.thresholds
        found = compare_calls(traced)
        refuse_further_calls(found)
        counts = [{label: value} for label, values in thresholds.items() for value in values]
        if counts:
            late = compare_calls(export(num_calls=1 + len(counts), counts=[{}, *counts]))
            _refuse_late_calls(late, counts)
    except _Refusal as error:
        raise TraceError(str(error)) from None
    except TraceError as error:
        names = ", ".join(one.label for one in left if one.may_be_read)
        if isinstance(error, UntraceableError):
            raise TraceError(
                f"forward leaves values in {names}, and its next call cannot run as the first has, "
                f"which a trace would repeat for ever: {error}"
            ) from None
        warn_on_rank0(
            logger,
            "forward leaves values in %s, and whether its next call computes with them cannot be "
            "told (%s).",
            names,
            error,
        )
        return True
    return warn_of_left(found.left[-1])


class _Refusal(TraceError):
    """A call computes something else than the first."""


def compare_calls(exported: Exported) -> FurtherCalls:
    """Compare the calls of a model in one trace.

    Args:
        exported: a trace of several calls; its graph is consumed.
    """
    rewriting, outputs = _comparable(exported)
    found = [_described(i, outputs, rewriting) for i in range(len(exported.left))]
    differs = [not is_as(one, found[0]) for one in found]
    if any(differs):
        own = _carried(len(found), outputs, rewriting)
        differs = [
            one and not is_as(other, own[0]) for one, other in zip(differs, own, strict=True)
        ]
    return FurtherCalls(exported.left, tuple(differs))


def is_as(described: Mapping[str, str], first: Mapping[str, str]) -> bool:
    """Whether a call computes what the first does, of which it may read less on the host.

    Args:
        described: keys of its results, by name.
        first: those of the first.
    """

    def split(keys: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
        plain = {name: key for name, key in keys.items() if not name.startswith(READ)}
        return plain, {key for name, key in keys.items() if name.startswith(READ)}

    (own, reads), (known, all_reads) = split(described), split(first)
    return own == known and reads <= all_reads


def _carried(
    num_calls: int,
    outputs: Mapping[tuple[int, str], fx.Node],
    rewriting: Rewriting,
) -> list[dict[str, str]]:
    """Keys of calls that find in buffers what the one before has made there of constants alone."""
    writers = find_mutations(rewriting.graph).writers.items()
    written = {kept for kept, nodes in writers if any(map(_writes_values, nodes))}
    fixed = {key for key, node in outputs.items() if _is_fixed(key[1], node, written)}
    first = _described(0, outputs, rewriting, before=[])
    carried, left = [first], [{name: key for name, key in first.items() if (0, name) in fixed}]
    for number in range(1, num_calls):
        own = _described(number, outputs, rewriting, before=left)
        kept = {n: key for n, key in left[-1].items() if (number, n) not in outputs}
        left.append(kept | {n: k for n, k in own.items() if (number, n) in fixed})
        carried.append(own)
    return carried


def described_call(exported: Exported) -> dict[str, str]:
    """Keys of a traced call's results and buffers, by name: equal keys mean equal graphs.

    Args:
        exported: a trace of one call; its graph is consumed.
    """
    rewriting, outputs = _comparable(exported)
    return _described(0, outputs, rewriting)


def _comparable(exported: Exported) -> tuple[Rewriting, dict[tuple[int, str], fx.Node]]:
    """A graph whose values can be compared, and its outputs by call and name."""
    rewriting = Rewriting(exported.graph, lift(exported), exported.sizes)
    for run in PLAIN_PASSES:
        run(rewriting)
    names = map(split_call, exported.outputs)
    return rewriting, dict(zip(names, returned_nodes(exported.graph), strict=False))


def reads_other_shape(
    export: Callable[[Sequence[Columns]], Exported],
    columns: Columns,
    earlier: Columns,
    buffers: Mapping[str, torch.Tensor],
) -> str | None:
    """Reads of state by which a batch of one shape changes what one of another shape computes.

    Each shape has a graph of its own, which begins with what the model had before training. A
    table that grows with the longest batch may do so as long as its first rows stay as they are.

    Args:
        export: traces calls with batches of these columns.
        columns: of a batch.
        earlier: of a batch of another shape.
        buffers: of the model, by name.

    Returns:
        The places, with their lines where these are known; None where a batch computes the same.

    Raises:
        TraceError: that cannot be told.
    """
    values, absent, written = KnownValues(), set[str](), set[str]()

    def calls(*batches: Columns) -> tuple[Exported, list[dict[str, str]]]:
        exported = export(batches)
        rewriting, outputs = _comparable(exported)
        written.update(name.removeprefix(BEGINS) for _, name in outputs if name.startswith(BEGINS))

        def source(node: fx.Node) -> torch.Tensor | None:
            name = str(node.meta.get("name", node.target))
            found = rewriting.constants.get(name, buffers.get(name))
            if found is None or is_fake_or_meta(found):
                absent.update([name] if found is not None and node.users else [])
                return None
            return None if name in written or plain_name(found) in written else found

        found = []
        for number in range(len(exported.left)):
            computed = values.computed(source)
            keys = _described(number, outputs, rewriting, computed)
            found.append({name: k for name, k in keys.items() if not name.startswith(ENDS)})
        return exported, found

    both, (first, behind, again) = calls(earlier, columns, earlier)
    _, (alone,) = calls(columns)
    if is_as(behind, alone) and is_as(again, first):
        return None
    if absent:
        raise TraceError(f"the buffer {min(absent)} has no values on this rank")
    labels = [one.label + one.where for call in both.left for one in call if one.may_be_read]
    places = list(dict.fromkeys((*both.remade, *labels))) or ["values"]
    more = len(places) - _MOST_NAMED
    return ", ".join(places[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_fixed(name: str, node: fx.Node, written: Collection[int]) -> bool:
    """Whether what a call leaves in a buffer is a copy of what it has made of constants alone."""
    copied = node.args[0] if name.startswith(ENDS) else None
    if not isinstance(copied, fx.Node) or copied.target is not torch.ops.aten.copy_.default:
        return False
    waiting, seen = [copied.args[1]], set[fx.Node]()
    while waiting:
        one = waiting.pop()
        assert isinstance(one, fx.Node)
        is_source = one.op != "call_function"
        if is_source and one.meta.get("kind") in (Kind.COLUMN, Kind.PARAMETER):
            return False
        if one.meta.get("storage") in written or (not is_source and draws(one.target)):
            return False
        seen.add(one)
        waiting += [node for node in one.all_input_nodes if node not in seen]
    return True


def _writes_values(node: fx.Node) -> bool:
    return node.target is not torch.ops.aten.detach_.default


def _described(
    number: int,
    outputs: Mapping[tuple[int, str], fx.Node],
    rewriting: Rewriting,
    computed: Callable[[fx.Node], str | None] = lambda _: None,
    before: Sequence[Mapping[str, str]] | None = None,
) -> dict[str, str]:
    """Keys of what a call returns and leaves in buffers, by name.

    Args:
        number: of the call.
        outputs: of all calls.
        rewriting: of their graph.
        computed: the key of a value that is computed.
        before: what the calls before have left in buffers, for each to find there; without it,
            each finds what is its own.
    """
    begins: dict[fx.Node, str] = {}
    known = set[str]()
    for (of, name), node in outputs.items():
        if name.startswith(BEGINS):
            known.add(own := f"buffer {name.removeprefix(BEGINS)}")
            ended = ENDS + name.removeprefix(BEGINS)
            found = before[of - 1] if before and of <= len(before) else {}
            begins[node] = found.get(ended, own)

    def source(node: fx.Node) -> str:
        name = str(node.meta.get("name", node.target))
        kind = node.meta.get("kind")
        if kind is Kind.COLUMN:
            of, column = split_call(name)
            return f"column {column} {of == number}"
        constant = rewriting.constants.get(name)
        if constant is None or is_fake_or_meta(constant):
            return f"{'buffer' if kind is Kind.BUFFER else kind or node.op} {name}"
        plain = f"buffer {plain_name(constant)}"
        return plain if plain in known else tensor_key(constant)

    keys = ValueKeys(rewriting.graph, source, begins, computed, before is not None)
    return dict(before[-1] if before else {}) | {
        name: keys[node]
        for (of, name), node in outputs.items()
        if of == number and not name.startswith(BEGINS)
    }


def refuse_further_calls(found: FurtherCalls) -> None:
    """Refuse a model whose next calls compute something else than its first.

    Raises:
        TraceError: they do, naming what the first has left, and the lines that write it.
    """
    if not any(found.differs):
        return
    differing = found.differs.index(True)
    before = [one for calls in found.left[:differing] for one in calls if one.may_be_read]
    located = [one for one in before if one.line] or before  # what nothing reads may be among them
    named = list(dict.fromkeys(f"{one.label}{one.where}" for one in located))
    more = len(named) - _MOST_NAMED
    places = ", and ".join(named[:_MOST_NAMED]) + (f", and {more} more" if more > 0 else "")
    first = ""
    if all(found.differs[1:]) and not found.left[1]:
        first = "run one forward before training, if its first call alone is to be another one; or "
    raise _Refusal(
        f"forward leaves values in {places}, and its next call computes with them, which a trace "
        f"would freeze; {first}{_ADVICE}."
    )


def _refuse_late_calls(found: FurtherCalls, counts: Sequence[Mapping[str, float]]) -> None:
    """Refuse a model that computes something else once a counter has some value."""
    for differs, count in zip(found.differs[1:], counts, strict=True):
        if differs:
            ((label, value),) = count.items()
            (where, *_) = [o.where for o in found.left[0] if o.label == label] or [""]
            raise _Refusal(
                f"forward counts in {label}{where}, and computes something else once that is "
                f"{value}, which a trace would never; {_ADVICE}."
            )


def warn_of_left(every: Sequence[LeftState]) -> bool:
    """Warn of what every call leaves in Python state without an effect on the next.

    Args:
        every: what it leaves.

    Returns:
        Whether anything is warned of.
    """
    every = [one for one in every if not one.is_replayed]
    numbers = [one for one in every if one.is_number and not one.container[0]]
    for one in numbers:
        warn_on_rank0(
            logger,
            "forward sets %s%s, which has no effect on later steps: a trace sets it once. "
            "What depends on it, in forward or in a callback, stays as in the first step; use "
            "register_buffer and count in place (add_), or count in a callback.",
            one.label,
            one.where,
        )
    lost = [one for one in every if one.is_lost and not one.container[0]]
    for one in lost:
        warn_on_rank0(
            logger,
            "forward keeps a value in %s%s, which stays as it was before training: a trace has no "
            "values. A callback or log that reads it finds what was there; keep it in a buffer of "
            "the model (register_buffer, written in place), or log from a callback.",
            one.label,
            one.where,
        )
    kept = {one.container: one for one in every if one.container[0]}
    for (label, kind), one in kept.items():
        warn_on_rank0(
            logger,
            "forward keeps values in %s, a %s%s, which stays as it was before training: a trace "
            "adds nothing to it. A callback that reads there what steps have kept finds "
            "nothing; use register_buffer, and write into it in place.",
            label,
            kind,
            one.where,
        )
    return bool(numbers or kept or lost)
