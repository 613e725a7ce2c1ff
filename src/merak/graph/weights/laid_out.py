"""Models that are laid out over the ranks: what a rank cannot do with its own part is refused.

A rank has some parameters on the meta device (pipeline parallelism), or shards of them (tensor
parallelism, ZeRO-3). Methods that need all of them would save or compute nonsense. Those that save
read the last weights from disk, as long as they are there: nobody knows which ranks call them.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from merak.core.errors import WeightsError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, take
from merak.graph.weights.holders import first_names, named_tensors

_GATHER = (
    "call gather_state_dict() of MerakTrainer, or of what merak.parallelize returns, on all ranks"
)
_LEFT = "or let train() or save_checkpoint(folder) leave the weights on disk, for any rank to read"
_WHOLE = "within `with merak.callable_model(model) as whole`, that of `whole`, on all ranks"
_SAVE = "save it with trainer.save_model(folder) on all ranks"
_INSTEAD = {
    "state_dict": f"{_GATHER}: rank 0 gets all weights; {_LEFT}",
    "save_pretrained": f"{_SAVE}; rank 0 and others write one folder together",
    "push_to_hub": f"{_SAVE}, and push the folder from one rank",
    "__reduce_ex__": f"{_SAVE}, and load the folder where the whole model is needed",
    "load_state_dict": "load it before the trainer (or merak.parallelize) gets the model",
    "generate": f"call trainer.generate, or, {_WHOLE}",
    "forward": f"evaluate with trainer.evaluate or trainer.predict, or, {_WHOLE}",
}
"""Methods that need the whole model, and the way to do what they do."""

_PICKLES = "__reduce_ex__"
_SPOKEN = {_PICKLES: "torch.save"}
_THERE = "call it on a rank there, or name an output_dir on a file system that all hosts share"
_OF_DISK = frozenset({"state_dict", "save_pretrained", "push_to_hub", _PICKLES})
"""Those of them that run on a copy of the model with the last weights, where these are on disk."""


ReadTensors = Callable[[], Mapping[str, torch.Tensor]]


class LastWeights:
    """The last weights of a laid out model on disk, read by any rank without the others.

    Args:
        why_none: the reason why there are none, as a clause.

    Attributes:
        folder: of the checkpoint that has the model's weights; None if there is none.
        were_left: whether they are there for every rank that sees the folder.
    """

    def __init__(self, why_none: str = "no weights of this training are on disk") -> None:
        self.why_none = why_none
        self.folder: Path | None = None
        self.were_left = False
        self._read: ReadTensors | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}

    @property
    def are_here(self) -> bool:
        """Whether this rank can read them."""
        return self._read is not None

    def note(self, folder: Path) -> None:
        """Record the folder of a checkpoint of the model's weights, which may be written later."""
        self.forget(f"{folder} is still being written")
        self.folder = folder

    def keep(self, folder: Path, read: ReadTensors | str) -> None:
        """Read the weights from a folder from now on; all ranks do.

        Args:
            folder: of a checkpoint, complete.
            read: gives every tensor of the state dict, whole, by its first name; or the reason, as
                a clause, why this rank cannot read them.
        """
        self.forget(read if isinstance(read, str) else "")
        self.folder, self.were_left = folder, True
        self._read = None if isinstance(read, str) else read

    def forget(self, why_none: str) -> None:
        """Read no weights any more, since the model's are others.

        Args:
            why_none: the reason, as a clause.
        """
        self.folder, self.were_left, self._read = None, False, None
        self._tensors, self.why_none = {}, why_none

    @contextmanager
    def set_aside(self, why_none: str) -> Iterator[None]:
        """Context in which no weights are read, since the model's are others meanwhile.

        Args:
            why_none: the reason, as a clause.
        """
        before = dict(vars(self))
        self.forget(why_none)
        try:
            yield
        finally:
            vars(self).update(before)

    def refuse_writes(self, folder: Any) -> None:
        """Refuse to save into the folder whose files the weights are read from while they are.

        Args:
            folder: path that is written into.

        Raises:
            WeightsError: it is that folder.
        """
        if self.folder is not None and self.folder.resolve() == Path(folder).resolve():
            raise WeightsError(
                f"{folder} is where the last weights of this training are read from, "
                "and saving would write over its files; save into another folder."
            )

    def whole_copy(self, model: nn.Module, part: Part) -> nn.Module:
        """A copy of the model with the last weights, on the CPU; copies share their tensors.

        Args:
            model: the user's, laid out.
            part: what this rank has of it.

        Raises:
            WeightsError: the files are no longer what was written, or a parameter is no longer
                what is in them.
        """
        assert self._read is not None
        if not self._tensors:
            self._tensors = self._read()
        with methods_allowed(model):
            named = named_tensors(model)
            firsts = first_names(named)
            whole = {first: self._tensors.get(first) for first in firsts.values()}
            self._refuse_changes(named, whole, part)
            new: dict[int, Any] = {
                id(named[first]): like(named[first], value)
                for first, value in whole.items()
                if value is not None
            }
            return copy.deepcopy(model, new)

    def _refuse_changes(
        self,
        named: Mapping[str, torch.Tensor],
        whole: Mapping[str, torch.Tensor | None],
        part: Part,
    ) -> None:
        """Refuse a model that a script has changed behind its training."""
        for name, value in whole.items():
            own = named[name]
            if value is None:
                raise self._changed(f"has a tensor {name} that they lack")
            if not isinstance(own, nn.Parameter) or own.is_meta or name not in part.held:
                continue
            shard = part.shards.get(name)
            if shard is not None:
                value = take(value, shard, part.mesh.shard_rank)
            if not part.is_sharded and not _same_bytes(own, value):
                raise self._changed(f"has other values of {name}")

    def _changed(self, what: str) -> WeightsError:
        return WeightsError(
            f"the weights of this training are in {self.folder}, but the model has been changed "
            f"since, and {what}; load that folder with from_pretrained, and change that model."
        )


def like(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A value as what it takes the place of: a parameter or a buffer.

    Args:
        old: the model's own.
        value: the new one.
    """
    if isinstance(old, nn.Parameter):
        return nn.Parameter(value, requires_grad=old.requires_grad)
    return value


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model that this rank has.

    Args:
        held: names of the parameters that it holds, and of the buffers that it answers for.
        shards: over tp, of those of which it has only some.
        mesh: the grid of ranks.
        is_sharded: whether replicas have shards of parameters (ZeRO-3).
        engine: gives the engine that trains it; None once there is none any more.
        last: the last weights of the whole model on disk.
    """

    held: frozenset[str]
    shards: Mapping[str, ParameterShard]
    mesh: Mesh
    is_sharded: bool
    engine: Callable[[], Any] = lambda: None
    last: LastWeights = field(default_factory=LastWeights)

    @property
    def degrees(self) -> str:
        """Degrees that cut the model into parts, for people to read."""
        axes = (("pp", self.mesh.pp), ("tp", self.mesh.tp), ("ep", self.mesh.ep))
        return ", ".join(f"{axis}={degree}" for axis, degree in axes if degree > 1) or "zero=3"


_ENGINES: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = weakref.WeakKeyDictionary()


class StandIn:
    """Stand-in for a method of a laid out model, outside of `methods_allowed`."""

    assigned: Any = None
    """What a script has assigned to the module under the method's name; None if nothing."""


@dataclass(frozen=True, slots=True)
class Place:
    """A module of a laid out model, some of whose methods have stand-ins.

    Args:
        model: gives the model; None where it is gone.
        module: gives the module.
        path: of the module in the model.
        is_whole: whether this rank has all of its tensors.
    """

    model: Callable[[], nn.Module | None]
    module: Callable[[], nn.Module | None]
    path: str
    is_whole: bool

    def of_copy(self, memo: Mapping[int, Any]) -> Place:
        """Place of a module in a copy of its model that is being made."""
        model, module = (_ref(memo.get(id(given()))) for given in (self.model, self.module))
        return Place(model, module, self.path, self.is_whole)


def _ref(module: nn.Module | None) -> Callable[[], nn.Module | None]:
    return (lambda: None) if module is None else weakref.ref(module)


class Refusal(StandIn):
    """Refusal of a method that needs the whole model.

    Args:
        method: its name.
        part: of the model on this rank.
        place: the module that has the method.
        signature: of the method, which others may look at.
    """

    def __init__(self, method: str, part: Part, place: Place, signature: inspect.Signature) -> None:
        self.method = method
        self.part = part
        self.place = place
        self.__signature__ = signature

    def __deepcopy__(self, memo: dict[int, Any]) -> Refusal:
        """The refusal of a copy of the model, whose weights nobody has saved."""
        part = replace(self.part, last=LastWeights("this is a copy of a model in parts"))
        return type(self)(self.method, part, self.place.of_copy(memo), self.__signature__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method on a copy with the last weights, if they are on disk, or refuse.

        Raises:
            WeightsError: they are not, or no copy can do what the method does.
        """
        if self.method == "save_pretrained" and self._saves_elsewhere(args, kwargs):
            return None
        if (whole := self._whole()) is not None:
            if self.method == "save_pretrained":
                for folder in (*args[:1], *filter(None, [kwargs.get("save_directory")])):
                    self.part.last.refuse_writes(folder)
            return getattr(whole, self.method)(*args, **kwargs)
        module = self.place.module()
        if self.place.is_whole and module is not None:
            with methods_allowed(module):
                return getattr(module, self.method)(*args, **kwargs)
        raise self._refused()

    def _whole(self) -> nn.Module | None:
        """A copy of the module with the last weights; None where none can do what is asked."""
        model, last = self.place.model(), self.part.last
        if self.method not in _OF_DISK or not last.are_here or model is None:
            return None
        return last.whole_copy(model, self.part).get_submodule(self.place.path)

    def _saves_elsewhere(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the last weights are on another host, and transformers saves nothing here."""
        saves_here = getattr(self.place.module(), "should_save_on_this_rank", None)
        last = self.part.last
        if saves_here is None or not last.were_left or last.are_here:
            return False
        given = self.__signature__.bind(*args, **kwargs).arguments
        return not saves_here(given.get("is_main_process", True))

    def _refused(self) -> WeightsError:
        last, is_of_disk = self.part.last, self.method in _OF_DISK
        why = f", and {last.why_none}" if is_of_disk else ""
        instead = _THERE if is_of_disk and last.were_left else _INSTEAD[self.method]
        return WeightsError(
            f"{_SPOKEN.get(self.method, self.method)} of the model needs all of its weights, and "
            f"each rank has a part of them ({self.part.degrees}){why}; {instead}."
        )


class PickleRefusal(Refusal):
    """Refusal of pickling a model, such as by torch.save(model, file)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let a copy with the last weights be pickled; a model that is copied is as it is."""
        module = self.place.module()
        if module is not None and sys._getframe(1).f_code is copy.deepcopy.__code__:
            return type(module).__reduce_ex__(module, *args)
        if (whole := self._whole()) is not None:
            return type(whole).__reduce_ex__(whole, *args)
        if self.place.is_whole and module is not None:
            with methods_allowed(module):
                own = copy.deepcopy(module)  # without what takes the place of its methods
            return type(own).__reduce_ex__(own, *args)
        raise self._refused()


def is_in_parts(part: Part) -> bool:
    """Whether ranks have different parts of the model; else each has everything."""
    return part.mesh.pp > 1 or bool(part.shards) or part.is_sharded


def mark_laid_out(model: nn.Module, part: Part, *, runs_whole: bool) -> None:
    """Refuse methods of a model that need more than this rank's part of it.

    Args:
        model: the user's, laid out.
        part: what this rank has of it; nothing is refused where that is everything on all ranks.
        runs_whole: whether the engine calls its forward as a whole.
    """
    _ENGINES[model] = part.engine
    if not is_in_parts(part):
        return
    shards = {id(t) for name, t in named_tensors(model).items() if name in part.shards}
    for path, module in model.named_modules():
        own = named_tensors(module).values()
        is_whole = bool(path) and not part.is_sharded
        is_whole = is_whole and not any(t.is_meta or id(t) in shards for t in own)
        place = Place(weakref.ref(model), weakref.ref(module), path, is_whole)
        for name in _OF_DISK if path else _INSTEAD:
            method = getattr(type(module), name, None)
            if callable(method) and not (name == "forward" and runs_whole):
                kind = PickleRefusal if name == _PICKLES else Refusal
                bound = inspect.signature(getattr(module, name))
                stand_in = kind(name, part, place, bound)
                stand_in.assigned = vars(module).get(name)
                vars(module)[name] = stand_in


def engine_of(model: nn.Module) -> Any:
    """The engine that trains a model; None for a model that no engine has, or had."""
    return _ENGINES.get(model, lambda: None)()


def part_of(model: nn.Module) -> Part | None:
    """Part of a laid-out model that this rank has; None for a whole model."""
    found = vars(model).get("state_dict")
    return found.part if isinstance(found, Refusal) and not found.place.path else None


def saving_whole(save_model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that saves a model, given a copy with the last weights of one in parts.

    Args:
        save_model: gets the model and the folder.

    Returns:
        The same function for models of either kind, which raises WeightsError where the weights
        of one in parts are not on disk.
    """

    @functools.wraps(save_model)
    def save(model: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        found = vars(model).get("state_dict")
        if isinstance(found, Refusal):
            if (whole := found._whole()) is None:
                raise found._refused()
            found.part.last.refuse_writes(save_directory)
            model = whole
        return save_model(model, save_directory, *args, **kwargs)

    return save


@contextmanager
def methods_allowed(model: nn.Module) -> Iterator[None]:
    """Context in which a laid out model has its own methods, for Merak to trace or to save it."""
    refused = remove_refusals(model)
    try:
        yield
    finally:
        for module, methods in refused:
            vars(module).update(methods)


def remove_refusals(model: nn.Module) -> list[tuple[nn.Module, dict[str, StandIn]]]:
    """Restore the methods of a model and its modules; returns the refusals in their place."""
    if not any(issubclass(type(value), StandIn) for value in vars(model).values()):
        return []  # what has none has been given none inside
    refused = []
    for module in model.modules():
        methods = {n: v for n, v in vars(module).items() if issubclass(type(v), StandIn)}
        for name, stand_in in methods.items():
            del vars(module)[name]
            if stand_in.assigned is not None:
                vars(module)[name] = stand_in.assigned
        refused.append((module, methods))
    return [(module, methods) for module, methods in refused if methods]
