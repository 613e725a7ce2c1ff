"""Python state of a model during training: a change is an input of the graphs, or traces anew.

A parameter that is frozen during training gets no gradient from then on; one that was frozen when
the graphs were traced stays so.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from merak.core.announce import announce
from merak.core.errors import MerakError, TraceError, TrainingError
from merak.core.rank0 import warn_once
from merak.core.tensor_meta import Signature, TensorMeta
from merak.graph.ir.state_read import StateRead
from merak.graph.segment.build import GraphSource
from merak.graph.trace.state.functions import function_reads
from merak.graph.trace.state.kept import shown
from merak.graph.trace.state.places import StateLeft
from merak.graph.trace.state.slots import Slot
from merak.graph.trace.state.snapshot import Snapshot
from merak.graph.trace.state.watch import (
    StateWatch,
    has_weights,
    is_number,
    is_tensor,
    sentence,
    where,
)
from merak.graph.weights.laid_out import methods_allowed

logger = logging.getLogger(__name__)

MANY = 5
"""After so many traces for one value's changes, people are told of them."""

_VALUE = (
    "the code asks for its value (if, min, math.exp, float, a size): compute with it in torch "
    "operators alone (torch.where, clamp, exp), which take torch.as_tensor(value)"
)
_TENSOR = "it is no buffer: register it with register_buffer, and write into it in place (copy_)"
_OTHER = "it is no number, which could be an input of the graph: change a number in its place"


class PythonState:
    """The Python values that a model's graphs depend on.

    A number that changes becomes an input of the graphs, where they can be traced with it; any
    other change traces the model anew.

    Args:
        source: the model.

    Attributes:
        is_stale: whether the model was to be traced anew when `described` was last called.
    """

    def __init__(self, source: GraphSource) -> None:
        self.is_stale = False
        self._source = source
        self._watch = StateWatch(source.model, source.loss_fn)
        self._watch.add(function_reads(source.model, source.loss_fn))
        self._constant: set[str] = set()  # numbers that cannot be inputs
        self._num_traces: Counter[str] = Counter()
        self._changed: dict[str, object] = {}
        self._last: dict[str, float] = {}  # of numbers that are inputs
        is_double = any(p.dtype == torch.float64 for p in source.model.parameters())
        self._dtype = torch.float64 if is_double else torch.get_default_dtype()
        self._dtypes: dict[str, torch.dtype] = {}  # of numbers that are or were inputs
        # By their places, since a rank's shards take the place of whole parameters.
        self._parameters = [
            (f"{path}.{key}".removeprefix("."), module, key, parameter.requires_grad)
            for path, module in source.model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]

    def add(self, reads: Sequence[StateRead]) -> None:
        """Watch what a trace has read, with the values of now."""
        self._watch.add(read for read in reads if str(read) not in self._source.numbers)

    def frozen(self) -> set[str]:
        """Names of the parameters that have been frozen since the model was traced.

        Raises:
            TrainingError: a parameter is to be trained that was frozen then.
        """
        frozen = set()
        for name, module, key, is_trained in self._parameters:
            # The dict's own `get`: no wait for rows that other replicas have updated (ZeRO).
            parameter = dict.get(module._parameters, key)
            if parameter is None or parameter.requires_grad == is_trained:
                continue
            if not is_trained:
                raise TrainingError(
                    f"{name} was frozen when training began, so that no gradient is computed for "
                    "it, and has requires_grad now; leave it on from the start, and freeze it "
                    "(requires_grad_(False)) until it is to be trained, for example in "
                    "on_train_begin of a callback."
                )
            frozen.add(name)
        return frozen

    def described(self) -> dict[str, str]:
        """Changes of Python state since the trace, as text that ranks compare."""
        watched = self._watched()
        self.is_stale = bool(watched or any(map(self._is_other_kind, self._numbers())))
        changed = self._changed | {str(c): c.new for c in watched}
        changed |= {name: slot.get() for name, slot in self._numbers().items()}
        found = {name: shown(value) for name, value in changed.items()}
        return found | {f"{name}.requires_grad": "False" for name in self.frozen()}

    @property
    def signature(self) -> Signature:
        """The columns of those numbers that are inputs."""
        return tuple((name, TensorMeta((), self._dtypes[name])) for name in self._source.numbers)

    def columns(self) -> dict[str, torch.Tensor]:
        """The values of those numbers that are inputs, scalars on the CPU, by their column."""
        self._last = {name: slot.get() for name, slot in self._numbers().items()}
        return {
            name: torch.tensor(value, dtype=self._dtypes[name])
            for name, value in self._last.items()
        }

    def _numbers(self) -> Mapping[str, Slot]:
        return self._source.numbers

    def changes(self) -> list[StateLeft]:
        """Changes of Python state since the trace, but for numbers that are inputs of the graph."""
        found = self._watched()
        for name, slot in list(self._numbers().items()):
            if self._is_other_kind(name):
                del self._source.numbers[name]
                (place,) = Snapshot.of_slots([slot]).places
                found.append(StateLeft(place, "", self._last.get(name), slot.get()))
                self._watch.add([slot.read])
        return found

    def _is_other_kind(self, name: str) -> bool:
        """Whether an input's value is no number of its dtype any more."""
        is_whole = not self._dtypes[name].is_floating_point
        return type(self._numbers()[name].get()) not in ((int,) if is_whole else (float, int))

    def _watched(self) -> list[StateLeft]:
        with methods_allowed(self._source.model):  # refusals are no code of the user
            return self._watch.changes()

    def adopt(self, changes: Sequence[StateLeft], trace: Callable[[], object]) -> None:
        """Trace the model with what has changed.

        Args:
            changes: as of `changes`.
            trace: forgets all graphs, and traces the model for its usual batch.

        Raises:
            TraceError: the model cannot be traced as it is now.
        """
        started = time.perf_counter()
        for change in changes:
            if has_weights(change):
                raise TraceError(
                    f"{sentence(change)}, with parameters or buffers that training has not begun "
                    "with; set it before training, or write into them in place."
                )
        with methods_allowed(self._source.model):  # as it was looked at
            self._watch.accept(changes)
        self._changed |= {str(change): change.new for change in changes}
        numbers = [change for change in changes if is_number(change)]
        for c in numbers:
            is_whole = type(c.old) is type(c.new) is int
            self._dtypes[str(c)] = torch.int64 if is_whole else self._dtype
        inputs = self._make_inputs([c.place.owner for c in numbers], trace)
        if not inputs:
            self._trace_anew(changes, trace)
        for change in changes:
            label = str(change)
            if label in inputs:
                self._watch.remove(label)
                announce("%s: it is an input of the graph from now on", sentence(change))
                continue
            self._num_traces[label] += 1
            logger.info("%s: the model has been traced anew", sentence(change))
            if self._num_traces[label] == MANY:
                self._warn(change, time.perf_counter() - started)

    def _make_inputs(self, slots: Sequence[Slot], trace: Callable[[], object]) -> set[str]:
        """Make numbers inputs of the graphs, all or some of them, and trace the model with these.

        Returns:
            Those that are; where there are none, the model is still to be traced.
        """
        numbers = {slot.label: slot for slot in slots if slot.label not in self._constant}
        if not numbers or self._trace_with(numbers, trace):
            return set(numbers)
        found: set[str] = set()
        if len(numbers) > 1:
            found = {
                name for name, slot in numbers.items() if self._trace_with({name: slot}, trace)
            }
        self._constant.update(numbers.keys() - found)
        if found:
            trace()  # the last attempt may have been one that failed
        return found

    def _trace_with(self, numbers: Mapping[str, Slot], trace: Callable[[], object]) -> bool:
        """Whether the model can be traced with further numbers as inputs, no more opaque."""
        source, before = self._source, copy.deepcopy(self._source.opaque)
        source.numbers.update(numbers)
        try:
            trace()
            if (
                source.opaque.known() == before.known()
                and source.opaque.by_batch == before.by_batch
            ):
                return True
        except Exception as error:  # of any step behind the trace: it is done without them
            logger.debug("%s cannot be inputs: %s", ", ".join(numbers), error)
        for name in numbers:
            del source.numbers[name]
        source.opaque.adopt(before)
        return False

    def _trace_anew(self, changes: Sequence[StateLeft], trace: Callable[[], object]) -> None:
        try:
            trace()
        except MerakError as error:
            change = changes[0]
            raise TraceError(
                f"{sentence(change)}, which forward reads{where(change)}, and with that the "
                f"training cannot go on: {str(error).rstrip('.')}; set it before training, or make "
                "two runs of it."
            ) from error

    def _warn(self, change: StateLeft, seconds: float) -> None:
        warn_once(
            logger,
            "%s has changed %d times, and each time the model is traced anew (%.1f s), since %s, "
            "or change it less often; forward reads it%s.",
            change,
            MANY,
            seconds,
            _TENSOR if is_tensor(change) else _VALUE if is_number(change) else _OTHER,
            where(change),
        )
