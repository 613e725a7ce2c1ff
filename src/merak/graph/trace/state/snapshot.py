"""Snapshot of Python state: everything that a model's code may leave for its next call.

Attributes of modules and of the objects that they hold, lists and dicts in these, globals and
variables of closures; taken, compared, restored, and told apart by a digest. Parameters, buffers
and submodules are no part of it.
"""

from __future__ import annotations

import hashlib
import random
import types
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import nn

from merak.core.source_lines import is_installed
from merak.graph.ir.state_read import GLOBALS, LOSS, MODEL, StateRead
from merak.graph.trace.state.functions import (
    function_reads,
    functions_of,
    is_installed_class,
    reached_functions,
)
from merak.graph.trace.state.holders import (
    attributes,
    closure,
    is_holder,
    loss_holders,
    slot_names,
)
from merak.graph.trace.state.kept import is_equal, shown, version
from merak.graph.trace.state.modules import line_of
from merak.graph.trace.state.slots import MISSING, PLAIN, Slot, is_plain, slots_of

_OF_TORCH = frozenset((*vars(nn.Module()), "_flat_weights")) - {"training"}
"""Attributes that torch keeps itself, and that a forward does not change but for hooks."""
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
_SEQUENCES = (list, deque, bytearray, array)
CONTAINER_KINDS = (*_SEQUENCES, dict, set)
"""Types of containers whose items are looked at; subclasses count as these."""
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MAX_DEPTH, _MAX_ITEMS, _MAX_ITEMS_ELSEWHERE = 8, 20_000, 1000


class _Slots:
    """Kind of a place that keeps attributes in slots."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Something that holds values by a key, and what it held.

    Args:
        label: as people write it.
        owner: attributes of an object, a container, an array, or the slot of a variable.
        items: the values that it held, by name, index or key; of a set, by themselves.
        kind: type of the owner; `Slot` for a global, `object` for an object's attributes, `type`
            for a class's, a function's for the variables of its closure, a tensor's for what is
            written into it, `Iterator` for one or a generator of random numbers.
        root: as of `StateRead`.
        attribute: identity of the attributes of the object that has it, and its name there.
        source: the line that reads it, where that is known beforehand.
    """

    label: str
    owner: Any
    items: Mapping[Any, Any]
    kind: type
    root: str
    attribute: tuple[int, str] | None = None
    source: str = ""

    def now(self) -> dict[Any, Any]:
        """What it holds now."""
        return _items(self.owner, self.kind)

    def changes(self) -> Iterator[StateLeft]:
        """What it holds that it did not, and what it holds no longer."""
        now = self.now()
        for key in dict.fromkeys((*self.items, *now)):
            old, new = self.items.get(key, MISSING), now.get(key, MISSING)
            if (self.kind is Iterator and new is None) or not is_equal(old, new):
                yield StateLeft(self, key, old, new)

    def restore(self) -> None:
        """Let it hold what it held; an iterator goes on from where it is."""
        now = self.now() if self.kind is not Iterator else self.items
        if list(now) == list(self.items) and all(now[k] is v for k, v in self.items.items()):
            return
        if self.kind is Slot:
            self.owner.set(self.items[""])
        elif self.kind is types.FunctionType:
            for name, cell in _cells(self.owner).items():
                cell.cell_contents = self.items[name]
        elif self.kind is np.ndarray:
            self.owner[...] = self.items[""]
        elif self.kind in (object, type, _Slots):
            delete, put = (partial(f, self.owner) for f in (delattr, setattr))
            if self.kind is object:  # past the object's own code
                delete, put = self.owner.__delitem__, self.owner.__setitem__
            for name in now.keys() - self.items.keys():
                delete(name)
            for name, value in self.items.items():
                put(name, value)
        else:
            _refill(self.owner, self.items.values() if self.kind is not dict else self.items)


@dataclass(frozen=True, slots=True, eq=False)
class StateLeft:
    """A value that a call of a model has left in a place.

    Args:
        place: where.
        key: as of the place's items.
        old: what was there before; `MISSING` for nothing.
        new: what is there now.
    """

    place: Place
    key: Any
    old: Any
    new: Any

    @property
    def attribute(self) -> tuple[int, str] | None:
        """The identity of an object's attributes and a name there, where it is or is inside of."""
        own = self.place
        return (id(own.owner), self.key) if own.kind is object else own.attribute

    @property
    def inside(self) -> str:
        """The place in the model that the snapshot is of, as people write it."""
        return str(self).removeprefix("model.")

    def put(self, value: Any) -> None:
        """Set the attribute or item, past the object's own code; remove it for `MISSING`."""
        if value is MISSING:
            self.place.owner.pop(self.key, None)
        else:
            self.place.owner[self.key] = value

    def __str__(self) -> str:
        """The place, as people write it."""
        own = self.place
        is_added = own.kind in _SEQUENCES and (self.old is MISSING or self.new is MISSING)
        if is_added or own.kind in (Slot, set, torch.Tensor, np.ndarray, Iterator):
            return own.label
        is_item = own.kind in (*_SEQUENCES, dict)
        return f"{own.label}[{self.key!r}]" if is_item else f"{own.label}.{self.key}"


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """A plain tensor as it was: neither a parameter nor a buffer.

    Args:
        tensor: itself.
        version: the number of writes into it.
        values: a copy; None where none was asked for, or it has no values.
        place: where it is.
        is_shared: whether that is a global or a variable of a closure, or in one.
    """

    tensor: torch.Tensor
    version: int
    values: torch.Tensor | None
    place: Place
    is_shared: bool

    @property
    def is_written(self) -> bool:
        """Whether it has been written into."""
        return version(self.tensor) != self.version

    def restore(self) -> None:
        """Write its values back."""
        if self.values is not None and self.is_written:
            with torch.no_grad():
                self.tensor.copy_(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Python state of a model and its loss, as it was.

    Args:
        places: what holds values.
        tensors: the plain tensors among these values.
    """

    places: tuple[Place, ...]
    tensors: tuple[HeldTensor, ...]

    @staticmethod
    def take(
        model: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        *,
        copies: bool = False,
        attributes_only: bool = False,
    ) -> Snapshot:
        """Snapshot of the state now.

        Args:
            model: the model.
            loss_fn: its loss function, such as a method of a trainer; None for none.
            copies: whether to copy the values of tensors, so that they can be restored.
            attributes_only: whether to look at the attributes of modules and of what these hold,
                and not at the model's code, which takes milliseconds.
        """
        walk = _Walk(copies)
        for path, module in model.named_modules():
            walk.object(module, str(StateRead(MODEL, path, (), "")), MODEL)
        for holder in loss_holders(loss_fn):
            walk.object(holder.value, str(StateRead(LOSS, "", holder.steps, "")), LOSS)
        if attributes_only:
            return walk.found()
        for path, name, value, line in _of_hooks(model):
            walk.value(value, f"{name} of a hook of {path or 'the model'}", MODEL, None, line)
        for slot in slots_of(function_reads(model, loss_fn), model, loss_fn):
            if slot.read.root == GLOBALS and not slot.read.steps[-1].startswith("("):
                walk.variable(slot)
        for function in reached_functions(model, loss_fn):
            walk.function(function, "" if function.__closure__ else function.__qualname__)
        return walk.found()

    @staticmethod
    def of_buffers(model: nn.Module) -> Snapshot:
        """Snapshot of the buffers of a model's modules, without copies of their values."""
        modules = [(path, m._buffers) for path, m in model.named_modules()]
        places = [Place(path, own, dict(own), dict, MODEL) for path, own in modules]
        tensors = [
            HeldTensor(b, version(b), None, Place(name, b, {}, torch.Tensor, MODEL), False)
            for name, b in model.named_buffers()
        ]
        return Snapshot(tuple(places), tuple(tensors))

    def changes(self) -> list[StateLeft]:
        """What is other now, by place; writes into tensors of modules are none."""
        written = (held for held in self.tensors if held.is_written)
        shared = [StateLeft(h.place, "", h.values, h.tensor) for h in written if h.is_shared]
        return [found for place in self.places for found in place.changes()] + shared

    def written(self) -> list[HeldTensor]:
        """The plain tensors of modules, and of what these hold, that have been written into."""
        return [held for held in self.tensors if held.is_written and not held.is_shared]

    def write_in_place(self, goes_on: Callable[[StateLeft], bool]) -> None:
        """Write into a plain tensor of a module where a tensor of its kind has taken its place.

        It is then as a buffer is: its values go on from call to call. A tensor that two places
        have, or that shares its storage, stays as it is, and so do globals.

        Args:
            goes_on: whether the next call reads what has been replaced in some place.
        """
        count = Counter(id(value) for place in self.places for value in place.items.values())
        replaced = [
            left
            for place in self.places
            if place.kind in (object, list, dict) and place.root != GLOBALS
            for left in place.changes()
            if count[id(left.old)] == 1 and _is_same(left.old, left.new) and goes_on(left)
        ]
        # Of a queue, whose tensors take the place of each other, before any of them is written.
        olds = {id(left.old) for left in replaced}
        values = [one.new.detach() for one in replaced]
        copied = [v.clone() if id(one.new) in olds else v for one, v in zip(replaced, values)]
        for left, value in zip(replaced, copied, strict=True):
            left.old.copy_(value)
            left.place.owner[left.key] = left.old

    def restore(self) -> None:
        """Put everything back as it was."""
        for place in self.places:
            place.restore()
        for tensor in self.tensors:
            tensor.restore()

    def digest(self) -> str:
        """Digest of the state, the same in every process that has the same."""
        made = hashlib.blake2b(digest_size=16)
        for place in self.places:
            for key, value in place.items.items():
                made.update(f"{place.label}\0{key!r}\0{shown(value)}\n".encode())
        return made.hexdigest()


@contextmanager
def restored_state(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Iterator[None]:
    """Context behind which a model and its loss have the Python state that they had before.

    Args:
        model: the model.
        loss_fn: its loss function; None for none.
    """
    before = Snapshot.take(model, loss_fn, copies=True)
    try:
        yield
    finally:
        before.restore()


@dataclass(slots=True)
class _Walk:
    """Places and tensors that have been met so far."""

    copies: bool
    places: list[Place] = field(default_factory=list)
    tensors: list[HeldTensor] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def found(self) -> Snapshot:
        """Snapshot of what has been met."""
        return Snapshot(tuple(self.places), tuple(self.tensors))

    def object(self, value: Any, label: str, root: str) -> None:
        """Add the attributes of an object and of its class, and what is in them."""
        own = attributes(value)
        if id(own) in self.seen:
            return
        self.seen.add(id(own))
        items = _items(own, object)
        self.places.append(Place(label, own, items, object, root))
        for name, held in items.items():
            if type(held) not in PLAIN:
                self.value(held, f"{label}.{name}", root, (id(own), name))
        for name in _HOOKS if isinstance(value, nn.Module) else ():
            if isinstance(held := own.get(name), dict):
                self.place(Place(f"{label}.{name}", held, dict(held), dict, root))
        for cls in type(value).__mro__[:-1]:
            if id(cls) not in self.seen and not is_installed_class(cls):
                self.seen.add(id(cls))
                items = _items(cls, type)
                self.places.append(Place(cls.__qualname__, cls, items, type, root))
                for name, held in vars(cls).items():
                    if name in items or is_holder(held):  # such as a descriptor
                        self.value(held, f"{cls.__qualname__}.{name}", GLOBALS, None)

    def function(self, function: types.FunctionType, label: str) -> None:
        """Add the variables of a function's closure, and its attributes."""
        if id(function) in self.seen or is_installed(function.__code__.co_filename):
            return
        self.seen.add(id(function))
        line = line_of(function)
        for kind, owner in ((types.FunctionType, function), (object, attributes(function))):
            items = _items(owner, kind)
            if items or kind is object:
                self.places.append(Place(label, owner, items, kind, GLOBALS, source=line))
            for name, held in items.items():
                if not isinstance(held, nn.Module):  # of the model, as good as surely
                    self.value(held, f"{label}.{name}", GLOBALS, None, line)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self.value(defaults, f"defaults of {function.__qualname__}", GLOBALS, None, line)
        for name in function.__code__.co_names:
            held = function.__globals__.get(name)
            if not isinstance(held, types.FunctionType):  # of which those that are called are met
                self.value(held, f"{function.__globals__.get('__name__')}.{name}", GLOBALS, None)

    def variable(self, slot: Slot) -> None:
        """Add a global, and what is in it."""
        value, line = slot.get(), slot.read.source
        self.places.append(Place(slot.label, slot, {"": value}, Slot, GLOBALS, source=line))
        self.value(value, slot.label, GLOBALS, None, line)

    def value(
        self,
        value: Any,
        label: str,
        root: str,
        attribute: tuple[int, str] | None,
        source: str = "",
        depth: int = 1,
    ) -> None:
        """Add what is in a value."""
        if id(value) in self.seen or type(value) in PLAIN or depth > _MAX_DEPTH:
            return
        if isinstance(value, types.FunctionType):
            self.function(value, label)
        elif type(value) is torch.Tensor:
            self.seen.add(id(value))
            copied = None
            if self.copies and not (value.is_meta or value.is_inference()):
                copied = value.detach().clone()
            place = Place(label, value, {}, torch.Tensor, root, attribute, source)
            held = HeldTensor(value, version(value), copied, place, root == GLOBALS)
            self.tensors.append(held)
        elif isinstance(value, partial):
            self.value((value.func, value.args, value.keywords), label, root, attribute, source)
        elif isinstance(value, (Iterator, *_GENERATORS)) and root != LOSS:
            self.place(Place(label, value, _items(value, Iterator), Iterator, root, None, source))
        elif isinstance(value, np.ndarray) and value.size <= _MAX_ITEMS:
            items = _items(value, np.ndarray)
            self.place(Place(label, value, items, np.ndarray, root, attribute, source))
        else:
            self.parts(value, label, root, attribute, source, depth)

    def place(self, place: Place) -> None:
        """Add a place."""
        self.seen.add(id(place.owner))
        self.places.append(place)

    def parts(
        self,
        value: Any,
        label: str,
        root: str,
        attribute: tuple[int, str] | None,
        source: str,
        depth: int,
    ) -> None:
        """Add the items of a container, and the attributes of an object, which may be one."""
        most = _MAX_ITEMS if root == MODEL else _MAX_ITEMS_ELSEWHERE
        kind = next((kind for kind in (*CONTAINER_KINDS, tuple) if isinstance(value, kind)), None)
        if kind is not None and (items := _few_items(value, kind, most)) is not None:
            self.seen.add(id(value))
            if kind is not tuple:
                self.place(Place(label, value, items, kind, root, attribute, source))
            for key, item in items.items():
                if type(item) not in PLAIN:
                    inner = f"{label}[{key!r}]"
                    self.value(item, inner, root, attribute, source, depth + 1)
        is_container = type(value).__module__ in ("collections", "weakref")
        if root != MODEL and not is_container and is_installed_class(type(value)):
            return
        if is_holder(value) or (is_container and hasattr(value, "__dict__")):
            self.object(value, label, root)
        if slot_names(type(value).__mro__):
            items = _items(value, _Slots)
            self.place(Place(label, value, items, _Slots, root, None, source))
            for name, held in items.items():
                self.value(held, f"{label}.{name}", root, None, source, depth + 1)


def _is_same(old: Any, new: Any) -> bool:
    """Whether a tensor may be written into a plain one, which has values and no gradient."""
    if type(old) is not torch.Tensor or not isinstance(new, torch.Tensor):
        return False
    is_own = not (old.is_meta or old.requires_grad or old._base is not None)
    return is_own and (old.shape, old.dtype) == (new.shape, new.dtype)


def _few_items(container: Any, kind: Any, most: int) -> dict[Any, Any] | None:
    """The items of a container; None where it has more, or its class's own code fails."""
    try:
        return _items(container, kind) if len(container) <= most else None
    except Exception:
        return None


def _items(owner: Any, kind: Any) -> dict[Any, Any]:
    if kind is Slot:
        return {"": owner.get()}
    if kind is Iterator:
        return {"": _position(owner)}
    if kind is np.ndarray:
        return {"": owner.copy()}
    if kind is _Slots:
        return {n: getattr(owner, n) for n in slot_names(type(owner).__mro__) if hasattr(owner, n)}
    if kind is object:
        return {name: value for name, value in owner.items() if name not in _OF_TORCH}
    if kind is type:
        return {n: v for n, v in vars(owner).items() if n[:2] != "__" and _is_data(v)}
    if kind is types.FunctionType:
        return {name: cell.cell_contents for name, cell in _cells(owner).items()}
    if kind is set:
        return {item: item for item in owner}
    return dict(owner) if kind is dict else dict(enumerate(owner))


def _position(iterator: Any) -> Any:
    """What tells whether an iterator or a generator of random numbers has gone on; None if none."""
    if isinstance(iterator, np.random.Generator):
        return iterator.bit_generator.state
    if isinstance(iterator, np.random.RandomState):
        return iterator.get_state(legacy=False)
    if isinstance(iterator, random.Random):
        return iterator.getstate()
    return length_hint(iterator) if hasattr(iterator, "__length_hint__") else None


def _cells(function: types.FunctionType) -> dict[str, types.CellType]:
    """Filled cells of a function's closure, by name."""
    names, filled = function.__code__.co_freevars, closure(function)
    cells = dict(zip(names, function.__closure__ or (), strict=True))
    return {name: cell for name, cell in cells.items() if name in filled}


def _is_data(value: Any) -> bool:
    """Whether an attribute of a class is a value: a number, a tensor, a list and the like."""
    return is_plain(value) or isinstance(value, (*CONTAINER_KINDS, tuple, torch.Tensor))


def _refill(container: Any, items: Any) -> None:
    container.clear() if hasattr(container, "clear") else container.__delitem__(slice(None))
    container.update(items) if isinstance(container, (dict, set)) else container.extend(items)


def _of_hooks(model: nn.Module) -> Iterator[tuple[str, str, Any, str]]:
    """Values that hooks around modules' forwards hold: module, name, value, line of the hook."""
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            line = _line_of_hook(hook)
            if not is_installed(line.rpartition(":")[0] or "<built in>"):
                for name, value in _held_by_hook(hook):
                    yield path, name, value, line


def _line_of_hook(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    is_object = not isinstance(hook, (types.FunctionType, types.MethodType))
    return line_of(type(hook).__call__ if is_object else hook)


def _held_by_hook(hook: Any) -> Iterator[tuple[str, Any]]:
    for holder in loss_holders(hook):
        for name, value in attributes(holder.value).items():
            yield f"{type(holder.value).__name__}.{name}", value
    for _, function in functions_of(hook, ()):
        yield from closure(function).items()
