"""Shards of parameters in a script's hands: what of the whole can be computed of them.

Tensor parallelism, experts and ZeRO leave a rank some rows or columns of a parameter. An operator
is let through where its result is the same part of what it would give for the whole: elementwise
over tensors that are sharded alike, a norm of every row of a matrix whose rows are split. Others,
such as the norm of all or a random draw, would be another number on every rank; they are refused
with the line of the user's script. While an engine runs, parameters are plain ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from merak.core.errors import TrainingError
from merak.core.source_lines import is_called_by_merak, is_library
from merak.graph.ir.operators import (
    CONCATENATIONS,
    DENSE_GEMMS,
    EXPANDS,
    FILLS_LIKE,
    FILLS_NEW,
    NARROWS,
    REDUCTIONS,
    RESHAPES,
    SAME_VALUES,
    SPLITS,
    SQUEEZES,
    TRANSPOSES,
    draws,
    family,
    is_pointwise,
)
from merak.graph.weights.absent import AbsentTensor, is_clipping, missing_gradient, refusal

_TENSOR: Any = torch.Tensor
_BY_PLACE = (
    REDUCTIONS
    | RESHAPES
    | TRANSPOSES
    | SQUEEZES
    | EXPANDS
    | SPLITS
    | NARROWS
    | SAME_VALUES
    | FILLS_LIKE
    | CONCATENATIONS
    | DENSE_GEMMS
    | FILLS_NEW
    | {"linalg_vector_norm", "norm", "argmax", "argmin", "var_mean", "std_mean"}
    | {"select", "stack", "mv", "copy_", "fill_", "zero_", "masked_fill_", "detach_"}
)
"""Operators whose results have, along a dim of an operand that they keep, one part for each of its
parts; what torch tags as pointwise is such, too."""

_GREATER_PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099)
"""Sizes that stand for those of sharded dims, and that no other dim has."""


@dataclass(frozen=True, slots=True)
class DimCut:
    """Cut of a dim over ranks: its cause, which dims that are cut alike share, and the whole size.

    Args:
        by: what cuts it; dims that are cut by the same are sharded alike.
        size: of the whole dim.
    """

    by: Hashable
    size: int


Dims = tuple[tuple[int, DimCut], ...]
"""Sharded dims, counted from the front, each with how it is cut."""


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Sharding of a value, as far as another value must have the same.

    Args:
        source: the parameter, as sentences name it.
        dims: the sharded ones; none for a parameter that is whole, but is not what is stepped.
        is_stepped: whether the optimizer steps it, and not a tensor of its own.
        readers: not empty once a script has had the value in its hands, where it may write.
    """

    source: str = field(compare=False)
    dims: Dims
    is_stepped: bool = field(default=True, compare=False)
    readers: list[None] = field(default_factory=list, compare=False)

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole.

        Args:
            shape: of this rank's shard.
        """
        sizes = {dim: cut.size for dim, cut in self.dims}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


class ShardTensor(torch.Tensor):
    """A value of which this rank has a shard, computed of shards of parameters.

    Attributes:
        sharding: how it is sharded.
    """

    sharding: ShardLayout

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch; a script's calls are followed operator by operator."""
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardTensor)]
            if not _is_followed(*tensors):
                return func(*args, **(kwargs or {}))
            with _Following():  # type: ignore[no-untyped-call]
                return func(*args, **(kwargs or {}))

    def numel(self) -> int:
        """The number of elements: for a script of the whole, for torch and Merak of the shard."""
        if is_library(sys._getframe(1).f_code.co_filename) or not _is_followed():
            return math.prod(self.shape)
        return math.prod(self.sharding.whole_shape(self.shape))

    nelement = numel

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        _note_script(self)
        found: torch.Tensor = _TENSOR.data.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        is_equally_sharded = isinstance(value, ShardTensor) and value.sharding == self.sharding
        is_of_script = _note_script(self)
        if self.sharding.dims and not is_equally_sharded and _is_followed():
            raise _refused("writes into", self.sharding)
        is_same_kind = value.shape == self.shape and value.dtype == self.dtype
        if is_same_kind and value.device == self.device and is_of_script:
            # Into its own memory, which what the optimizer steps may share.
            with torch._C.DisableTorchFunctionSubclass():
                self.detach().copy_(value.detach())
            return
        _TENSOR.data.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, which is sharded alike.

        Raises:
            TrainingError: a norm of all gradients is computed of shards.
        """
        found: torch.Tensor | None = _TENSOR.grad.__get__(self)
        if not _is_followed():
            return found
        caller = sys._getframe(1)
        is_missing = not self.sharding.is_stepped and self.requires_grad and found is None
        is_read = is_clipping(caller) or not is_library(caller.f_code.co_filename)
        if is_missing and is_read:  # and not by what clears it
            raise missing_gradient(self.sharding.source)
        if is_clipping(caller):
            raise _refused("reads the gradient of", self.sharding)
        return None if found is None else marked(found.detach(), self.sharding)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _TENSOR.grad.__set__(self, value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to give a shard's numbers to a script.

        Raises:
            TrainingError: a script asks.
        """
        return self._plain("reads").numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Refuse to give a shard's numbers to a script, as `numpy` does."""
        return self._plain("reads").tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain("reads").__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._plain("reads").__dlpack__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain("saves").__reduce_ex__(protocol)

    def _plain(self, verb: str) -> torch.Tensor:
        """An alias that is not followed, for Merak's own code."""
        if _is_followed(self) and self.sharding.dims:
            raise _refused(verb, self.sharding)
        with torch._C.DisableTorchFunctionSubclass():
            found = self.detach()
            return (
                nn.Parameter(found, self.requires_grad)
                if isinstance(self, ShardParameter)
                else found
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.copied(is_followed=_is_followed())
        found: torch.Tensor = memo[id(self)]
        return found

    def copied(self, *, is_followed: bool) -> torch.Tensor:
        """Copy of the shard, as a shard of the same parameter.

        Args:
            is_followed: whether a script gets it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            made = self.detach().clone()
        if isinstance(self, ShardParameter):
            made = nn.Parameter(made, self.requires_grad)
        return marked(made, self.sharding) if is_followed else made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<shard of {self.sharding.source}, size={tuple(self.shape)}, dtype={self.dtype}>"


class ShardParameter(ShardTensor, nn.Parameter):
    """A parameter of which this rank has a shard."""


class ShardWatch:
    """The sharded tensors of an engine, which scripts see and which it computes with itself.

    None is watched before `start`.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._depth = 0

    def start(self, tensors: Iterable[tuple[nn.Parameter, ShardLayout]]) -> None:
        """Watch tensors, each with how it is sharded, wherever a script reads them."""
        self._tensors = []
        self.add(tensors)

    def add(self, tensors: Iterable[tuple[nn.Parameter, ShardLayout]]) -> None:
        """Watch further tensors."""
        own = []
        for tensor, sharding in tensors:
            if isinstance(tensor, AbsentTensor):
                tensor.num_elements = math.prod(sharding.whole_shape(tensor.shape))
            else:
                own.append(marked(tensor, sharding))
        self._tensors += [tensor for tensor in own if isinstance(tensor, ShardParameter)]

    def close(self) -> None:
        """Watch them no more: another engine has the model."""
        self._become(nn.Parameter)
        self._tensors = []

    def pause(self) -> None:
        """Unwrap watched parameters to plain ones, until as many calls of `resume`."""
        self._depth += 1
        if self._depth == 1:
            self._become(nn.Parameter)

    def resume(self) -> None:
        """End what `pause` has begun."""
        self._depth -= 1
        if not self._depth:
            self._become(ShardParameter)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context of an engine's own work, in which they are plain parameters."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def _become(self, cls: type[nn.Parameter]) -> None:
        for tensor in self._tensors:
            tensor.__class__ = cls


def marked(tensor: torch.Tensor, sharding: ShardLayout) -> torch.Tensor:
    """Wrap a tensor so that reads by a script are followed; one of another class stays as it is.

    Args:
        tensor: of torch's own class.
        sharding: how it is sharded.
    """
    if type(tensor) is torch.Tensor:
        tensor.__class__ = ShardTensor
    elif type(tensor) is nn.Parameter:
        tensor.__class__ = ShardParameter
    if isinstance(tensor, ShardTensor):
        tensor.sharding = sharding
    return tensor


class _Following(TorchDispatchMode):
    """Follows the operators of a call, and refuses those that need the whole."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        followed = [t.sharding for t in leaves if isinstance(t, ShardTensor) and t.sharding.dims]
        if not followed or any(isinstance(t, AbsentTensor) for t in leaves):
            return func(*args, **kwargs)
        layouts = _layouts_of_results(func, args, kwargs, followed[0])
        made = func(*args, **kwargs)
        results = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        for result, dims in zip(results, layouts, strict=True):
            if dims and not any(result is tensor for tensor in leaves):
                marked(result, ShardLayout(followed[0].source, dims))
        return made


def _layouts_of_results(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: ShardLayout
) -> Sequence[Dims]:
    """The sharded dims of an operator's results; none where one does not depend on shards.

    Raises:
        TrainingError: they are not shards of what it gives for the whole.
    """
    if draws(func):
        raise _refused("draws random numbers for", first)
    call = tree_map_only(torch.Tensor, _operand, (args, kwargs))
    try:
        if func.__name__.startswith("_foreach_"):
            return [dims for place in _places(call) for dims in _probed(func, *place)]
        if _is_by_place(func):
            return _probed(func, _frozen(call[0]), tuple(sorted(call[1].items())))
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        pass
    writes = func._schema.arguments and func._schema.arguments[0].alias_info
    raise _refused("writes into" if writes and writes.is_write else "reads", first)


@dataclass(frozen=True, slots=True)
class _Operand:
    """What is known of an operand without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: Dims


def _operand(tensor: torch.Tensor) -> _Operand:
    dims = tensor.sharding.dims if isinstance(tensor, ShardTensor) else ()
    return _Operand(tuple(tensor.shape), tensor.dtype, dims)


def _frozen(values: Any) -> Any:
    """Arguments as tuples."""
    return tuple(map(_frozen, values)) if isinstance(values, (list, tuple)) else values


def _places(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    """Calls of an operator over lists of tensors for each of their places."""
    args, kwargs = call
    lists = [v for v in (*args, *kwargs.values()) if isinstance(v, (list, tuple))]

    def at(place: int, value: Any) -> Any:
        return (value[place],) if isinstance(value, (list, tuple)) else value

    for place in range(len(lists[0])):
        own = {name: at(place, value) for name, value in kwargs.items()}
        yield tuple(at(place, value) for value in args), tuple(sorted(own.items()))


@cache
def _is_by_place(func: Any) -> bool:
    if any(argument.is_out for argument in func._schema.arguments):
        return False
    return is_pointwise(func) or family(func) in _BY_PLACE


@lru_cache(maxsize=4096)
def _probed(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> list[Dims]:
    """The sharded dims of an operator's results, by the sizes that it gives without numbers.

    Sharded dims get a size that no other has. Where it is found again in a result, that is sharded;
    where it is gone, or does not fit the other operands, the operator needs the whole.

    Raises:
        ValueError, RuntimeError: it does.
    """
    operands = [v for v in tree_leaves((args, kwargs)) if isinstance(v, _Operand)]
    keys = list(dict.fromkeys(key for one in operands for _, key in one.dims))
    sizes = dict(zip(keys, _GREATER_PRIMES, strict=False))
    name, given = family(func), dict(kwargs)
    if name in FILLS_NEW:  # whose result has an operand's layout if it has its shape
        return [operands[0].dims if args[1] == operands[0].shape else ()]
    if name in SPLITS:
        _refuse_split(func, args, given)
    if name in EXPANDS | RESHAPES:
        args = (args[0], _with_sizes(args, sizes, name in EXPANDS), *args[2:])

    def probe(value: Any) -> Any:
        if not isinstance(value, _Operand):
            return list(map(probe, value)) if isinstance(value, tuple) else value
        shape = list(value.shape)
        for dim, key in value.dims:
            shape[dim] = sizes[key]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    if given.get("device") is not None:
        given["device"] = torch.device("meta")
    try:
        made = func(*map(probe, args), **{name: probe(value) for name, value in given.items()})
        results = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        return [_found_again(tuple(t.shape), sizes) for t in results]
    except (RuntimeError, ValueError):
        if name not in RESHAPES:
            raise
        shape = tuple(torch.empty(operands[0].shape, device="meta").view(args[1]).shape)
        number = math.prod(ShardLayout("", operands[0].dims).whole_shape(operands[0].shape))
        merged = ("reshaped", operands[0], shape)
        return [
            tuple((d, DimCut((merged, d), 1 if d else number)) for d in range(len(shape)))
        ]  # all that there is counts along the first


def _refuse_split(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Refuse to cut a sharded dim, as this rank's first part is not the whole's."""
    names = [argument.name for argument in func._schema.arguments]
    dim = given.get("dim", args[names.index("dim")] if len(args) > names.index("dim") else 0)
    if dim % len(args[0].shape) in dict(args[0].dims):
        raise ValueError(dim)


def _with_sizes(
    args: tuple[Any, ...], sizes: Mapping[DimCut, int], from_right: bool
) -> tuple[int, ...]:
    """The sizes that an expansion or a reshape is given, with those of sharded dims in place."""
    (operand, given), found = args[:2], list(args[1])
    for dim, key in operand.dims:
        place = dim + len(given) - len(operand.shape) if from_right else dim
        if place < len(found) and found[place] == operand.shape[dim]:
            found[place] = sizes[key]
    return tuple(found)


def _found_again(shape: tuple[int, ...], sizes: Mapping[DimCut, int]) -> Dims:
    """Where sharded dims are in a result.

    Raises:
        ValueError: one is not there, or twice.
    """
    dims = [
        (dim, key) for dim, size in enumerate(shape) for key, one in sizes.items() if size == one
    ]
    if sorted(shape[dim] for dim, _ in dims) != sorted(sizes.values()):
        raise ValueError(shape)
    return tuple(dims)


def may_be_written(tensor: torch.Tensor) -> bool:
    """Whether a script has had a watched tensor in its hands, or views of it, and may write."""
    sharding = getattr(tensor, "sharding", None)
    return isinstance(sharding, ShardLayout) and bool(sharding.readers)


_is_layout_known: list[bool] = []
"""Not empty once the script has asked for the layout."""


def note_who_asks_for_layout() -> None:
    """Allow a script to compute with local shards, once it has asked for their placement."""
    if not is_called_by_merak(sys._getframe(2), __file__):
        _is_layout_known[:] = [True]


def _is_followed(*given: ShardTensor) -> bool:
    """Whether a script, or a package that it uses, computes with a shard, and not Merak itself.

    A script that has asked for the layout gathers and joins shards itself.

    Args:
        given: the tensors that the caller gets hold of.
    """
    return _note_script(*given) and not _is_layout_known


def _note_script(*given: ShardTensor) -> bool:
    """Note that a script gets hold of tensors, into which it may write; False if Merak does."""
    if is_called_by_merak(sys._getframe(1), __file__):
        return False
    for tensor in given:
        tensor.sharding.readers[:] = [None]
    return True


def _refused(verb: str, sharding: ShardLayout) -> TrainingError:
    if not sharding.dims:
        why = "a norm of those that are here is not that of all"
        return refusal(verb, "some of all parameters", f"{sharding.source}, and {why}")
    return refusal(
        verb,
        "a value of which this rank has a shard",
        f"{sharding.source}, and what is computed of a shard here is not that of the whole",
    )
