"""Long Python loops in a model's code, which a trace would unroll.

A loop over the tokens of a sequence makes a graph that grows with the sequence: a Mamba of 64
layers at 4,096 tokens would have two million operators. Such a loop is found while it runs, after
its first passes, so that the function or module around it can be one opaque operator.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from merak.core.source_lines import is_library, with_text
from merak.graph.trace.explain import UntraceableError
from merak.graph.trace.opaque.functions import function_name

MOST_PASSES = 64
"""A loop with more passes than this is not written out, where it can be helped."""

FEW_PASSES = 8
"""A loop with fewer passes than this is no loop here."""

MANY_OPERATORS = 4_000
"""After so many calls of torch's functions in loops, those of a few passes are too many as well."""

MOST_OPERATORS = 50_000
"""Calls of torch's functions in loops that are written out all the same; no trace is longer."""

Place = tuple[str, str]
"""The code that a loop stands in: its file and its qualified name."""

_MODES = frozenset(("__torch_function__", "__torch_dispatch__"))


class LoopFound(UntraceableError):
    """A loop of many passes, none of which calls a module or reads a weight of its own.

    Args:
        line: the line at which it was found: file, number, text.
        modules: paths of the modules around it, outermost first.
        place: the code that it stands in.
        functions: names of the functions around it that could be opaque, innermost first.
        is_too_long: whether it was to be unrolled, and is longer than a trace can be.
    """

    def __init__(
        self,
        line: str,
        modules: tuple[str, ...],
        place: Place,
        functions: tuple[str, ...],
        is_too_long: bool,
    ) -> None:
        super().__init__(
            f"the loop around {line} makes more than {MOST_OPERATORS:,} operators, and nothing "
            "around it can be one operator; put the loop into the forward of a module of its own, "
            "or into a function at the top of a file, that takes and returns tensors.",
            f"{line}: a loop of many passes",
            modules,
        )
        self.line = line
        self.place = place
        self.functions = functions
        self.is_too_long = is_too_long


@dataclass(slots=True)
class _Activation:
    """A call of a Python function that is under way, and its loops.

    Args:
        frame: of the call; held, so that no other gets its identity.
        at: its instruction when it was last seen.
        module: the module whose forward it is, if it is one.
        passes: passes of its loops, but for those that met a new module or weight.
        operators: calls of torch's functions in it, or in functions that it calls.
        is_new: whether the current pass has met a module or weight that none before has.
        met: modules called, and weights read, so far.
    """

    frame: FrameType
    at: int
    module: nn.Module | None
    passes: int = 0
    operators: int = 0
    is_new: bool = True
    met: set[Any] = field(default_factory=set)

    def meet(self, what: Any) -> None:
        """Note a module or a weight that a pass has met."""
        if what not in self.met:
            self.met.add(what)
            self.is_new = True

    def is_loop(self) -> bool:
        """Whether the call has made some passes, of several operators each."""
        is_long = self.passes > FEW_PASSES and self.operators >= 2 * self.passes
        return is_long and not _is_library(self.frame)

    def end_pass(self) -> None:
        """Count a pass, unless it was a layer rather than a token."""
        self.passes += not self.is_new
        self.is_new = False


class Loops(TorchFunctionMode):
    """Function mode that raises an error for a loop of more than `MOST_PASSES` passes.

    After `MANY_OPERATORS` in loops, a loop of a few passes raises it too: those of layers add up.

    A loop over layers raises none: each pass calls a module, or reads a weight or a part of one,
    that no pass before has. Nor does a sum of many tensors, with one operator in a pass.

    Args:
        model: whose forward runs.
        unrolled: code whose loops are unrolled all the same, up to `MOST_OPERATORS` in all.
    """

    def __init__(self, model: nn.Module, unrolled: Collection[Place]) -> None:
        super().__init__()
        self.operators = 0
        self._unrolled = unrolled
        self._model = model
        self._paths = {id(vars(module)): path for path, module in model.named_modules()}
        self._weights: set[int] = set()
        self._stack: list[_Activation] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the stack of a call, and pass it on.

        Raises:
            LoopFound: it comes from a long loop.
        """
        self._look(sys._getframe(1))
        for value in (*args, *(kwargs or {}).values()):
            if id(value) in self._weights:
                self._meet((id(value), str(args[1]) if func is torch.Tensor.__getitem__ else ""))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *raised: Any) -> None:
        """Release the frames."""
        self._stack.clear()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def meet_module(self, module: nn.Module) -> None:
        """Record that a pass calls a module, though its operators do not pass through this mode."""
        self._meet(id(vars(module)))

    def _meet(self, what: Any) -> None:
        for activation in self._stack:
            activation.meet(what)

    def _look(self, frame: FrameType | None) -> None:
        frames = _frames(frame)
        if not frames:
            return
        stack = self._stack
        if not stack or stack[0].frame is not frames[0]:  # a trace gives it weights of its own
            self._weights = {id(t) for m in self._model.modules() for t in _weights(m)}
        common = 0
        for activation, now in zip(stack, frames, strict=False):
            if activation.frame is not now:
                break
            common += 1
        for i in range(common):
            self._follow(stack[i], i, common, len(frames))
        del stack[common:]
        for now in frames[common:]:
            module = _called_module(now)
            if module is not None:
                self._meet(id(vars(module)))
            stack.append(_Activation(now, now.f_lasti, module))
        self._refuse()

    def _follow(self, activation: _Activation, i: int, common: int, depth: int) -> None:
        """Count a pass if a call that was under way before has jumped back."""
        now = activation.frame.f_lasti
        # At the same instruction again: by another call from there, or by none both times.
        again = (
            now == activation.at
            and i == common - 1
            and (depth > common) == (len(self._stack) > common)
        )
        if now < activation.at or again:
            activation.end_pass()
        activation.at = now

    def _refuse(self) -> None:
        found = []
        for i, activation in enumerate(self._stack):
            activation.operators += 1
            if activation.is_loop():
                found.append(i)
        if not found:
            return
        self.operators += 1
        most = MOST_PASSES if self.operators <= MANY_OPERATORS else FEW_PASSES
        for i in found:
            activation = self._stack[i]
            if activation.passes > most and _place(activation.frame) not in self._unrolled:
                raise self._error(i, is_too_long=False)
        if self.operators > MOST_OPERATORS:
            raise self._error(found[-1], is_too_long=True)

    def _error(self, at: int, is_too_long: bool) -> LoopFound:
        stack = self._stack[: at + 1]
        frame = stack[-1].frame
        modules = [self._paths.get(id(vars(a.module)), "") for a in stack if a.module is not None]
        return LoopFound(
            with_text(f"{frame.f_code.co_filename}:{frame.f_lineno}"),
            tuple(dict.fromkeys(path for path in modules if path)),
            _place(frame),
            _functions(stack),
            is_too_long,
        )


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Calls under way in a model's forward, outermost first, without function modes."""
    while frame is not None and frame.f_code.co_name in _MODES:
        frame = frame.f_back
    found = []
    while frame is not None and frame.f_code.co_name != "call_model":
        found.append(frame)
        frame = frame.f_back
    return [] if frame is None else found[::-1]


def _called_module(frame: FrameType) -> nn.Module | None:
    if frame.f_code.co_name != "_call_impl":
        return None
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _functions(stack: list[_Activation]) -> tuple[str, ...]:
    """Functions that could be opaque, from the loop outwards up to the module that calls them."""
    found = []
    for activation in reversed(stack):
        if activation.module is not None:
            break
        name = function_name(activation.frame)
        if name is not None and not _is_library(activation.frame):
            found.append(name)
    return tuple(found)


def _place(frame: FrameType) -> Place:
    return frame.f_code.co_filename, frame.f_code.co_qualname


def _is_library(frame: FrameType) -> bool:
    return is_library(frame.f_code.co_filename)


def _weights(module: nn.Module) -> tuple[torch.Tensor, ...]:
    slots: tuple[Mapping[str, torch.Tensor | None], ...] = (module._parameters, module._buffers)
    return tuple(t for part in slots for t in part.values() if t is not None)
