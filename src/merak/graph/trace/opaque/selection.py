"""Selection of opaque modules: the innermost around code that cannot be traced."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from torch import nn

from merak.core.errors import TraceError
from merak.core.rank0 import AT_ONCE, is_rank0
from merak.graph.trace.explain import FailsOnFakes, UntraceableError, causes
from merak.graph.trace.opaque.dynamic_region import DynamicSizes
from merak.graph.trace.opaque.loops import LoopFound, Place
from merak.graph.trace.opaque.operator import LOSSES
from merak.graph.trace.opaque.probe import CannotBeOpaque

logger = logging.getLogger(__name__)

Traced = TypeVar("Traced")

MOST_OPAQUE = 0.5
"""With a larger fraction of the parameters in opaque modules, another way is tried."""


@dataclass(slots=True)
class OpaqueSelection:
    """Opaque modules and functions of one model; they grow with every trace that fails.

    Args:
        modules: paths of the opaque modules, and why each is.
        refused: kinds of modules that cannot be opaque.
        without_cache: whether the model makes no key-value cache; else opaque modules may be called
            with one.
        by_batch: whether both branches of conditions on the batch alone are traced, as those of
            random conditions are.
        asks_batch: whether a trace that failed had evaluated such a condition.
        sizes: policy for data-dependent sizes outside of opaque modules.
        functions: names of the functions that are opaque for their loops, and why.
        not_for_loops: names and paths of functions and modules that cannot be.
        looped: paths of the modules that are opaque for a loop, and the code that it stands in.
        unrolled: code whose loops are unrolled.
        failing: paths of modules that failed on fake tensors, and may run on real ones.
    """

    modules: dict[str, str] = field(default_factory=dict)
    refused: set[tuple[type, str]] = field(default_factory=set)
    without_cache: bool = False
    by_batch: bool = False
    asks_batch: bool = False
    sizes: DynamicSizes = DynamicSizes.REFUSED
    functions: dict[str, str] = field(default_factory=dict)
    not_for_loops: set[str] = field(default_factory=set)
    looped: dict[str, Place] = field(default_factory=dict)
    unrolled: set[Place] = field(default_factory=set)
    failing: dict[str, FailsOnFakes] = field(default_factory=dict)

    def forget_loops(self) -> None:
        """Forget decisions about loops: those of another batch shape may be shorter."""
        for path in self.looped:
            self.modules.pop(path, None)
        for known in (self.functions, self.not_for_loops, self.looped, self.unrolled):
            known.clear()

    def known(self) -> tuple[dict[str, str], dict[str, str]]:
        """The modules and functions that are opaque now."""
        return dict(self.modules), dict(self.functions)

    def adopt(self, other: OpaqueSelection) -> None:
        """Adopt another selection."""
        self.modules, self.refused = other.modules, other.refused
        self.without_cache, self.by_batch = other.without_cache, other.by_batch
        self.sizes = other.sizes
        self.functions, self.not_for_loops = other.functions, other.not_for_loops
        self.looped, self.unrolled = other.looped, other.unrolled

    def trace_until_supported(self, model: nn.Module, trace: Callable[[], Traced]) -> Traced:
        """Trace with more and more opaque modules, until it succeeds.

        Args:
            model: the model.
            trace: traces it with the opaque modules so far.

        Raises:
            TraceError: it cannot be traced, whichever modules are opaque.
        """
        try:
            return self._enough(model, trace)
        except UntraceableError as error:
            if self.sizes is not DynamicSizes.REFUSED or isinstance(error, FailsOnFakes):
                raise
            known = dict(self.modules), set(self.refused), self.without_cache
            for sizes in (DynamicSizes.REGIONS, DynamicSizes.NON_EMPTY):
                self.modules, self.refused, self.sizes = {}, set(), sizes
                try:
                    return self._enough(model, trace)
                except TraceError:
                    continue
            self.modules, self.refused, self.without_cache = known
            self.sizes = DynamicSizes.REFUSED
            raise error from None  # the first error names the cause without any fallback

    def _enough(self, model: nn.Module, trace: Callable[[], Traced]) -> Traced:
        first: TraceError | None = None
        innermost: TraceError | None = None
        while True:
            try:
                return trace()
            except TraceError as error:
                first = first or error
                if isinstance(error, CannotBeOpaque):
                    innermost = innermost or error
                if not self.widen(model, error):
                    last = innermost if isinstance(error, CannotBeOpaque) else error
                    raise self.explain(first, last or error) from None

    def widen(self, model: nn.Module, error: TraceError) -> bool:
        """Make the innermost module around a failure opaque that can be, and those like it.

        Returns:
            Whether there was one.
        """
        if isinstance(error, CannotBeOpaque) and error.is_object and not self.without_cache:
            self.without_cache = True  # the object may be one
            return True
        if isinstance(error, LoopFound):
            return self._make_loop_opaque(model, error)
        if isinstance(error, CannotBeOpaque) and error.path in LOSSES:
            return False  # nothing is around it
        if isinstance(error, CannotBeOpaque) and self._unroll(model, error.path):
            return True
        paths = _around(model, error)
        why = ""
        if isinstance(error, CannotBeOpaque):
            self._refuse(model, error.path)
            if error.path in self.failing:  # on real values, too
                raise self.failing[error.path] from None
            why = self.modules.pop(error.path, error.why)
            for path in _modules_of_kind(model, error.path):
                self.modules.pop(path, None)
            inside = [p for p in paths if f"{error.path}.".startswith(f"{p}.")]
            paths = inside or _outer(error.path)
        elif isinstance(error, UntraceableError):
            why = error.why
        else:
            return False
        if isinstance(error, FailsOnFakes):  # the innermost alone: outer ones take long to try
            paths = paths[-1:]
            self.failing |= dict.fromkeys(paths, error)
        for path in reversed(paths):
            # One that is opaque already and fails in its call would fail again and again.
            if path and path not in self.modules and _kind(model, path) not in self.refused:
                self._make_opaque(model, path, why)
                return True
        return False

    def _make_loop_opaque(self, model: nn.Module, error: LoopFound) -> bool:
        """Make a function around a loop opaque, or the module; else let the loop be unrolled.

        A loop is unrolled where one module has most of the parameters, if a trace can be so long.
        """
        for name in error.functions:
            if name not in self.not_for_loops and name not in self.functions:
                self.functions[name] = error.why
                return True
        path = error.modules[-1] if error.modules else ""
        can_be = path and path not in self.modules and path not in self.not_for_loops
        if can_be and (error.is_too_long or share_of(model, path) <= MOST_OPAQUE):
            self._make_opaque(model, path, error.why)
            self.looped |= dict.fromkeys(_modules_of_kind(model, path), error.place)
            return True
        if error.is_too_long:
            return False
        self.unrolled.add(error.place)
        if is_rank0():
            logger.warning(
                "The trace unrolls the loop around %s, since nothing around it "
                "can be one operator; if it takes long, put the loop into the forward of a module "
                "of its own, or into a function at the top of a file, that takes and returns "
                "tensors.",
                error.line,
                extra={AT_ONCE: True},
            )
        return True

    def _unroll(self, model: nn.Module, path: str) -> bool:
        """Give up an opaque function or module of a loop that cannot be one.

        Returns:
            Whether it was.
        """
        if path in self.functions:
            del self.functions[path]
            self.not_for_loops.add(path)
            return True
        if path not in self.looped:
            return False
        self.not_for_loops.update(_modules_of_kind(model, path))
        self.unrolled.add(self.looped[path])
        for one in _modules_of_kind(model, path):
            self.looped.pop(one, None)
            self.modules.pop(one, None)
        return True

    @staticmethod
    def explain(first: TraceError, last: TraceError) -> TraceError:
        """The error of a model that cannot be traced, whichever modules are opaque.

        Args:
            first: the first error.
            last: the error when no further module could be opaque; of modules that cannot be, the
                innermost's.
        """
        if isinstance(last, LoopFound):
            return TraceError(str(last))
        if first is last or not isinstance(last, CannotBeOpaque):
            return last
        text = f"{str(first).rstrip('.')}; and the module around it, {last}."
        return UntraceableError(text, getattr(first, "why", ""))

    def _refuse(self, model: nn.Module, path: str) -> None:
        self.refused.add(_kind(model, path))

    def _make_opaque(self, model: nn.Module, path: str, why: str) -> None:
        for one in _modules_of_kind(model, path):
            if any(f"{one}.".startswith(f"{outer}.") for outer in self.modules):
                continue
            for inner in [p for p in self.modules if p.startswith(f"{one}.")]:
                del self.modules[inner]
            self.modules[one] = why


def share_of(model: nn.Module, path: str) -> float:
    """Fraction of a model's parameter elements that one of its modules has."""
    own = model.get_submodule(path).parameters()
    return sum(p.numel() for p in own) / (sum(p.numel() for p in model.parameters()) or 1)


def _outer(path: str) -> list[str]:
    """Paths of the modules around one, outermost first."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _kind(model: nn.Module, path: str) -> tuple[type, str]:
    """The kind of a module: its class, and its path with all numbers alike."""
    return type(model.get_submodule(path)), re.sub(r"\d+", "*", path)


def _modules_of_kind(model: nn.Module, path: str) -> list[str]:
    kind = _kind(model, path)
    return [name for name, _ in model.named_modules() if name and _kind(model, name) == kind]


def _around(model: nn.Module, error: BaseException) -> list[str]:
    """Paths of the modules whose forward was under way when an error was raised, outermost first.

    Modules are compared by their dict: a trace may replace one by an object that shares it.
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
