"""Graphs of one model at changing shapes: a few traces, then one trace with symbolic sizes.

A trace takes seconds for a large model, and with batches of many lengths there would be hundreds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import ModelGraph, Segment
from merak.graph.ir.structure import structural_key
from merak.graph.segment.build import GraphSource, as_traced, build_graph, call_of
from merak.graph.segment.cut import cut_into_segments
from merak.graph.trace.calls.exported import Exported
from merak.graph.trace.specialize import NotResizable, at_sizes
from merak.graph.trace.trace import export_model

logger = logging.getLogger(__name__)

PATIENCE = 2
"""So many shapes are traced as they are: a ragged last batch alone is no reason for more."""


class GraphsByShape:
    """Graphs of a model in one mode, by the batch's shape.

    What comes from the trace with symbols is used once it has been found equal to a shape's own
    trace, and for those shapes alone for which its guards hold.

    Args:
        source: the model.
        training: train mode with the loss alone, or eval mode with all outputs.
        first: a graph that is known already.
        earlier: columns of batches in the other mode, if there is none.
    """

    def __init__(
        self,
        source: GraphSource,
        *,
        training: bool,
        first: ModelGraph | None = None,
        earlier: Mapping[str, TensorMeta] | None = None,
    ) -> None:
        self._source = source
        self._training = training
        self._first = first
        self._earlier = earlier if first is None else first.columns
        self._num_traced = 0 if first is None else 1
        self._symbolic: Exported | None = None
        self._is_hopeless = False

    def __call__(self, columns: Mapping[str, TensorMeta]) -> ModelGraph:
        """Graph for a batch of some shape.

        Raises:
            TraceError: the model cannot be traced at this shape.
        """
        if self._num_traced >= PATIENCE and not self._is_hopeless:
            graph = self._resized(columns)
            if graph is not None:
                return graph
        earlier, training = self._earlier, self._training
        graph = build_graph(self._source, columns, training=training, earlier=earlier)
        self._earlier = earlier or columns
        self._first = graph if self._first is None else self._first
        self._num_traced += 1
        return graph

    def _resized(self, columns: Mapping[str, TensorMeta]) -> ModelGraph | None:
        try:
            if self._symbolic is None:
                self._symbolic = self._trace()
            return self._at(columns, self._symbolic)
        except NotResizable as error:
            logger.debug("no trace with symbols for %s: %s", dict(columns), error)
            return None

    def _trace(self) -> Exported:
        """Trace with symbolic sizes, verified against the first shape's own trace.

        Raises:
            NotResizable: there is none, or it says something else.
        """
        source, first = self._source, self._first
        assert first is not None
        self._is_hopeless = True
        call = call_of(source, first.columns)
        device = torch.device(source.device.type)
        try:
            with as_traced(source, self._training):
                exported = export_model(
                    source.model,
                    first.columns,
                    call,
                    device,
                    symbolic=True,
                    opaque=source.opaque,
                )
        except Exception as error:  # the model's code, or torch, cannot do with symbols
            raise NotResizable(str(error)) from error
        if exported.num_conditions:
            raise NotResizable("random numbers decide which operators run")
        if not is_same_graph(self._at(first.columns, exported), first):
            raise NotResizable("with symbols the model runs other operators")
        self._is_hopeless = False
        return exported

    def _at(self, columns: Mapping[str, TensorMeta], exported: Exported) -> ModelGraph:
        traced = at_sizes(exported, columns)
        return cut_into_segments(traced, outputs=("loss",) if self._training else None)


def is_same_graph(one: ModelGraph, other: ModelGraph) -> bool:
    """Whether two graphs of one model compute the same, whatever their values are called."""
    pairs = zip((one.prologue, *one.segments), (other.prologue, *other.segments), strict=False)
    return (
        len(one.segments) == len(other.segments)
        and list(one.outputs) == list(other.outputs)
        and one.parameters == other.parameters
        and all(
            _is_same_segment(a, b) and _has_same_buffers(one, a.buffers, other, b.buffers)
            for a, b in pairs
        )
    )


def _is_same_segment(one: Segment, other: Segment) -> bool:
    if (one.parameters, one.columns) != (other.parameters, other.columns):
        return False
    return bool(structural_key(one.graph) == structural_key(other.graph))


def _has_same_buffers(
    one: ModelGraph, ours: Sequence[str], other: ModelGraph, theirs: Sequence[str]
) -> bool:
    """Whether two segments read the same buffers, and constants of equal values."""
    if len(ours) != len(theirs):
        return False
    for name, its_name in zip(ours, theirs, strict=True):
        value, its_value = one.constants.get(name), other.constants.get(its_name)
        if value is None or its_value is None:
            if name != its_name or value is not its_value:
                return False
        elif not torch.equal(value, its_value):  # whatever a trace has called them
            return False
    return True
