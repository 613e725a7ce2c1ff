"""The operators of an opaque loop, written out at sizes at which they are few.

What an opaque loop computes is Python code. Run on fake tensors of a short sequence, it gives a
graph like that of any other model code, from which sharding rules can tell which of its operands
may be sharded. Nothing else runs the graph.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

from merak.core.source_lines import is_library, is_standard_library
from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.ir import Kind
from merak.graph.trace.modes.grad_hooks import TensorHooks
from merak.graph.trace.normalize import Rewriting, set_metadata
from merak.graph.trace.opaque.functions import in_own_thread
from merak.graph.trace.opaque.operator import OpaqueCall
from merak.graph.trace.opaque.probe import called, describe, undisturbed
from merak.graph.trace.state.snapshot import Snapshot

T = TypeVar("T")

Instruction = tuple[CodeType, int]
"""An instruction of Python code: its function's code, and its place there."""


class NoBody(Exception):
    """An opaque call has no graph of its operators; the message is a clause that says why."""


@dataclass(frozen=True, slots=True)
class Body:
    """The operators of an opaque call at some sizes.

    Args:
        graph: with a placeholder for each of the call's tensors; it returns a tuple of tensors.
        result: what the call returns, with slots in place of tensors.
    """

    graph: fx.Graph
    result: Any


def body_of(call: OpaqueCall, metas: Sequence[TensorMeta]) -> Body:
    """Write an opaque call's operators out.

    Args:
        call: of a module or function that depends on no values.
        metas: metadata of its tensors, at the sizes to write it out at.

    Raises:
        NoBody: it fails at these sizes, or has what no graph shows.
    """
    return _apart(call, lambda: _body(call, metas))


def instructions(call: OpaqueCall, each: Sequence[Sequence[TensorMeta]]) -> list[set[Instruction]]:
    """Instructions of the model's code that an opaque call runs, at several sizes.

    Args:
        call: as of `body_of`.
        each: metadata of its tensors, for each of the sizes.

    Raises:
        NoBody: it fails at some of these sizes.
    """
    try:
        return _apart(call, lambda: [_executed(call, metas, None) for metas in each])
    except NoBody:  # meta tensors are ten times as fast as fake ones, and know no autocast
        return _apart(call, lambda: [_executed(call, metas, call.device) for metas in each])


def _apart(call: OpaqueCall, run: Callable[[], T]) -> T:
    """Run in a thread of its own, where no modes are active, and leave the module as it was."""

    def safely() -> T:
        before = Snapshot.take(call.module)
        with undisturbed(call):
            try:
                return run()
            except NoBody:
                raise
            except Exception as error:  # whatever the code does at other sizes
                reason = str(error).strip().partition("\n")[0]
                raise NoBody(f"fails at other sizes ({type(error).__name__}: {reason})") from error
            finally:
                before.restore()

    return in_own_thread(safely)


def _body(call: OpaqueCall, metas: Sequence[TensorMeta]) -> Body:
    results: list[Any] = []

    def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, found = describe(call, tensors, called(call, tensors))
        results.append(found.result)
        return tuple(outputs)

    with (
        _own_backwards_refused(),
        _quiet(),
        FakeTensorMode(allow_non_fake_inputs=True),
        TensorHooks(),
        torch.set_grad_enabled(call.grad),
    ):
        module = make_fx(flat, tracing_mode="real", pre_dispatch=True)(*_empty(call, metas))
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise NoBody("makes tensors of numbers")
    placeholders = module.graph.find_nodes(op="placeholder")
    for i, (node, meta) in enumerate(zip(placeholders, metas, strict=True)):
        # A parameter of the body is what a gradient is asked for.
        node.meta["kind"] = Kind.PARAMETER if meta.requires_grad else Kind.VALUE
        node.meta["name"] = str(i)
    set_metadata(Rewriting(module.graph, {}))
    for node, meta in zip(placeholders, metas, strict=True):
        node.meta["tensor"] = meta
    return Body(module.graph, results[-1])


def _empty(
    call: OpaqueCall, metas: Sequence[TensorMeta], device: str | None = None
) -> list[torch.Tensor]:
    made = []
    for meta in metas:
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device or call.device)
        made.append(tensor.requires_grad_(meta.requires_grad))
    return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what torch logs of code that fails at some sizes."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_off, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_off


@contextmanager
def _own_backwards_refused() -> Iterator[None]:
    """Refuse autograd functions: of their backward, a graph of the forward shows nothing."""

    def refuse(cls: type[Function], *args: Any, **kwargs: Any) -> NoReturn:
        raise NoBody(f"calls {cls.__name__}, which has a backward of its own")

    with mock.patch.object(Function, "apply", classmethod(refuse)):
        yield


def _executed(
    call: OpaqueCall, metas: Sequence[TensorMeta], device: str | None
) -> set[Instruction]:
    seen: set[Instruction] = set()

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            seen.add((frame.f_code, frame.f_lasti))
        return inside

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if is_library(file) or is_standard_library(file):  # which runs when an object goes, too
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return inside

    mode = nullcontext() if device is None else FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.set_grad_enabled(call.grad), _no_collection():
        tensors = _empty(call, metas, device or "meta")
        sys.settrace(enter)
        try:
            called(call, tensors)
        finally:
            sys.settrace(None)
    return seen


@contextmanager
def _no_collection() -> Iterator[None]:
    """Put the garbage collector off, in which other objects' code would run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
