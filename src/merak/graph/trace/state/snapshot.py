"""Snapshot of Python state: everything that a model's code may leave for its next call.

Attributes of modules, of tensors and of the objects that they hold, lists and dicts in these,
globals and variables of closures, which submodules, parameters and buffers there are, and what is
outside of the model; taken, compared and restored. Values of parameters and buffers are no part
of it. Before and after a call it is of all of that; before each step, of what graphs have as
constants (`of_slots`) and of code and settings (`between_steps`), whose places tell by a glance.
"""

from __future__ import annotations

import gc
import random
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from merak.core.source_lines import is_installed, module_file
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
from merak.graph.trace.state.kept import is_same, kept, version
from merak.graph.trace.state.modules import Code, CodeOfClass, glance_at, line_of
from merak.graph.trace.state.outside import CONTEXT, LASTING, OUTSIDE, SETTINGS, Outside
from merak.graph.trace.state.places import (
    CONTAINER_KINDS,
    Parts,
    Place,
    Slots,
    StateLeft,
    held_items,
)
from merak.graph.trace.state.slots import MISSING, PLAIN, Slot, is_plain, slots_of

_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
_PARTS = ("_modules", "_parameters", "_buffers")
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MAX_DEPTH, _MAX_ITEMS, _MAX_ITEMS_ELSEWHERE, _MAX_APPENDED = 8, 20_000, 1000, 100_000


_NOT_INSIDE = (torch.Tensor, nn.Module, type, types.ModuleType, types.CodeType, types.FrameType)
_HEAP_TYPE = 1 << 9


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
        glance: finds the places that may have changed; None where all of them may.
    """

    places: tuple[Place, ...]
    tensors: tuple[HeldTensor, ...]
    glance: Callable[[], Sequence[Place]] | None = None

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
                and neither at the model's code, which takes milliseconds, nor at its tensors and
                submodules, which may have others in their place.
        """
        walk = _Walk(copies, _HOOKS if attributes_only else (*_HOOKS, *_PARTS))
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
        for outside in OUTSIDE:
            walk.place(Place("", outside, outside.now(), Outside, GLOBALS))
        for variable, value in CONTEXT.now().items():
            walk.value(value, CONTEXT.label(variable), GLOBALS, None)
        return walk.found()

    @staticmethod
    def of_loss(loss_fn: Callable[..., Any]) -> Snapshot:
        """Snapshot of what the objects of a loss function hold, without copies of tensors."""
        walk = _Walk(False, ())
        for holder in loss_holders(loss_fn):
            walk.object(holder.value, str(StateRead(LOSS, "", holder.steps, "")), LOSS)
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

    @staticmethod
    def of_values(objects: Iterable[Any], slots: Iterable[Slot]) -> Snapshot:
        """Snapshot of some objects and variables, what is in them, and of torch's settings.

        Args:
            objects: with attributes.
            slots: the variables.
        """
        walk = _Walk(copies=False, of_modules=())
        for one in objects:
            walk.object(one, type(one).__name__, GLOBALS)
        for slot in slots:
            walk.variable(slot)
        walk.place(Place("", SETTINGS, SETTINGS.now(), Outside, GLOBALS))
        return walk.found()

    @staticmethod
    def between_steps(model: nn.Module) -> Snapshot:
        """Snapshot of what code a model's modules have, and of settings that hold between steps."""
        modules = dict(model.named_modules())
        places = [_code(path, type(m), Code.of(m)) for path, m in modules.items()]
        seem_other = glance_at({place: place.owner for place in places})
        now = LASTING.now()
        rest = [Place("", LASTING, now, Outside, GLOBALS, glance=lambda: now == LASTING.now())]
        rest.append(_functions_of_libraries(modules.values()))
        for cls, path in {type(m): path for path, m in reversed(modules.items())}.items():
            rest.append(_code(path, cls, code := CodeOfClass(cls, cls.forward), code.seems_same))
        return Snapshot((*places, *rest), (), lambda: [*seem_other(), *rest])

    @staticmethod
    def of_slots(slots: Iterable[Slot]) -> Snapshot:
        """Snapshot of what some places hold, whose values are kept as in `kept`."""
        return Snapshot.of_places(map(_read, slots))

    @staticmethod
    def of_places(places: Iterable[Place]) -> Snapshot:
        """Snapshot of places of slots, as they were.

        Each step looks at all of them, mostly numbers of modules: at these in one loop without
        calls, for which another object has to stand in a number's place.
        """
        numbers, rest = [], []
        every = tuple(places)
        for place in every:
            old, own = place.items[""], place.owner.attributes()
            if own is not None and type(old) is not list and is_plain(old):
                numbers.append((place, own, place.owner.read.steps[-1], old))
            else:
                rest.append(place)

        def glance() -> list[Place]:
            seem_other = [
                place for place, own, key, old in numbers if own.get(key, MISSING) is not old
            ]
            return seem_other + rest

        return Snapshot(every, (), glance)

    def changes(self) -> list[StateLeft]:
        """Changes since the snapshot, by place; writes into tensors of modules are none."""
        written = (held for held in self.tensors if held.is_written)
        shared = [StateLeft(h.place, "", h.values, h.tensor) for h in written if h.is_shared]
        places = self.places if self.glance is None else self.glance()
        others = [p for p in places if (glance := p.glance) is None or not glance()]
        return [found for place in others for found in place.changes()] + shared

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
    of_modules: tuple[str, ...]
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
        items = held_items(own, object)
        self.places.append(Place(label, own, items, object, root))
        for name, held in items.items():
            if type(held) not in PLAIN:
                self.value(held, f"{label}.{name}", root, (id(own), name))
        for name in self.of_modules if isinstance(value, nn.Module) else ():
            if isinstance(held := own.get(name), dict):
                self.part(held, name, label, root, id(own))
        for cls in type(value).__mro__[:-1]:
            if id(cls) not in self.seen and not is_installed_class(cls):
                self.seen.add(id(cls))
                items = held_items(cls, type)
                self.places.append(Place(cls.__qualname__, cls, items, type, root))
                for name, held in vars(cls).items():
                    if name in items or is_holder(held):  # such as a descriptor
                        self.value(held, f"{cls.__qualname__}.{name}", GLOBALS, None)

    def part(self, held: dict[Any, Any], name: str, label: str, root: str, module: int) -> None:
        """Add a module's hooks of a kind, its submodules, or its parameters or buffers."""
        if name in _HOOKS:
            self.place(Place(f"{label}.{name}", held, dict(held), dict, root))
            return
        self.place(Place(label, held, held_items(held, Parts), Parts, root, (module, "")))
        for key, tensor in held.items():
            if isinstance(tensor, torch.Tensor):
                self.object(tensor, f"{label}.{key}", root)

    def function(self, function: types.FunctionType, label: str) -> None:
        """Add the variables of a function's closure, and its attributes."""
        if id(function) in self.seen or is_installed(function.__code__.co_filename):
            return
        self.seen.add(id(function))
        line = line_of(function)
        for kind, owner in ((types.FunctionType, function), (object, attributes(function))):
            items = held_items(owner, kind)
            if items or kind is object:
                self.places.append(Place(label, owner, items, kind, GLOBALS, source=line))
            for name, held in items.items():
                if not issubclass(type(held), nn.Module):  # of the model, as good as surely
                    self.value(held, f"{label}.{name}", GLOBALS, None, line)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self.value(defaults, f"defaults of {function.__qualname__}", GLOBALS, None, line)
        for name in function.__code__.co_names:
            held = function.__globals__.get(name)
            if type(held) is not types.FunctionType:  # of which those that are called are met
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
        try:
            self._look(value, label, root, attribute, source, depth)
        except Exception:  # of the object's own code: it is not looked at
            self.seen.add(id(value))

    def _look(
        self,
        value: Any,
        label: str,
        root: str,
        attribute: tuple[int, str] | None,
        source: str,
        depth: int,
    ) -> None:
        cls = type(value)  # which is asked in place of the object
        if issubclass(cls, types.FunctionType):
            self.function(value, label)
        elif cls is torch.Tensor:
            self.seen.add(id(value))
            copied = None
            if self.copies and not (value.is_meta or value.is_inference()):
                copied = value.detach().clone()
            place = Place(label, value, {}, torch.Tensor, root, attribute, source)
            held = HeldTensor(value, version(value), copied, place, root == GLOBALS)
            self.tensors.append(held)
            self.object(value, label, root)
        elif issubclass(cls, partial):
            self.value((value.func, value.args, value.keywords), label, root, attribute, source)
        elif issubclass(cls, (Iterator, *_GENERATORS)) and root != LOSS:
            self.place(
                Place(label, value, held_items(value, Iterator), Iterator, root, None, source)
            )
        elif issubclass(cls, np.ndarray) and value.size <= _MAX_ITEMS:
            items = held_items(value, np.ndarray)
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
        kinds = (*CONTAINER_KINDS, tuple)
        kind = next((kind for kind in kinds if issubclass(type(value), kind)), None)
        if kind is not None and (items := _few_items(value, kind, most)) is not None:
            self.seen.add(id(value))
            if kind is not tuple:
                self.place(Place(label, value, items, kind, root, attribute, source))
            for key, item in items.items():
                if type(item) not in PLAIN:
                    inner = f"{label}[{key!r}]" if type(key) in PLAIN else f"{label}[…]"
                    self.value(item, inner, root, attribute, source, depth + 1)
        elif root == LOSS and kind in (list, deque) and len(value) <= _MAX_APPENDED:
            # What a loss appends to is restored, however long it is by then.
            self.place(Place(label, value, held_items(value, kind), kind, root, attribute, source))
        for item in _inside(value) if kind is None else ():
            self.value(item, label, root, attribute, source, depth + 1)
        is_container = type(value).__module__ in ("collections", "weakref")
        if root != MODEL and not is_container and is_installed_class(type(value)):
            return
        if is_holder(value) or (is_container and hasattr(value, "__dict__")):
            self.object(value, label, root)
        if slot_names(type(value).__mro__):
            items = held_items(value, Slots)
            self.place(Place(label, value, items, Slots, root, None, source))
            for name, held in items.items():
                self.value(held, f"{label}.{name}", root, None, source, depth + 1)


def _code(
    path: str,
    cls: type[nn.Module],
    code: Code | CodeOfClass,
    glance: Callable[[], bool] | None = None,
) -> Place:
    label = str(StateRead(MODEL, path, (), ""))
    line = line_of(cls.forward)
    return Place(label, code, code.now(), Code, MODEL, source=line, glance=glance)


def _functions_of_libraries(modules: Iterable[nn.Module]) -> Place:
    """What names functions have that a script may put others in the place of, between steps."""
    names = {nn.functional.__name__, *(type(module).__module__ for module in modules)}
    spaces = {n: vars(sys.modules[n]) for n in names if is_installed(module_file(n) or "")}
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    keys = {n: [k for k, v in own.items() if isinstance(v, kinds)] for n, own in spaces.items()}
    held = [
        (spaces[n], itemgetter(*own), itemgetter(*own)(spaces[n])) for n, own in keys.items() if own
    ]

    def put(label: str, value: Any) -> None:
        name, _, key = label.rpartition(".")
        spaces[name][key] = value

    def found() -> dict[Any, Any]:
        return {f"{n}.{key}": spaces[n].get(key) for n, own in keys.items() for key in own}

    def glance() -> bool:
        try:
            return all(get(own) == values for own, get, values in held)  # by identity, and fast
        except KeyError:
            return False

    return Place("", Outside("{}", found, put), found(), Outside, GLOBALS, glance=glance)


def _read(slot: Slot) -> Place:
    old, read, get = kept(slot.get()), slot.read, slot.get

    def glance() -> bool:
        new = get()
        return new is old or is_same(old, new)

    return Place(slot.label, slot, {"": old}, Slot, read.root, source=read.source, glance=glance)


def _is_same(old: Any, new: Any) -> bool:
    """Whether a tensor may be written into a plain one, which has values and no gradient."""
    if type(old) is not torch.Tensor or not isinstance(new, torch.Tensor):
        return False
    is_own = not (old.is_meta or old.requires_grad or old._base is not None)
    return is_own and (old.shape, old.dtype) == (new.shape, new.dtype)


def _few_items(container: Any, kind: Any, most: int) -> dict[Any, Any] | None:
    """The items of a container; None where it has more, or its class's own code fails."""
    try:
        return held_items(container, kind) if len(container) <= most else None
    except Exception:
        return None


def _inside(value: Any) -> list[Any]:
    """What a value of a type that no Python code defines holds, such as a view or a method."""
    is_of_python = type(value).__flags__ & _HEAP_TYPE or issubclass(type(value), _NOT_INSIDE)
    return [] if is_of_python else gc.get_referents(value)


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
