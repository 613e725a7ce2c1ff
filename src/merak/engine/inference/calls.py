"""Calls of functions with placed tensors: where they run, and what other ranks know of results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merak.core.errors import TrainingError, WeightsError
from merak.engine.inference.pipeline import Pipeline
from merak.engine.inference.placed import (
    Placed,
    leaves,
    map_tensors,
    moved_to,
    place,
    values_of,
    whole_tensor,
)

_META = torch.device("meta")
_MOST_SIZES = 20_000
"""Results whose sizes are kept: more come of sequences that grow, each of which comes once."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Kind:
    """What calls of a function need.

    Args:
        has_sizes: whether tensors without memory tell the result's sizes, or the result where it
            is no tensor; else they are read where the values are, and sent.
        gives_tensors: whether a tensor is among the results.
        dtypes: of the results, where autocast has chosen them; None where sizes tell them.
        is_cast: whether autocast chooses them, and the first such call shows them.
    """

    has_sizes: bool
    gives_tensors: bool
    dtypes: tuple[torch.dtype, ...] | None = None
    is_cast: bool = False


class Calls:
    """Runs functions of placed tensors on the ranks that have their values.

    Args:
        pipeline: the ranks.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._kinds: dict[Hashable, _Kind] = {}
        # Descriptions of results that this rank has not computed, by function and arguments.
        self._sizes: dict[Hashable, Any] = {}

    def run(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function, computed where the values of its arguments are.

        Args:
            func: a function of torch.
            args: its arguments, of which some are placed tensors.
            kwargs: its named arguments.
        """
        name = _name(func)
        if name in _OF_SIZES:
            return func(*args, **kwargs)
        if (known := _FACTS.get(name)) is not None:
            return known(args[0])
        if func is torch.Tensor.__iter__:
            return iter(self.run(torch.Tensor.unbind, args, {}))
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _plain_slices(args[1]), *args[2:])
        written = _written(name, args, kwargs)
        if written is not None and not isinstance(written, Placed):
            return func(*map_tensors(whole_tensor, args), **map_tensors(whole_tensor, kwargs))
        tensors = _tensors((args, kwargs))
        placed = [tensor for tensor in tensors if isinstance(tensor, Placed)]
        key = _key(func, args, kwargs, tensors, placed[0])
        kind = self._kinds.get(key)
        if kind is None:  # the same on every rank
            is_cast = key[-1] is not None
            kind = self._kinds[key] = _try(func, args, kwargs, written is not None, is_cast)
        if kind.has_sizes and not kind.gives_tensors:
            return func(*args, **kwargs)
        target = _target(placed, written)
        if not all(target <= one.holders for one in placed):
            args, kwargs = moved_to(args, target), moved_to(kwargs, target)
        if kind.has_sizes:
            found = self._compute(func, args, kwargs, target, kind, written is not None)
        else:
            found = self._compute_and_describe(func, args, kwargs, target)
        if kind.is_cast:
            dtypes = tuple(t.dtype for t in _tensors(found))
            self._kinds[key] = _Kind(True, True, dtypes=dtypes)
        if written is None:
            return found
        self.pipeline.num_writes += 1
        return written if isinstance(found, torch.Tensor) else found

    def _compute(
        self,
        func: Function,
        args: Any,
        kwargs: Any,
        target: frozenset[int],
        kind: _Kind,
        writes: bool,
    ) -> Any:
        """The result of a call whose sizes every rank knows."""
        if self.pipeline.mesh.pp_rank in target:
            found = func(*_with_values(args), **_with_values(kwargs))
            return self._placed(found, target, None)
        shown = _shown_device(args, kwargs)
        found = self._known_sizes(func, args, kwargs, kind) if not writes else None
        if found is None:
            found = _run_without_values(func, args, kwargs, kind.dtypes)
        return self._placed(found, target, shown)

    def _known_sizes(self, func: Function, args: Any, kwargs: Any, kind: _Kind) -> Any:
        """The result on tensors without memory, as an equal call has shown; None where none can."""
        key = (func, kind.dtypes, _structure(args), _structure(kwargs))
        try:
            described = self._sizes.get(key)
        except TypeError:  # an argument that cannot be compared
            return None
        if described is None:
            if len(self._sizes) == _MOST_SIZES:
                self._sizes.clear()
            found = _run_without_values(func, args, kwargs, kind.dtypes)
            described = self._sizes[key] = map_tensors(_Description.of, found)
        return map_tensors(_Description.empty, described, _Description)

    def _compute_and_describe(
        self, func: Function, args: Any, kwargs: Any, target: frozenset[int]
    ) -> Any:
        """The result of a call whose sizes, or values, are known only where it is computed.

        Raises:
            Exception: what the function raises there, on every rank.
        """
        root, found, described = min(target), None, None
        if self.pipeline.mesh.pp_rank in target:
            try:  # on plain tensors, as their text is another
                found = func(*map_tensors(_plain, args), **map_tensors(_plain, kwargs))
                described = map_tensors(_Description.of, found)
            except Exception as error:
                described = error
        if target != self.pipeline.everyone:
            own = _name(func)
            name, described = self.pipeline.broadcast_object((own, described), root)
            if name != own:
                raise TrainingError(
                    f"pp rank {root} calls {name}, where this rank calls {own}: what the model's "
                    "code does depends on what ranks have different, such as the time or a file."
                )
        if isinstance(described, Exception):
            raise described
        if self.pipeline.mesh.pp_rank not in target:
            found = map_tensors(_Description.empty, described, _Description)
        devices = [d.device for d in leaves(described) if isinstance(d, _Description)]
        shown = devices[0] if devices else None
        return self._placed(found, target, shown)

    def _placed(self, found: Any, holders: frozenset[int], device: torch.device | None) -> Any:
        """Results as placed tensors, which are new on every rank, also where one is an argument.

        Args:
            found: the results.
            holders: those that have computed them.
            device: that they have there; None on those ranks.
        """

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            shown = device or (tensor.shown_device if isinstance(tensor, Placed) else tensor.device)
            return place(tensor, self, holders, shown)

        return map_tensors(placed, found)


def _plain(value: torch.Tensor) -> torch.Tensor:
    return values_of(value) if isinstance(value, Placed) else value


@dataclass(frozen=True, slots=True)
class _Description:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Description:
        device = tensor.shown_device if isinstance(tensor, Placed) else tensor.device
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


def _key(
    func: Function, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], first: Placed
) -> tuple[Any, ...]:
    """Key of calls that need the same.

    Of masks as indices the values decide on sizes; on types that autocast chooses, those of the
    arguments, which are last in the key.
    """
    masks = any(t.dtype == torch.bool for t in tensors[1:])
    dtypes = None
    if torch.is_autocast_enabled(first.shown_device.type):
        named = (leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.dtype))
        dtypes = (*(t.dtype for t in tensors), *named)
    return func, len(args), tuple(kwargs), len(tensors), masks, dtypes


def _try(func: Function, args: Any, kwargs: Any, writes: bool, is_cast: bool) -> _Kind:
    """What calls of a function need, as one on tensors without memory shows."""
    try:
        found = _run_without_values(
            func, map_tensors(_empty, args), map_tensors(_empty, kwargs), None
        )
    except Exception:  # of any kind: the function needs values
        return _Kind(False, True)
    if writes:
        return _Kind(True, True)
    if not _tensors(found):
        return _Kind(_name(func) not in _SHOWS_VALUES, False)
    return _Kind(False, True, is_cast=True) if is_cast else _Kind(True, True)


def _structure(tree: Any) -> Hashable:
    """What decides on the sizes of results: sizes of tensors, and other arguments."""
    if isinstance(tree, torch.Tensor):
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (tuple, list)):
        return tuple([_structure(one) for one in tree])
    if isinstance(tree, dict):
        return tuple([(name, _structure(one)) for name, one in tree.items()])
    if isinstance(tree, slice):
        return slice, tree.start, tree.stop, tree.step
    return type(tree), tree


def _run_without_values(
    func: Function, args: Any, kwargs: Any, dtypes: tuple[torch.dtype, ...] | None
) -> Any:
    """The result of a call on tensors without memory.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its named arguments.
        dtypes: of the results, as autocast makes them; None where it does not.
    """
    if func is torch.Tensor.__setitem__:
        return None
    args, kwargs = map_tensors(_without_memory, args), map_tensors(_without_memory, kwargs)
    if func in (torch.Tensor.cpu, torch.Tensor.cuda):
        func, args, kwargs = torch.Tensor.to, (args[0], _META), {}
    if func is torch.Tensor.to:
        args = tuple(_META if _is_device(a) else a for a in args)
    if kwargs.get("device") is not None:
        kwargs["device"] = _META
    if dtypes is None:
        return func(*args, **kwargs)
    types = iter(dtypes)
    found = func(*map_tensors(_as_float, args), **map_tensors(_as_float, kwargs))
    return map_tensors(lambda tensor: tensor.to(next(types)), found)


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else _empty(tensor)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _is_device(value: object) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda", "mps", "xpu", "npu")


def _shown_device(args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    """The device of a result, where it is computed."""
    given = [a for a in (*args, kwargs.get("device")) if _is_device(a)]
    if given:
        return torch.device(given[0])
    first = next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Placed))
    return first.shown_device


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a function of a name writes into; None for most functions."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    is_written = (name.endswith("_") and not name.endswith("__")) or name in _WRITE
    return args[0] if is_written and args else None


def _target(placed: list[Placed], written: Any) -> frozenset[int]:
    """The pp ranks that compute a function of placed tensors."""
    if isinstance(written, Placed):
        return written.holders
    everywhere = frozenset.intersection(*(p.holders for p in placed))
    if everywhere:
        return everywhere
    parameters = [p for p in placed if getattr(p, "_is_param", False)]
    if parameters:
        return max(parameters, key=lambda p: p.nbytes).holders
    return max(placed, key=lambda p: p.number).holders  # values flow to where the last one is


def _with_values(tree: Any) -> Any:
    """Arguments of a rank that has their values."""

    def values(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, Placed) and value.gathered is not None:
            return value.gathered()
        return value

    return map_tensors(values, tree)


def _plain_slices(index: Any) -> Any:
    """An index whose slices have bounds that every rank knows."""
    if isinstance(index, tuple):
        return tuple(_plain_slices(one) for one in index)
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        return slice(*(int(whole_tensor(b)) if isinstance(b, Placed) else b for b in bounds))
    return index


def _name(func: Any) -> str:
    """The name of a function; of an attribute's getter, the attribute's with a dot."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return f".{func.__self__.__name__}"
    return name


def _no_values(_: Placed) -> Any:
    raise WeightsError(
        "a placed tensor gives no address of its memory; the model reads it where it has none."
    )


_FACTS: Mapping[str, Callable[[Any], Any]] = {
    ".device": lambda p: p.shown_device,
    ".is_meta": lambda p: False,
    ".is_cpu": lambda p: p.shown_device.type == "cpu",
    ".is_cuda": lambda p: p.shown_device.type == "cuda",
    "get_device": lambda p: -1 if p.shown_device.index is None else p.shown_device.index,
    "data_ptr": _no_values,
}
"""What a tensor without memory would answer otherwise."""

_OF_SIZES = frozenset(
    {".shape", ".dtype", ".ndim", ".layout", ".requires_grad", ".is_leaf", ".grad", ".grad_fn"}
    | {"size", "dim", "numel", "__len__", "is_floating_point", "is_complex", "element_size"}
)
"""Functions that a tensor without memory answers as one with values."""

_SHOWS_VALUES = frozenset({"__repr__", "__str__", "__format__", "__reduce_ex__"})
"""Functions of values that give something else for tensors without memory."""

_WRITE = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift", "matmul",
    ))}
)  # fmt: skip
"""Functions that write into their first argument, beside those whose name ends in `_`."""
