"""Which modules a trace keeps whole: the innermost around what cannot be traced."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from torch import nn

from merak.core.errors import TraceError
from merak.core.rank0 import warn_on_rank0
from merak.graph.trace.explain import UntraceableError, causes
from merak.graph.trace.opaque.dynamic_region import DynamicSizes
from merak.graph.trace.opaque.loops import LoopFound, Place
from merak.graph.trace.opaque.probe import CannotBeOpaque

logger = logging.getLogger(__name__)

Traced = TypeVar("Traced")

MOST_OPAQUE = 0.5
"""With a larger share of the parameters in modules that are kept whole, another way is tried."""


@dataclass(slots=True)
class OpaqueSelection:
    """What is kept whole while one model is traced; it grows with every trace that fails.

    Args:
        whole: paths of the modules that are kept, and why.
        refused: kinds of modules that cannot be.
        without_cache: whether the model is to make no cache of keys and values, since modules that
            are kept would be called with it.
        by_batch: whether choices that hang on the batch alone are traced both ways, as those that
            hang on chance are.
        asks_batch: whether a trace that failed had come by such a choice.
        sizes: what becomes of sizes that depend on values, outside of what is kept.
        functions: names of the functions that are opaque for their loops, and why.
        not_for_loops: names and paths of functions and modules that cannot be.
        looped: paths of the modules that are kept for a loop, and the code that it stands in.
        unrolled: code whose loops are written out pass by pass.
    """

    whole: dict[str, str] = field(default_factory=dict)
    refused: set[tuple[type, str]] = field(default_factory=set)
    without_cache: bool = False
    by_batch: bool = False
    asks_batch: bool = False
    sizes: DynamicSizes = DynamicSizes.REFUSED
    functions: dict[str, str] = field(default_factory=dict)
    not_for_loops: set[str] = field(default_factory=set)
    looped: dict[str, Place] = field(default_factory=dict)
    unrolled: set[Place] = field(default_factory=set)

    def forget_loops(self) -> None:
        """Decide anew about loops: another shape of the batch may have shorter ones."""
        for path in self.looped:
            self.whole.pop(path, None)
        for known in (self.functions, self.not_for_loops, self.looped, self.unrolled):
            known.clear()

    def known(self) -> tuple[dict[str, str], dict[str, str]]:
        """The modules and functions that are opaque now."""
        return dict(self.whole), dict(self.functions)

    def follow(self, other: OpaqueSelection) -> None:
        """From now on keep what another one keeps."""
        self.whole, self.refused = other.whole, other.refused
        self.without_cache, self.by_batch = other.without_cache, other.by_batch
        self.sizes = other.sizes
        self.functions, self.not_for_loops = other.functions, other.not_for_loops
        self.looped, self.unrolled = other.looped, other.unrolled

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
            if self.sizes is not DynamicSizes.REFUSED:
                raise
            known = dict(self.whole), set(self.refused), self.without_cache
            for sizes in (DynamicSizes.REGIONS, DynamicSizes.NON_EMPTY):
                self.whole, self.refused, self.sizes = {}, set(), sizes
                try:
                    return self._enough(model, trace)
                except TraceError:
                    continue
            self.whole, self.refused, self.without_cache = known
            self.sizes = DynamicSizes.REFUSED
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
        if isinstance(error, CannotBeOpaque) and error.is_object and not self.without_cache:
            self.without_cache = True  # the object may be one
            return True
        if isinstance(error, LoopFound):
            return self._keep_loop(model, error)
        if isinstance(error, CannotBeOpaque) and self._write_out(model, error.path):
            return True
        paths = _around(model, error)
        why = ""
        if isinstance(error, CannotBeOpaque):
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

    def _keep_loop(self, model: nn.Module, error: LoopFound) -> bool:
        """Let a function around a loop be opaque, or the module; else the loop is written out.

        So it is where one module has most of the parameters, unless no trace can be as long.
        """
        for name in error.functions:
            if name not in self.not_for_loops and name not in self.functions:
                self.functions[name] = error.why
                return True
        path = error.modules[-1] if error.modules else ""
        can_keep = path and path not in self.whole and path not in self.not_for_loops
        if can_keep and (error.is_too_long or share_of(model, path) <= MOST_OPAQUE):
            self._keep(model, path, error.why)
            self.looped |= dict.fromkeys(_alike(model, path), error.place)
            return True
        if error.is_too_long:
            return False
        self.unrolled.add(error.place)
        warn_on_rank0(
            logger,
            "The trace writes out every pass of the loop around %s, since nothing around it "
            "can be one operator; if it takes long, put the loop into the forward of a module "
            "of its own, or into a function at the top of a file, that takes and returns "
            "tensors.",
            error.line,
        )
        return True

    def _write_out(self, model: nn.Module, path: str) -> bool:
        """What was opaque for a loop and cannot be is not any more.

        Returns:
            Whether it was.
        """
        if path in self.functions:
            del self.functions[path]
            self.not_for_loops.add(path)
            return True
        if path not in self.looped:
            return False
        self.not_for_loops.update(_alike(model, path))
        self.unrolled.add(self.looped[path])
        for one in _alike(model, path):
            self.looped.pop(one, None)
            self.whole.pop(one, None)
        return True

    @staticmethod
    def explain(first: TraceError, last: TraceError) -> TraceError:
        """What to tell of a model that cannot be traced, whatever of it is kept whole.

        Args:
            first: what came first.
            last: what came when nothing was left to be kept.
        """
        if isinstance(last, LoopFound):
            return TraceError(str(last))
        if first is last or not isinstance(last, CannotBeOpaque):
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


def share_of(model: nn.Module, path: str) -> float:
    """Share of a model's parameters (numbers, not tensors) that one of its modules has."""
    own = model.get_submodule(path).parameters()
    return sum(p.numel() for p in own) / (sum(p.numel() for p in model.parameters()) or 1)


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
