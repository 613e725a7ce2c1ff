"""Blocks of a model, and whether the call of one runs the same operators as that of another.

What decides that is Python state. Two blocks are equal where nothing that a forward could read
differs but tensors of equal metadata and plain attributes that the first forward has not read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from merak.graph.trace.state.functions import function_reads
from merak.graph.trace.state.holders import Holder, attributes, reads_by_dict
from merak.graph.trace.state.kept import CONSTANT, is_equal
from merak.graph.trace.state.slots import PLAIN, Slot, slots_of
from merak.graph.trace.state.snapshot import Snapshot

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_TENSORS = ("_parameters", "_buffers")
_EVERY_MODULE = attributes(nn.Module())
_HOOKS = frozenset(n for n in _EVERY_MODULE if "forward" in n or "backward" in n)
_SKIPPED = frozenset(
    (*_TENSORS, "_modules", *(n for n in _EVERY_MODULE if "state_dict" in n or "dict_pre" in n))
)
"""Attributes of modules that are compared otherwise, or that no forward reads."""


class NotRepeatable(Exception):
    """A call cannot be copied for another; the message says why."""


@dataclass(frozen=True, slots=True)
class Block:
    """A module of a list of modules, with the modules inside.

    Args:
        path: in the model.
        group: path of the list that it is in.
        modules: all of them by path in the block, the block itself first.
    """

    path: str
    group: str
    modules: tuple[tuple[str, nn.Module], ...]


def blocks_of(model: nn.Module) -> dict[int, Block]:
    """Blocks of all lists of modules, by the identity of their attributes.

    Args:
        model: the model.
    """
    found: dict[int, Block] = {}
    for path, blocks in model.named_modules():
        if isinstance(blocks, nn.ModuleList) and len(blocks) > 1:
            for name, block in blocks._modules.items():
                if block is not None:
                    modules = tuple(block.named_modules(remove_duplicate=False))
                    own = f"{path}.{name}".removeprefix(".")
                    found.setdefault(id(attributes(block)), Block(own, path, modules))
    return found


@dataclass(slots=True)
class State:
    """Python state that a block's forward could read, at some moment.

    It is compared with that of another block, whose objects and tensors are others and may equal
    it; a `Snapshot` is compared with itself later on, by identity.

    Args:
        attributes: of each of its modules, without tensors and modules, by name.
        tensors: parameters and buffers of each, by name.
    """

    attributes: tuple[dict[str, Any], ...]
    tensors: tuple[dict[str, torch.Tensor | None], ...]
    versions: tuple[tuple[int, bool], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Note how often each tensor has been written into, and whether it is trained."""
        self.versions = tuple((t._version, t.requires_grad) for t in self.each_tensor())

    def each_tensor(self) -> Iterator[torch.Tensor]:
        """The parameters and buffers, one after another."""
        return (t for own in self.tensors for t in own.values() if t is not None)

    @staticmethod
    def of(block: Block, may_hold: Callable[[Any], bool]) -> State:
        """State of a block now.

        Args:
            block: the block.
            may_hold: whether an object may be an attribute: one whose own attributes are watched.

        Raises:
            NotRepeatable: it has hooks, or attributes that nothing could compare.
        """
        found, tensors = [], []
        for _, module in block.modules:
            own = {n: v for n, v in attributes(module).items() if n not in _SKIPPED}
            own["_modules"] = {n: child is None for n, child in module._modules.items()}
            for name, value in own.items():
                if name in _HOOKS:
                    if value:
                        raise NotRepeatable(f"{block.path} has hooks")
                elif not (is_constant(value) or may_hold(value)):
                    raise NotRepeatable(f"{block.path} holds {name}, a {type(value).__name__}")
            found.append({n: copied(v) for n, v in own.items()})
            parts: Iterator[Any] = (attributes(module)[kind].items() for kind in _TENSORS)
            tensors.append({name: t for part in parts for name, t in part})
        return State(tuple(found), tuple(tensors))

    def check_unchanged(self, block: Block, now: State) -> None:
        """Check that a forward has left a block as it was.

        Raises:
            NotRepeatable: it has not.
        """
        same_tensors = all(
            mine.keys() == theirs.keys() and all(mine[n] is theirs[n] for n in mine)
            for mine, theirs in zip(self.tensors, now.tensors, strict=True)
        )
        same = all(
            mine.keys() == theirs.keys() and all(is_equal(mine[n], theirs[n]) for n in mine)
            for mine, theirs in zip(self.attributes, now.attributes, strict=True)
        )
        if not same or not same_tensors or self.versions != now.versions:
            raise NotRepeatable(f"the forward of {block.path} changes its attributes")


def tensors_like(
    first: tuple[Block, State], other: tuple[Block, State], reads: Callable[[nn.Module, str], bool]
) -> dict[int, torch.Tensor] | None:
    """The tensors of a block that equals another, by the identity of the other's; else None.

    Args:
        first: the block that has run, and its state before.
        other: one that would run.
        reads: whether the first's forward has read an attribute of a module of its.
    """
    (one, mine), (two, theirs) = first, other
    if [path for path, _ in one.modules] != [path for path, _ in two.modules]:
        return None
    found: dict[int, torch.Tensor] = {}
    for i, (_, module) in enumerate(one.modules):
        is_same = (
            type(module) is type(two.modules[i][1])
            and _equal_attributes(module, mine.attributes[i], theirs.attributes[i], reads)
            and _pairs(mine.tensors[i], theirs.tensors[i], found)
        )
        if not is_same:
            return None
    return found


def _equal_attributes(
    module: nn.Module,
    own: Mapping[str, Any],
    given: Mapping[str, Any],
    reads: Callable[[nn.Module, str], bool],
) -> bool:
    """Whether attributes of two modules are equal, but for plain ones that the first never read."""
    different = [n for n in own if n not in given or not is_equal(own[n], given[n])]
    return own.keys() == given.keys() and all(
        type(own[name]) in PLAIN
        and type(given[name]) in PLAIN
        and not reads(module, name)
        and not reads_by_dict(type(module).__mro__)
        for name in different
    )


def _pairs(
    own: Mapping[str, torch.Tensor | None],
    given: Mapping[str, torch.Tensor | None],
    found: dict[int, torch.Tensor],
) -> bool:
    """Pair the tensors of two modules; False where they differ, or one has two in its place."""
    if own.keys() != given.keys():
        return False
    for name, tensor in own.items():
        instead = given[name]
        if tensor is None or instead is None:
            if tensor is not instead:
                return False
            continue
        is_paired = found.setdefault(id(tensor), instead) is instead
        if not is_paired or metadata(tensor) != metadata(instead):
            return False
    return True


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Metadata of a tensor that an operator may depend on without its values."""
    place = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    kind = (type(tensor), tensor.requires_grad, tensor.is_leaf, tensor.layout)
    return (*place, *kind, tensor.is_conj(), tensor.is_neg(), tensor._is_view())


def is_constant(value: Any) -> bool:
    """Whether a value can be compared, and holds nothing that could change unseen."""
    if isinstance(value, (*PLAIN, *CONSTANT)):
        return True
    if isinstance(value, _FUNCTIONS):
        return not getattr(value, "__closure__", None)
    if type(value) in (tuple, list, set, frozenset):
        return all(map(is_constant, value))
    if isinstance(value, dict):
        return all(map(is_constant, value.values()))
    return isinstance(value, partial) and is_constant([value.func, value.args, value.keywords])


def copied(value: Any) -> Any:
    """A copy of a container, so that later changes of it are seen; any other value itself."""
    if type(value) in (tuple, list):
        return type(value)(map(copied, value))
    if type(value) is set:
        return frozenset(value)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True)
class OuterState:
    """Objects that modules share, such as configs, and globals that their code reads.

    Args:
        shared: each object, by the identity of its attributes.
        slots: of globals and closures.
    """

    shared: Mapping[int, Any]
    slots: tuple[Slot, ...]

    @staticmethod
    def of(
        model: nn.Module, loss_fn: Callable[..., Any] | None, holders: Mapping[int, Holder]
    ) -> OuterState:
        """OuterState of the blocks of a model.

        Args:
            model: the model.
            loss_fn: its loss function; None for none.
            holders: modules and the objects that they hold, by the identity of their attributes.
        """
        shared = {
            key: holder.value
            for key, holder in holders.items()
            if not isinstance(holder.value, nn.Module)
        }
        slots = tuple(slots_of(function_reads(model, loss_fn), model, loss_fn))
        found = OuterState(shared, slots)
        while opaque := [k for k, one in shared.items() if not found._holds_all(one)]:
            for key in opaque:
                del shared[key]
        return found

    def _holds_all(self, value: Any) -> bool:
        return all(map(self.holds, attributes(value).values()))

    def holds(self, value: Any) -> bool:
        """Whether a value is a constant, or an object all of whose attributes are looked at."""
        if is_constant(value):
            return True
        try:
            return id(attributes(value)) in self.shared
        except AttributeError:
            return False

    def now(self) -> Snapshot:
        """Snapshot of them, and of torch's settings."""
        return Snapshot.of_values(self.shared.values(), self.slots)


def following_modes() -> list[Callable[[torch.Tensor], bool]]:
    """Function modes that follow tensors: whether each knows more of one tensor than others do."""
    every = (getattr(mode, "follows", None) for mode in _get_current_function_mode_stack())
    return [follows for follows in every if follows is not None]
