"""Recording of the Python state that a model reads while it is traced."""

from __future__ import annotations

import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from merak.core.source_lines import MERAK, is_library, model_line, with_text
from merak.graph.ir.state_read import MODEL, StateRead
from merak.graph.trace.state.functions import lines_that_store, reached_functions
from merak.graph.trace.state.holders import (
    OF_STEPS,
    Holder,
    attributes,
    closure,
    find_holders,
    reads_by_dict,
)
from merak.graph.trace.state.kept import CONTAINERS, FUNCTIONS, items_of
from merak.graph.trace.state.outside import Outside, recorded_lines
from merak.graph.trace.state.places import CONTAINER_KINDS, Place, StateLeft
from merak.graph.trace.state.slots import MISSING, PLAIN, Slot, is_plain, is_plain_dict

_CONSTANTS = frozenset((torch.Tensor, *FUNCTIONS))
_RECORDED = frozenset((*PLAIN, *CONTAINERS)) | _CONSTANTS
_NOTED = _RECORDED | {type(MISSING)}
"""Types of values whose reads are recorded, and of none."""
_STORES: dict[type, tuple[str, ...]] = {
    Slot: ("STORE_GLOBAL", "STORE_NAME"),
    types.FunctionType: ("STORE_DEREF",),
}
"""Operations of Python's bytecode that set a global, and a variable of a closure."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_REGISTER = ("add_module", "register_buffer", "register_parameter")
_OF_TORCH = frozenset(dir(nn.Module())) | {"attribute_map"}
"""Attributes of every module; which of them a run reads does not depend on the model."""
_HEAP_TYPE, _IMMUTABLE = 1 << 9, 1 << 8


class StateReads:
    """The attributes of modules and configs that a trace reads: values, plain tensors, functions.

    Those that it asks for and that are not there are among them; attributes that forward itself
    sets, such as counters and the lengths of tables, are not.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.

    Attributes:
        loss_fn: as given.
        holders: modules, configs and other objects, by the identity of their attributes.
        lines: of the model, which first read lists and dicts, by attributes' identity and name.
        writes: the line that has last set an attribute, likewise; or what is outside of the model,
            by its kind and key.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model, self.loss_fn = model, loss_fn
        holders = find_holders(model, loss_fn)
        # A module may run under another object, which torch.export makes, with the same attributes.
        self.holders = {id(attributes(holder.value)): holder for holder in holders}
        self._sources: dict[tuple[int, str], str] = {}
        self._absent: dict[tuple[int, str], str] = {}
        self._seen: set[tuple[int, str]] = set()
        self._unread: set[tuple[int, str]] = set()  # set before anything has read them
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        self.lines: dict[tuple[int, str], str] = {}
        self.writes: dict[tuple[Any, Any], str] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is recorded: code that runs as Python in each step."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which reads, and writes of attributes, are recorded."""
        held = {type(h.value) for h in self.holders.values() if not _is_module(h)}
        classes: list[Any] = [cls for cls in (nn.Module, *held) if _can_patch(cls)]
        around = [(cls, "__getattribute__", self._recording) for cls in classes]
        around += [(cls, "__setattr__", self._noting_writes) for cls in classes]
        around += [(nn.Module, name, self._noting_writes) for name in _REGISTER]
        patched: list[tuple[Any, str, Any]] = []
        try:
            for cls, name, wrapped in around:
                patched.append((cls, name, cls.__dict__.get(name)))
                setattr(cls, name, wrapped(getattr(cls, name)))
            with recorded_lines(self.writes):
                yield
        finally:
            for cls, name, own in reversed(patched):
                if own is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, own)

    def _noting_writes(self, original: Callable[..., None]) -> Callable[..., None]:
        writes, dict_of = self.writes, object.__getattribute__
        seen, unread = self._seen, self._unread

        def noting(holder: Any, name: str, *value: Any, **named: Any) -> None:
            key = id(dict_of(holder, "__dict__")), name
            if not self._is_paused:
                if key not in writes and key not in seen:
                    unread.add(key)
                writes[key] = model_line(sys._getframe(1))
            original(holder, name, *value, **named)

        return noting

    def _recording(self, original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        whole = {type(holder.value) for holder in self.holders.values()}
        recorded = _RECORDED | {cls for cls in whole if not _can_patch(cls)}
        seen, note, note_absent = self._seen, self._note, self._note_absent
        names = self._names
        dict_of = object.__getattribute__

        def recording(holder: Any, name: str) -> Any:
            try:
                value = original(holder, name)
            except AttributeError:
                note_absent(holder, name)
                raise
            if type(value) in recorded and name[:2] != "__" and not self._is_paused:
                key = (id(dict_of(holder, "__dict__")), name)
                if key not in seen:
                    seen.add(key)
                    names[key[0]].append(name)
                    note(key, holder, value)
            return value

        return recording

    def _note(self, key: tuple[int, str], holder: Any, value: Any) -> None:
        name = key[1]
        if key[0] not in self.holders or name in _OF_TORCH:
            return
        if type(value) not in _RECORDED:  # such as a SimpleNamespace, whose reads nothing sees
            line = model_line(sys._getframe(2))
            inner = id(attributes(value))
            known = attributes(value)
            self._sources |= {(inner, n): line for n, v in known.items() if is_plain(v)}
            self._sources[inner, "__dict__"] = line  # for names that come later
            return
        if type(value) in CONTAINERS:
            self.lines[key] = model_line(sys._getframe(2))
        if type(value) is types.MethodType and is_library(sys._getframe(2).f_code.co_filename):
            return  # of torch's modules, by their own code
        name = getattr(type(holder), "attribute_map", {}).get(name, name)
        if name in attributes(holder) or _is_of_class(type(holder), name):
            self._sources[key[0], name] = model_line(sys._getframe(2))

    def _note_absent(self, holder: Any, name: str) -> None:
        own = attributes(holder)
        key = (id(own), name)
        is_other = key[0] not in self.holders or name[:2] == "__" or self._is_paused
        if key in self._seen or is_other:
            return
        parts = (own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        if name in _OF_TORCH or any(name in part for part in parts):
            self._seen.add(key)
            self._names[key[0]].append(name)
        elif not is_library(sys._getframe(2).f_code.co_filename):
            self._seen.add(key)
            self._names[key[0]].append(name)
            self._absent[key] = model_line(sys._getframe(2))

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether code has read an attribute of a module so far."""
        return (id(attributes(module)), name) in self._seen

    def repeat(self, modules: Mapping[nn.Module, nn.Module]) -> None:
        """Copy the recorded reads of some modules to others, whose code does not run.

        Args:
            modules: by the module whose code has run, the one in its place.
        """
        for one, like in modules.items():
            key, other = id(attributes(one)), id(attributes(like))
            for name in self._names[key]:
                if (other, name) not in self._seen:
                    self._seen.add((other, name))
                    self._names[other].append(name)
                for known in (self._sources, self._absent):
                    if (key, name) in known:
                        known[other, name] = known[key, name]

    def may_have_read(self, left: StateLeft) -> bool:
        """Whether code may have read what a call has left in some place, or would have."""
        key = left.attribute if left.place.kind is object else None
        if key is None or key[0] not in self.holders or type(left.old) not in _NOTED:
            return True
        return key in self._seen or reads_by_dict(type(self.holders[key[0]].value).__mro__)

    def goes_on(self, left: StateLeft) -> bool:
        """Whether code has read what was in a place before it has set something else there."""
        return left.attribute not in self._unread and self.may_have_read(left)

    def is_mine(self, left: StateLeft) -> bool:
        """Whether Merak's own code has set an attribute."""
        key = left.attribute
        return key is not None and self.writes.get(key, "").startswith(MERAK)

    def before(self, left: StateLeft) -> Any:
        """The value that code read in a place before a call; an object may have its class's."""
        key = left.attribute
        if left.old is not MISSING or left.place.kind is not object or key is None:
            return left.old
        holder = self.holders.get(key[0])
        return left.old if holder is None else getattr(type(holder.value), key[1], MISSING)

    def line(self, left: StateLeft) -> str:
        """The line of the model that writes what a call has left; else one that reads its place."""
        key = left.attribute
        name = str(left.key or left.place.label.rpartition(".")[2])
        if left.place.kind is Outside:
            name = self._name_in_code(left.key)
            line = self.writes.get((left.place.owner.form, left.key), "")
            return line or self._first(name, "STORE_ATTR", *_LOADS)
        if left.place.kind in (*CONTAINER_KINDS, torch.Tensor, np.ndarray, Iterator):
            known = key is not None and (
                self.lines.get(key) or self._sources.get(key) or self._absent.get(key)
            )
            # Else the innermost name that code of the model has: it may call a container's own.
            names = [part.partition("[")[0] for part in reversed(left.place.label.split("."))]
            if names[0].endswith("_hooks"):
                names[0] = f"register{names[0][:-1]}"
            found = next((line for n in names if (line := self._first(n, *_LOADS))), "")
            return known or left.place.source or found
        written = "" if key is None else self.writes.get(key, "")
        stores = _STORES.get(left.place.kind, ("STORE_ATTR", "DELETE_ATTR"))
        return written or self._first(name, *stores, place=left.place) or left.place.source

    def _name_in_code(self, key: Any) -> str:
        """The name by which code reaches a setting of torch, or a context variable."""
        if isinstance(key, str):
            return key.rpartition(".")[2]
        for function in reached_functions(self._model, self.loss_fn):
            for name, value in (function.__globals__ | closure(function)).items():
                if value is key:
                    return name
        return str(key.name)

    def _first(self, name: str, *operations: str, place: Place | None = None) -> str:
        """The first line that does so; one that names the place, and of its function, goes first.

        Args:
            name: of an attribute or variable.
            *operations: of Python's bytecode.
            place: that has it; None for any.
        """
        lines = lines_that_store(self._model, self.loss_fn, name, *operations)
        if place is None or len(lines) < 2:
            return (lines or [""])[0]
        named = f"{place.label.rpartition('.')[2]}.{name}"
        file, _, number = place.source.rpartition(":")
        return min(
            lines,
            key=lambda line: (
                named not in with_text(line),
                bool(file) and (line.rpartition(":")[0] != file or _number(line) < int(number)),
            ),
        )

    def makes_weights(self, left: StateLeft) -> bool:
        """Whether a call has left parameters, or a module with parameters, that it has made."""
        new = left.new
        return isinstance(new, nn.Parameter) or (
            isinstance(new, nn.Module)
            and any(
                id(attributes(module)) not in self.holders
                and list(module.parameters(recurse=False))
                for module in new.modules()
            )
        )

    def found(
        self,
        left: Iterable[StateLeft],
        written: Set[tuple[int, str] | None],
        opaque: Collection[str],
    ) -> tuple[StateRead, ...]:
        """Reads of Python state that a trace has made constants of.

        Args:
            left: what the model has set, which is none.
            written: attributes whose tensors it has written into.
            opaque: paths of opaque modules, whose own code runs, and reads, in every step.
        """
        inner = tuple(f"{path}." for path in opaque)
        return tuple(
            read
            for read in self._reads({one.attribute for one in left} | written)
            if read.root != MODEL or not f"{read.path}.".startswith(inner)
        )

    def _reads(self, written: set[tuple[int, str] | None]) -> Iterator[StateRead]:
        for (key, name), source in self._sources.items():
            if (key, name) in written:
                continue
            holder = self.holders[key]
            steps = (*holder.steps, name)
            value = attributes(holder.value).get(name)
            for end in _parts(value) if issubclass(type(holder.value), OF_STEPS) else _items(value):
                yield StateRead(holder.root, holder.path, (*steps, *end), source)
        for (key, name), source in self._absent.items():
            holder = self.holders[key]
            if (key, name) not in written and not _has(holder.value, name):
                yield StateRead(holder.root, holder.path, (*holder.steps, name), source)


def _number(line: str) -> int:
    return int(line.rpartition(":")[2])


def _items(value: Any) -> Iterator[tuple[str, ...]]:
    """Steps to a value, and to the items of a dict of plain values."""
    yield ()
    if is_plain_dict(value):
        yield from ((f"[{key}]",) for key in value)


def _parts(value: Any) -> Iterator[tuple[str, ...]]:
    """Steps to the plain values and tensors in an optimizer's lists and dicts, without parameters.

    Each is watched by itself: ranks have other parameters, and the same options.
    """
    if (is_plain(value) and type(value) is not list) or type(value) is torch.Tensor:
        yield ()
    elif type(value) in (list, dict):
        for key, item in items_of(value).items():
            yield from ((f"[{key}]", *rest) for rest in _parts(item))


def _has(value: Any, name: str) -> bool:
    """Whether a value has an attribute after all, by its class's own `__getattr__`."""
    try:
        return hasattr(value, name)
    except Exception:  # whatever the user's own attributes raise
        return True


def _is_module(holder: Holder) -> bool:
    return issubclass(type(holder.value), nn.Module)


def _can_patch(cls: Any) -> bool:
    """Whether a class may be given another `__getattribute__`: it is not built into Python."""
    return bool(cls.__flags__ & _HEAP_TYPE and not cls.__flags__ & _IMMUTABLE)


def _is_of_class(cls: type, name: str) -> bool:
    """Whether a class itself has a plain attribute, which is no property."""
    return type(inspect.getattr_static(cls, name, MISSING)) in _RECORDED
