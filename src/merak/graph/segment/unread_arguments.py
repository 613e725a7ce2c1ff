"""Arguments in a batch that are no tensors and that no code reads: their values may change.

A graph is made for the values of such arguments (`max_length_q` of packed rows), so that a batch
with others is refused. Whether code reads one is found by a trace with an object in its place that
notes whatever is done with it but to pass it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from merak.core.errors import TraceError
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, as_traced, trace_source

_MAY_CHANGE = (int, float, str)
"""Types of arguments that count or name something; booleans and None choose what runs."""

_LEFT = frozenset(
    "__new__ __init__ __init_subclass__ __subclasshook__ __class__ __dir__ __doc__ __setattr__ "
    "__delattr__ __getattribute__ __getnewargs__".split()
)


class _ReadError(BaseException):
    """An argument is read: no error, so that neither the model nor a fallback catches it."""


def unread_arguments(source: GraphSource, columns: Mapping[str, TensorMeta]) -> frozenset[str]:
    """Names of arguments of `source.fixed` that neither training nor evaluation reads.

    Args:
        source: the model, and what is called with it.
        columns: the batch at microbatch shape.
    """
    found = {name for name, value in source.fixed.items() if type(value) in _MAY_CHANGE}
    for training in (True, False):
        while found:
            read: set[str] = set()
            try:
                _trace_without(source, columns, training, found, read)
            except _ReadError:
                found -= read
            except TraceError:  # which the trace with all arguments says better
                return frozenset()
            else:
                break
    return frozenset(found)


def _trace_without(
    source: GraphSource,
    columns: Mapping[str, TensorMeta],
    training: bool,
    names: set[str],
    read: set[str],
) -> None:
    """Trace a model with objects in the place of some arguments.

    Raises:
        _ReadError: one is read, which is among `read` from then on.
        TraceError: the model cannot be traced.
    """
    stand_ins = {name: _stand_in(name, source.fixed[name], read) for name in names}
    stood_in = replace(source, fixed={**source.fixed, **stand_ins})
    stood_in.warned = source.warned
    with as_traced(stood_in, training):
        trace_source(stood_in, columns, copies_blocks=True)
    if read:
        raise _ReadError


def _stand_in(name: str, value: Any, read: set[str]) -> Any:
    """An object of the type of an argument, as far as code asks for that, without its value."""

    def refuse(*_: Any) -> Any:
        read.add(name)
        raise _ReadError(name)

    def attribute(_: Any, requested: str) -> Any:
        return type(value) if requested == "__class__" else refuse()

    special = {own for kind in _MAY_CHANGE for own in dir(kind) if own.startswith("__")} - _LEFT
    methods = {**dict.fromkeys(special, refuse), "__getattribute__": attribute, "__slots__": ()}
    return type("Argument", (), methods)()
