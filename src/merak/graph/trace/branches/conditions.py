"""Random conditions of a model's control flow: `if torch.rand(()) < p: continue`.

A condition on the batch alone, `if not padding.any(): padding = None`, is traced in the same way.

A trace runs the model once and can take one branch alone. Here the branches are given from outside,
one answer for each condition, and each condition is recorded where it is evaluated; `branches` then
merges the branches.

Numbers of Python's and NumPy's generators become random tensors, which the trace records; for what
else these generators draw see `host_random`. What a generator draws that the model itself has
seeded in the same run is the same in every run, and may stand in a trace as a constant.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from merak.core.errors import TraceError
from merak.core.source_lines import is_library
from merak.graph.trace.branches.host_random import is_probing, refuse_draw

Interval = tuple[float, float]
"""The bounds of a random number."""

MOST_DECISIONS = 1024
"""A model that evaluates more random conditions is assumed to loop for ever."""

_DRAWS = frozenset(
    "rand randn randint rand_like randn_like randint_like randperm bernoulli multinomial normal "
    "uniform_ bernoulli_ normal_ random_ exponential_".split()
)
_BOUNDS = {"a": "low", "b": "high", "low": "low", "high": "high"}
_TO_BOOLEAN = (torch.Tensor.__bool__, torch.Tensor.item)
_NUMBERS = (
    (random, "random"), (random, "uniform"), (np.random, "random"), (np.random, "rand"),
    (np.random, "random_sample"), (np.random, "uniform"),
)  # fmt: skip
"""Host functions that draw a single number, for which torch draws one."""

_STATES: Mapping[Any, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    random: (random.getstate, random.setstate),
    np.random: (np.random.get_state, np.random.set_state),
}
"""Per module, what reads the state of its generator, and what sets it."""
_STATE_FUNCTIONS = frozenset("getstate setstate get_state set_state".split())
_UNIT = frozenset(("rand", "rand_like"))
_BELOW = frozenset("lt le less less_equal __lt__ __le__".split())
_ABOVE = frozenset("gt ge greater greater_equal __gt__ __ge__".split())


class RandomConditions(TorchFunctionMode):
    """Function mode that follows random tensors, and answers conditions on them from outside.

    Args:
        answers: to the conditions, in the order of their evaluation; later ones are False.
        by_batch: whether conditions on the batch alone are answered too.
    """

    def __init__(self, answers: Sequence[bool] = (), by_batch: bool = False) -> None:
        super().__init__()
        self._answers = tuple(answers)
        self._by_batch = by_batch
        self._drawn = WeakIdKeyDictionary()
        self._batch = WeakIdKeyDictionary()
        self.made: list[torch.Tensor] = []
        self.asks_batch = False
        """Whether the model has evaluated a condition on the batch alone."""
        self.seeded: set[Any] = set()
        """The modules, `random` or `numpy.random`, whose generator the model has seeded itself."""
        self._states: dict[Any, Any] = {}

    def restart(self, batch: Sequence[torch.Tensor] = ()) -> None:
        """Forget the conditions of an earlier run; the model begins to run with a batch."""
        self.made.clear()
        self.seeded.clear()
        for column in batch:
            self._batch[column] = True

    def seed(self, owner: Any, seed: Any) -> None:
        """Record that the model seeds a generator, which then draws the same in every run."""
        self._states.setdefault(owner, _STATES[owner][0]())
        if isinstance(seed, (int, np.integer, str, bytes)):
            self.seeded.add(owner)
        else:
            self.seeded.discard(owner)

    def __exit__(self, *error: Any) -> None:
        """Stop following random tensors."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.restore_generators()

    def restore_generators(self) -> None:
        """Restore generators that the model has seeded to their state before its run."""
        for owner, state in self._states.items():
            _STATES[owner][1](state)
        self._states.clear()
        self.seeded.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a condition on a random tensor; pass any other call on."""
        kwargs = kwargs or {}
        if func is torch.Tensor.__bool__ and args[0] in self._drawn:
            return self._decide(args[0])
        if func is torch.Tensor.item and args[0] in self._drawn and args[0].numel() == 1:
            return self._follow(args[0].reshape(()), self._drawn[args[0]])
        if func in _TO_BOOLEAN and args[0] in self._batch and args[0].numel() == 1:
            if func is torch.Tensor.item and args[0].dtype is not torch.bool:
                return func(*args, **kwargs)
            self.asks_batch = True
            if self._by_batch:
                return self._of_batch(func, args[0])
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _DRAWS and _is_fake(result):
            return self._follow(result, (0.0, 1.0) if name in _UNIT else None)
        operands = [a for a in tree_leaves((args, kwargs)) if _is_fake(a)]
        if not any(a in self._drawn for a in operands):
            is_of_batch = any(a in self._batch for a in operands)
            if is_of_batch and not any(a.requires_grad for a in operands):
                self._batch.update((each, True) for each in filter(_is_fake, tree_leaves(result)))
            return result
        if name == "__iter__":
            return iter([self._follow(each, None) for each in result])
        for each in filter(_is_fake, tree_leaves(result)):
            self._follow(each, _interval(name, self._known(args)))
        return result

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is random, or follows from the batch alone."""
        return tensor in self._drawn or tensor in self._batch

    def _of_batch(self, func: Callable[..., Any], boolean: torch.Tensor) -> Any:
        if func is torch.Tensor.__bool__:
            return self._decide(boolean)
        flat = boolean.reshape(())
        self._batch[flat] = True
        return flat

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Any:
        """A random number between two bounds, as a tensor."""
        unit = torch.rand((), dtype=torch.float64)
        return self._follow(unit * (high - low) + low, (low, high))

    def _follow(self, tensor: torch.Tensor, interval: Interval | None) -> torch.Tensor:
        self._drawn[tensor] = interval
        return tensor

    def _known(self, args: Sequence[Any]) -> list[Interval | None]:
        """The intervals that the operands are in."""
        return [
            self._drawn.get(a) if isinstance(a, torch.Tensor) else (a, a)
            for a in args
            if isinstance(a, (torch.Tensor, int, float))
        ]

    def _decide(self, drawn: torch.Tensor) -> bool:
        interval = self._drawn.get(drawn)
        if interval is not None and interval[0] == interval[1]:
            return bool(interval[0])
        number = len(self.made)
        if number == MOST_DECISIONS:
            raise TraceError(
                f"the model evaluates more than {MOST_DECISIONS} random conditions in one run; "
                "let it evaluate one for each layer, or switch the feature off in its config."
            )
        flat = drawn.reshape(())
        self.made.append(flat.clone() if flat.dtype is torch.bool else flat != 0)
        return self._answers[number] if number < len(self._answers) else False


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


def _interval(name: str, operands: Sequence[Interval | None]) -> Interval | None:
    """Certain result of a comparison: (0, 0) false, (1, 1) true, but for a draw of the bound."""
    if len(operands) != 2 or operands[0] is None or operands[1] is None:
        return None
    (low, high), (other_low, other_high) = operands[0], operands[1]
    below = high <= other_low
    above = low >= other_high
    if not (below or above) or name not in _BELOW | _ABOVE:
        return None
    boolean = float(below == (name in _BELOW))
    return boolean, boolean


@contextmanager
def host_random_in_torch(model: nn.Module, draws: RandomConditions) -> Iterator[None]:
    """Replace scalars from Python's and NumPy's generators by random tensors of torch.

    Args:
        model: functions of `random` that its modules' files have imported are replaced there too.
        draws: the mode that follows random tensors.
    """
    replaced = {
        id(function): _of_model(owner, name, function, draws)
        for owner, name, function in _generators()
    }
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[n] for n in names if n in sys.modules and not n.startswith("torch.")]
    with ExitStack() as stack:
        for owner, name, function in list(_generators()):
            stack.enter_context(mock.patch.object(owner, name, replaced[id(function)]))
        for file in files:
            for name, value in list(vars(file).items()):
                if id(value) in replaced:
                    stack.enter_context(mock.patch.object(file, name, replaced[id(value)]))
        yield
    draws.restore_generators()


def _generators() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The functions that draw from, or seed, Python's and NumPy's global generators."""
    for owner in (random, np.random):
        for name, function in vars(owner).items():
            bound = getattr(function, "__self__", None)
            is_own = isinstance(bound, (random.Random, np.random.RandomState))
            if name == "seed" or (is_own and name not in _STATE_FUNCTIONS):
                yield owner, name, function


def _of_model(
    owner: Any, name: str, original: Callable[..., Any], draws: RandomConditions
) -> Callable[..., Any]:
    """A generator's function that gives the model random tensors, and other callers numbers."""
    ours = draws.uniform if (owner, name) in _NUMBERS else None
    most = 2 if name == "uniform" else 0
    tracing = threading.get_ident()  # an opaque module is probed in a thread of its own

    def draw(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if threading.get_ident() != tracing:
            return original(*args, **kwargs)
        if is_library(frame.f_code.co_filename) or is_probing(frame):
            return original(*args, **kwargs)
        if name == "seed":
            draws.seed(owner, next(iter((*args, *kwargs.values())), None))
        if name == "seed" or owner in draws.seeded:
            return original(*args, **kwargs)
        bounds = (*args, *kwargs.values())
        if ours and len(bounds) <= most and all(isinstance(b, (int, float)) for b in bounds):
            return ours(*args, **{_BOUNDS[key]: bound for key, bound in kwargs.items()})
        refuse_draw(frame)
        return original(*args, **kwargs)

    return draw
