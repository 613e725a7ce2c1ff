"""Recording of the Python state that a model reads while it is traced."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from merak.core.errors import TraceError
from merak.core.source_lines import is_library, model_line
from merak.graph.ir.state_read import MODEL, StateRead
from merak.graph.trace.state.holders import Holder, attributes, find_holders, label_of
from merak.graph.trace.state.kept import CONTAINERS, FUNCTIONS, differs, is_same, kept, version
from merak.graph.trace.state.slots import MISSING, PLAIN, is_plain, is_plain_dict

_CONSTANTS = frozenset((torch.Tensor, *FUNCTIONS))
_RECORDED = frozenset((*PLAIN, *CONTAINERS)) | _CONSTANTS
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
        found: the reads, once forward has run.
        counted: numbers that forward reads and sets, as it has left them.
        lines: of the model, which first read lists and dicts, by label.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self._model, self.loss_fn = model, loss_fn
        holders = find_holders(model, loss_fn)
        # A module may run under another object, which torch.export makes, with the same attributes.
        self.holders = {id(attributes(holder.value)): holder for holder in holders}
        self._before = {key: _copied(holder) for key, holder in self.holders.items()}
        self._versions = {
            (key, name): version(value)
            for key, values in self._before.items()
            for name, value in values.items()
            if type(value) is torch.Tensor
        }
        self._items = {
            (key, name): kept(value)
            for key, values in self._before.items()
            for name, value in values.items()
            if type(value) in CONTAINERS
        }
        self._sources: dict[tuple[int, str], str] = {}
        self._absent: dict[tuple[int, str], str] = {}
        self._seen: set[tuple[int, str]] = set()
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        self._written: dict[tuple[int, str], Any] = {}
        self.found: tuple[StateRead, ...] = ()
        self.counted: dict[StateRead, int | float] = {}
        self.lines: dict[str, str] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context in which reads are recorded."""
        # By the end of the context torch.export has undone what forward set on a module.
        handle = self._model.register_forward_hook(lambda *_: self._find_written())
        held = {type(h.value) for h in self.holders.values() if not _is_module(h)}
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
            self._refuse_first_calls()
        finally:
            handle.remove()
            for cls, own in reversed(patched):
                if own is None:
                    del cls.__getattribute__
                else:
                    cls.__getattribute__ = own

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
            if type(value) in recorded and name[:2] != "__":
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
            known = self._before.get(inner, {})
            self._sources |= {(inner, n): line for n, v in known.items() if is_plain(v)}
            self._sources[inner, "__dict__"] = line  # for names that come later
            return
        if type(value) in CONTAINERS:
            self.lines[label_of(self.holders[key[0]], name)] = model_line(sys._getframe(2))
        if type(value) is types.MethodType and is_library(sys._getframe(2).f_code.co_filename):
            return  # of torch's modules, by their own code
        name = getattr(type(holder), "attribute_map", {}).get(name, name)
        if name in attributes(holder) or _is_of_class(type(holder), name):
            self._sources[key[0], name] = model_line(sys._getframe(2))

    def _note_absent(self, holder: Any, name: str) -> None:
        own = attributes(holder)
        key = (id(own), name)
        if key in self._seen or key[0] not in self.holders or name[:2] == "__":
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
        """Note the reads of some modules once more, for others whose code does not run.

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
        for key, name in (*self._sources, *self._absent):
            before = self._before[key].get(name, MISSING)
            now = attributes(self.holders[key].value).get(name, MISSING)
            is_mutated = type(now) is torch.Tensor and version(now) != self._versions.get(
                (key, name)
            )
            items = self._items.get((key, name))
            if items is None:
                is_other = differs(before, now)
            else:
                is_other = not is_same(items, now, reads_values=False)
            if is_mutated or is_other:
                self._written.setdefault((key, name), now)

    def _counters(self) -> Iterator[tuple[StateRead, int | float]]:
        for (key, name), now in self._written.items():
            holder = self.holders[key]
            before = self._before[key].get(name, getattr(type(holder.value), name, None))
            if type(now) in (int, float) and type(before) in (int, float):
                steps, source = (*holder.steps, name), self._sources[key, name]
                yield StateRead(holder.root, holder.path, steps, source), now

    def _refuse_first_calls(self) -> None:
        """Refuse writes into a tensor that a flag of the same module allows in some calls alone."""
        for (key, name), now in self._written.items():
            before, holder = self._before[key].get(name), self.holders[key]
            tensors = (n for k, n in self._written if (k, n) in self._versions and k == key)
            is_flag = type(now) is bool and type(before) is bool
            if is_flag and (tensor := next(tensors, None)) and before is not now:
                raise TraceError(
                    f"forward writes into the plain tensor {tensor} of {holder.path or 'the model'}"
                    f" and sets {name} from {before} to {now}, which it reads at "
                    f"{self._sources[key, name]}, so that its first call is another than those "
                    "after it; run one forward before training, or write in __init__."
                )

    def _reads(self) -> Iterator[StateRead]:
        for (key, name), source in self._sources.items():
            if (key, name) in self._written:
                continue
            holder = self.holders[key]
            steps = (*holder.steps, name)
            value = self._before[key].get(name)
            keys = [f"[{item}]" for item in value] if is_plain_dict(value) else []
            for end in (steps, *((*steps, item) for item in keys)):
                yield StateRead(holder.root, holder.path, end, source)
        for (key, name), source in self._absent.items():
            holder = self.holders[key]
            if (key, name) not in self._written and not _has(holder.value, name):
                yield StateRead(holder.root, holder.path, (*holder.steps, name), source)


def _has(value: Any, name: str) -> bool:
    """Whether a value has an attribute after all, by its class's own `__getattr__`."""
    try:
        return hasattr(value, name)
    except Exception:  # whatever the user's own attributes raise
        return True


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
