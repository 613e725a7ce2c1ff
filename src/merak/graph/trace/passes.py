"""Passes over an exported graph: a tuple that is walked, with a reason for each."""

from __future__ import annotations

from collections.abc import Callable

from merak.graph.ir.mutation import eliminate_dead_code, repeat_buffer_mutations
from merak.graph.ir.replicas import read_results_for_writes
from merak.graph.trace.autograd.expand import expand_autograd
from merak.graph.trace.modes.known_ones import note_packed
from merak.graph.trace.normalize import (
    Rewriting,
    drop_device_indices,
    erase_assertions,
    erase_no_ops,
    gather_regions,
    inline_subgraphs,
    refuse_mixed_types,
    refuse_vmap,
    set_metadata,
    slice_neighbours,
)
from merak.graph.trace.opaque.aliasing import refuse_lost_writes
from merak.graph.trace.parameter_writes import hoist_parameter_writes
from merak.graph.trace.plain_masks import drop_plain_masks, lay_out_learned_masks
from merak.graph.trace.verify import is_fake_or_meta, verify_constants

Pass = Callable[[Rewriting], None]
"""Rewrites a graph in place, or refuses it."""


def _hoist_parameter_writes(rewriting: Rewriting) -> None:
    found = hoist_parameter_writes(rewriting.graph, rewriting.constants)
    rewriting.parameter_writes = found


def _drop_unread_constants(rewriting: Rewriting) -> None:
    known = rewriting.constants.items()
    rewriting.constants = {n: t for n, t in known if not is_fake_or_meta(t)}


PASSES: tuple[tuple[Pass, str], ...] = (
    (
        lambda r: inline_subgraphs(r.graph),
        "all later passes see one flat graph, with autocast as conversions",
    ),
    (
        lambda r: verify_constants(r.graph, r.constants),
        "fake constants are named by the line that reads them, while torch's metadata is there",
    ),
    (refuse_vmap, "the error names the line, before another pass fails on such an operator"),
    (erase_assertions, "no operator depends on them, and they would hold dead ones alive"),
    (drop_device_indices, "graphs of all ranks are the same"),
    (
        lambda r: expand_autograd(r.graph),
        "gradients become operators while nodes have fake values, from which they are derived",
    ),
    (gather_regions, "after gradients are written out, so that a region holds their operators"),
    (set_metadata, "no size is symbolic now; replaces fake values by shapes, lines and storages"),
    (refuse_mixed_types, "types are there, and conversions of autocast"),
    (lambda r: note_packed(r.graph), "metadata is there to note it in"),
    (drop_plain_masks, "behind the line above: a mask of documents is no plain one"),
    (erase_no_ops, "reads shapes and gradients from that metadata"),
    (
        lambda r: read_results_for_writes(r.graph),
        "storages are there; a write that nothing reads is none",
    ),
    (_hoist_parameter_writes, "before copies of written tensors are made, of which it needs none"),
    (
        lambda r: repeat_buffer_mutations(r.graph),
        "segments may recompute: the batch is never written",
    ),
    (lambda r: eliminate_dead_code(r.graph), "what only erased nodes have read goes"),
    (slice_neighbours, "sharding rules know slices, and see through no list of indices"),
    (
        lambda r: refuse_lost_writes(r.graph),
        "last of those that look at writes: marks opaque calls beside which there are some",
    ),
    (lay_out_learned_masks, "behind what erases copies, of which it makes one"),
    (_drop_unread_constants, "a fake constant that nothing reads, now that dead code is gone"),
)
"""Passes in the order in which they run, and why each runs there."""


PLAIN_PASSES: tuple[Pass, ...] = (
    lambda r: inline_subgraphs(r.graph),
    erase_assertions,
    drop_device_indices,
    gather_regions,
    set_metadata,
    erase_no_ops,
)
"""Those of them after which values of one graph can be compared; the graph is not to be run."""


def run_passes(rewriting: Rewriting) -> None:
    """Rewrite an exported graph in place by all passes.

    Args:
        rewriting: the graph, whose placeholders have names; gains what passes find out about it.

    Raises:
        TraceError: a pass refuses the graph.
    """
    for run, _ in PASSES:
        run(rewriting)
