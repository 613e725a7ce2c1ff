"""Recording of the Python state that a model reads while it is traced."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from merak.core.source_lines import model_line
from merak.graph.ir.state_read import MODEL, StateRead
from merak.graph.trace.state.holders import Holder, attributes, find_holders
from merak.graph.trace.state.slots import MISSING, PLAIN, is_plain, is_plain_dict

_RECORDED = frozenset((*PLAIN, list, tuple, dict))
_OF_TORCH = frozenset(dir(nn.Module())) | {"attribute_map"}
"""Attributes of every module; which of them a run reads does not depend on the model."""
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8


class StateReads:
    """The plain attributes of modules and configs that a trace reads.

    Attributes that forward itself sets, such as counters and the lengths of tables, are left out.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.

    Attributes:
        found: the reads, once forward has run.
        counted: numbers of the model that forward reads and sets, as it has left them.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model = model
        holders = find_holders(model, loss_fn)
        # A module may run under another object, which torch.export makes, with the same attributes.
        self._holders = {id(attributes(holder.value)): holder for holder in holders}
        self._before = {key: _copied(holder) for key, holder in self._holders.items()}
        self._sources: dict[tuple[int, str], str] = {}
        self._seen: set[tuple[int, str]] = set()
        self._written: dict[tuple[int, str], Any] = {}
        self.found: tuple[StateRead, ...] = ()
        self.counted: dict[StateRead, int | float] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which reads are recorded."""
        # By the end of the context torch.export has undone what forward set on a module.
        handle = self._model.register_forward_hook(lambda *_: self._find_written())
        held = {type(h.value) for h in self._holders.values() if not _is_module(h)}
        classes: list[Any] = [cls for cls in (nn.Module, *held) if _can_patch(cls)]
        patched: list[tuple[Any, Any]] = []
        try:
            for cls in classes:
                patched.append((cls, cls.__dict__.get("__getattribute__")))
                cls.__getattribute__ = self._recording(cls.__getattribute__)
            yield
            self._find_written()  # of the loss function, too
            self.found = tuple(self._reads())
            self.counted = dict(self._counters())
        finally:
            handle.remove()
            for cls, own in reversed(patched):
                if own is None:
                    del cls.__getattribute__
                else:
                    cls.__getattribute__ = own

    def _recording(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        whole = {type(holder.value) for holder in self._holders.values()}
        recorded = _RECORDED | {cls for cls in whole if not _can_patch(cls)}
        seen, note = self._seen, self._note
        dict_of = object.__getattribute__

        def recording(holder: Any, name: str) -> Any:
            value = original(holder, name)
            if type(value) in recorded and name[:2] != "__":
                key = (id(dict_of(holder, "__dict__")), name)
                if key not in seen:
                    seen.add(key)
                    note(key, holder, value)
            return value

        return recording

    def _note(self, key: tuple[int, str], holder: Any, value: Any) -> None:
        name = key[1]
        if key[0] not in self._holders or name in _OF_TORCH:
            return
        if type(value) not in _RECORDED:  # such as a SimpleNamespace, whose reads nothing sees
            line = model_line(sys._getframe(2))
            inner = id(attributes(value))
            known = self._before.get(inner, {})
            self._sources |= {(inner, n): line for n, v in known.items() if is_plain(v)}
            return
        if not (is_plain(value) or is_plain_dict(value)):
            return
        name = getattr(type(holder), "attribute_map", {}).get(name, name)
        if name in attributes(holder) or _is_of_class(type(holder), name):
            self._sources[key[0], name] = model_line(sys._getframe(2))

    def outside(self, modules: Collection[str]) -> tuple[StateRead, ...]:
        """The reads of other places than some modules.

        Args:
            modules: paths of opaque modules, whose own code runs, and reads, in every step.
        """
        inner = tuple(f"{path}." for path in modules)
        return tuple(
            read
            for read in self.found
            if read.root != MODEL or not f"{read.path}.".startswith(inner)
        )

    def _find_written(self) -> None:
        for key, name in self._sources:
            before = self._before[key].get(name, MISSING)
            now = attributes(self._holders[key].value).get(name, MISSING)
            if type(before) is not type(now) or before != now:
                self._written.setdefault((key, name), now)

    def _counters(self) -> Iterator[tuple[StateRead, int | float]]:
        for (key, name), now in self._written.items():
            holder, before = self._holders[key], self._before[key].get(name)
            if type(now) in (int, float) and type(before) in (int, float) and holder.root == MODEL:
                steps, source = (*holder.steps, name), self._sources[key, name]
                yield StateRead(holder.root, holder.path, steps, source), now

    def _reads(self) -> Iterator[StateRead]:
        for (key, name), source in self._sources.items():
            if (key, name) in self._written:
                continue
            holder = self._holders[key]
            steps = (*holder.steps, name)
            value = self._before[key].get(name)
            keys = [f"[{item}]" for item in value] if type(value) is dict else []
            for end in [(*steps, item) for item in keys] or [steps]:
                yield StateRead(holder.root, holder.path, end, source)


def _is_module(holder: Holder) -> bool:
    return isinstance(holder.value, nn.Module)


def _can_patch(cls: Any) -> bool:
    """Whether a class may be given another `__getattribute__`: it is not built into Python."""
    return bool(cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _IMMUTABLE)


def _copied(holder: Holder) -> dict[str, Any]:
    own = attributes(holder.value)
    return {n: copy.copy(v) if type(v) in (list, dict) else v for n, v in own.items()
            if type(v) in _RECORDED}  # fmt: skip


def _is_of_class(cls: type, name: str) -> bool:
    """Whether a class itself has a plain attribute, which is no property."""
    return type(inspect.getattr_static(cls, name, MISSING)) in _RECORDED
