"""Which modules a trace keeps whole: the innermost around what cannot be traced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from torch import nn

from merak.core.errors import TraceError
from merak.graph.kept.picks import Picking
from merak.graph.kept.probe import CannotKeep
from merak.graph.tracing.explain import UntraceableError, causes

Traced = TypeVar("Traced")


@dataclass(slots=True)
class Keeping:
    """What is kept whole while one model is traced; it grows with every trace that fails.

    Args:
        whole: paths of the modules that are kept, and why.
        refused: kinds of modules that cannot be.
        without_cache: whether the model is to make no cache of keys and values, since modules that
            are kept would be called with it.
        by_batch: whether choices that hang on the batch alone are traced both ways, as those that
            hang on chance are.
        asks_batch: whether a trace that failed had come by such a choice.
        picking: what becomes of sizes that depend on values, outside of what is kept.
    """

    whole: dict[str, str] = field(default_factory=dict)
    refused: set[tuple[type, str]] = field(default_factory=set)
    without_cache: bool = False
    by_batch: bool = False
    asks_batch: bool = False
    picking: Picking = Picking.REFUSED

    def follow(self, other: Keeping) -> None:
        """From now on keep what another one keeps."""
        self.whole, self.refused = other.whole, other.refused
        self.without_cache, self.by_batch = other.without_cache, other.by_batch
        self.picking = other.picking

    def enough(self, model: nn.Module, trace: Callable[[], Traced]) -> Traced:
        """Trace until as much is kept as it needs.

        Args:
            model: the model.
            trace: traces it with what is kept whole so far.

        Raises:
            TraceError: it cannot be traced, whatever of it is kept.
        """
        try:
            return self._enough(model, trace)
        except UntraceableError as error:
            if self.picking is not Picking.REFUSED:
                raise
            known = dict(self.whole), set(self.refused), self.without_cache
            for picking in (Picking.ANY, Picking.SOME):
                self.whole, self.refused, self.picking = {}, set(), picking
                try:
                    return self._enough(model, trace)
                except TraceError:
                    continue
            self.whole, self.refused, self.without_cache = known
            self.picking = Picking.REFUSED
            raise error from None  # which says what is in the way without any of this

    def _enough(self, model: nn.Module, trace: Callable[[], Traced]) -> Traced:
        first: TraceError | None = None
        while True:
            try:
                return trace()
            except TraceError as error:
                first = first or error
                if not self.widen(model, error):
                    raise self.explain(first, error) from None

    def widen(self, model: nn.Module, error: TraceError) -> bool:
        """Keep the innermost module around a failure that can be kept, and those like it.

        Returns:
            Whether there was one.
        """
        if isinstance(error, CannotKeep) and error.is_object and not self.without_cache:
            self.without_cache = True  # the object may be one
            return True
        paths = _around(model, error)
        why = ""
        if isinstance(error, CannotKeep):
            self._refuse(model, error.path)
            why = self.whole.pop(error.path, error.why)
            for path in _alike(model, error.path):
                self.whole.pop(path, None)
            inside = [p for p in paths if f"{error.path}.".startswith(f"{p}.")]
            paths = inside or _outer(error.path)
        elif isinstance(error, UntraceableError):
            why = error.why
        else:
            return False
        for path in reversed(paths):
            # One that is whole already and fails in its call would fail again and again.
            if path and path not in self.whole and _kind(model, path) not in self.refused:
                self._keep(model, path, why)
                return True
        return False

    @staticmethod
    def explain(first: TraceError, last: TraceError) -> TraceError:
        """What to tell of a model that cannot be traced, whatever of it is kept whole.

        Args:
            first: what came first.
            last: what came when nothing was left to be kept.
        """
        if first is last or not isinstance(last, CannotKeep):
            return last
        text = f"{str(first).rstrip('.')}; and the module around it, {last}."
        return UntraceableError(text, getattr(first, "why", ""))

    def _refuse(self, model: nn.Module, path: str) -> None:
        self.refused.add(_kind(model, path))

    def _keep(self, model: nn.Module, path: str, why: str) -> None:
        for one in _alike(model, path):
            if any(f"{one}.".startswith(f"{outer}.") for outer in self.whole):
                continue
            for inner in [p for p in self.whole if p.startswith(f"{one}.")]:
                del self.whole[inner]
            self.whole[one] = why


def _outer(path: str) -> list[str]:
    """Paths of the modules around one, outermost first."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _kind(model: nn.Module, path: str) -> tuple[type, str]:
    """Modules of one class at places that differ in numbers alone are of one kind."""
    return type(model.get_submodule(path)), re.sub(r"\d+", "*", path)


def _alike(model: nn.Module, path: str) -> list[str]:
    kind = _kind(model, path)
    return [name for name, _ in model.named_modules() if name and _kind(model, name) == kind]


def _around(model: nn.Module, error: BaseException) -> list[str]:
    """Paths of the modules whose forward was under way when an error was raised, outermost first.

    A module is told by its dict: a trace may put another object with the same in its place.
    """
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    longest: list[str] = list(getattr(error, "modules", ()))
    for cause in causes(error):
        found = [paths[key] for key in _called(cause.__traceback__) if key in paths]
        longest = max(longest, list(dict.fromkeys(found)), key=len)
    return longest


def _called(trace: TracebackType | None) -> Iterator[int]:
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name in ("_call_impl", "forward"):
            own = frame.f_locals.get("self")
            if isinstance(own, nn.Module):
                yield id(vars(own))
        trace = trace.tb_next
