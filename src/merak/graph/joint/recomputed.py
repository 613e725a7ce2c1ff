"""What a recomputation runs again of a segment's forward, and what the forward keeps for it.

It makes what the backward reads, and nothing else: not a segment's last product, say, whose result
only later segments read. It draws what the forward drew, and leaves out operators whose results
were kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from merak.core.random import random_state, restore_random_state
from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import draws, family
from merak.graph.joint.clean import is_view
from merak.ops import sharded_dropout
from merak.ops.chunked_loss import chunk_losses, chunk_losses_and_gradients


@dataclass(frozen=True, slots=True)
class Recomputation:
    """A second run of some operators of a forward.

    Args:
        first: operators of the first run, in order, with what notes the generator's state.
        nodes: operators of the second, in order, with what restores that state.
        kept: values that the first run gives the second.
        instead: by node of the forward, the one that the first run has in its place.
    """

    first: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    instead: Mapping[fx.Node, fx.Node]


def find_recomputed(
    forward: Sequence[fx.Node], wanted: Iterable[fx.Node], keeps: Collection[str]
) -> Recomputation:
    """Find what makes some values of a forward again.

    Args:
        forward: its operators, in order.
        wanted: the values.
        keeps: names of the segment's operators whose results are kept.
    """
    writers = _writers(forward)
    can_keep = {*results_to_keep(forward, keeps)}
    waiting, found, kept = [*wanted], set[fx.Node](), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node in can_keep:
            kept.add(node)
        elif node not in found:
            found.add(node)
            around = [node, *node.all_input_nodes]
            waiting += [n for n in around if n.op == "call_function"]
            waiting += [w for n in around for w in writers.get(_storage(n), ())]
        if not waiting:
            left_out = _draws_before_the_last(forward, found)
            waiting += [draw for draw in left_out if not _is_kept_draw(draw, kept)]
    states = {draw: _state_behind(draw) for draw in _draws_before_the_last(forward, found)}
    instead, unread = _losses_alone(forward)
    return Recomputation(
        tuple(
            n
            for node in forward
            if node not in unread
            for n in (instead.get(node, node), *states.get(node, ())[:1])
        ),
        tuple(n for node in forward for n in _second(node, found, states)),
        (*(node for node in forward if node in kept), *(note for note, _ in states.values())),
        instead,
    )


def _losses_alone(forward: Sequence[fx.Node]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """What a first run has of a head that makes its gradients in one pass: the losses alone.

    Args:
        forward: its operators, in order.

    Returns:
        By node, the one in its place; and the gradients, which the first run does not make.
    """
    instead: dict[fx.Node, fx.Node] = {}
    unread: set[fx.Node] = set()
    for node in forward:
        graph = node.graph
        with graph.inserting_before(graph.output_node()):
            if family(node.target) == chunk_losses_and_gradients.__name__:
                losses, *gradients = node.users
                unread.update(gradients)
                args = (*node.args[:6], *node.args[7:])  # but for the gradients that are wanted
                own = graph.call_function(chunk_losses.__wrapped__, args)  # type: ignore[attr-defined]
                made = losses.meta["layout"]
                spared = sum(user.meta["layout"].storage_bytes for user in gradients)
                taken = {"taken_bytes": node.meta["taken_bytes"] - spared}
                own.meta = {**node.meta, **taken, "results": {made.storage: made.storage_bytes}}
            elif node not in unread and not instead.keys().isdisjoint(node.all_input_nodes):
                own = graph.node_copy(node, lambda read: instead.get(read, read))
            else:
                continue
        own.meta["is_added"] = True
        instead[node] = own
    return instead, unread


def results_to_keep(forward: Sequence[fx.Node], keeps: Collection[str]) -> list[fx.Node]:
    """Results of operators that may be kept: those of their own, which nobody writes into.

    Args:
        forward: operators of a forward, in order.
        keeps: names of the segment's operators.
    """
    writers = _writers(forward)
    own = [n for n in forward if n.meta["origin"] in keeps and n.meta["layout"] is not None]
    return [n for n in own if not is_view(n) and _storage(n) not in writers]


def _writers(forward: Iterable[fx.Node]) -> dict[int | None, list[fx.Node]]:
    """By storage, the operators that write into it."""
    found: dict[int | None, list[fx.Node]] = defaultdict(list)
    for node in forward:
        for written in mutated_arguments(node):
            found[_storage(written)].append(node)
    return dict(found)


def _storage(node: fx.Node) -> int | None:
    layout = node.meta["layout"]
    return None if layout is None else int(layout.storage)


# ---- draws ----


def _draws(node: fx.Node) -> bool:
    is_of_ours = getattr(node.target, "__module__", "") == sharded_dropout.__name__
    return is_of_ours or draws(node.target)


def _is_kept_draw(node: fx.Node, kept: set[fx.Node]) -> bool:
    return node in kept or any(user in kept for user in node.users)


def _draws_before_the_last(forward: Sequence[fx.Node], found: set[fx.Node]) -> list[fx.Node]:
    """Draws that the second run does not make, and behind which it makes one."""
    last = max((i for i, node in enumerate(forward) if node in found and _draws(node)), default=0)
    return [node for node in forward[:last] if _draws(node) and node not in found]


def _state_behind(draw: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Nodes that note and restore the state in which a draw leaves its generator."""
    layouts = [node.meta["layout"] for node in (draw, *draw.users)]
    device = next(layout.device for layout in layouts if layout is not None)
    with draw.graph.inserting_before(draw.graph.output_node()):
        note = draw.graph.call_function(random_state, (device,))
        restored = draw.graph.call_function(restore_random_state, (device, note))
    for node in (note, restored):
        node.meta = {"layout": None, "is_backward": False, "origin": "", "is_added": True}
    return note, restored


def _second(
    node: fx.Node, found: set[fx.Node], states: dict[fx.Node, tuple[fx.Node, fx.Node]]
) -> tuple[fx.Node, ...]:
    if node in states:
        return (states[node][1],)
    return (node,) if node in found else ()
