"""Full reductions of whole parameters in an optimizer's step over shards, such as their norms.

LAMB and LARS step element by element, but for norms of a whole parameter and its update. On shards
each rank reduces what it has, and ranks reduce the results: all of a step in one exchange. What
depends on a result waits for that, as a list of operators, while the optimizer's code goes on. Only
where its code reads a number does the exchange happen there.

Sources: arXiv 1708.03888 (LARS), section 4; arXiv 1904.00962 (LAMB), algorithm 2.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from merak.core.errors import TrainingError
from merak.graph.ir.mutation import written_values

aten = torch.ops.aten


class Combine(Enum):
    """How the ranks' parts of a full reduction become one."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True, eq=False)
class CutParameter:
    """A parameter of which this rank has a shard.

    Args:
        name: of the parameter.
        numel: elements of the whole parameter.
        shape: of the shard.
        pieces: splits a tensor of that shape into parts without padding, each with the number of
            ranks that have the same.
    """

    name: str
    numel: int
    shape: tuple[int, ...]
    pieces: Callable[[torch.Tensor], Iterable[tuple[torch.Tensor, int]]] = lambda x: ((x, 1),)


@dataclass(frozen=True, slots=True)
class Partial:
    """This rank's part of a full reduction.

    Args:
        cut: the parameter that it is of.
        combine: how ranks' parts become one.
        value: a scalar, float64.
    """

    cut: CutParameter
    combine: Combine
    value: torch.Tensor


Exchange = Callable[[Sequence[Partial]], Sequence[torch.Tensor]]
"""Reduces the parts of all ranks; a scalar for each."""


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A full reduction of one tensor.

    Args:
        combine: how parts become one.
        part: of a piece of the tensor.
        end: of the parts of all ranks and the elements of the whole, the result.
    """

    combine: Combine
    part: Callable[[torch.Tensor], torch.Tensor]
    end: Callable[[torch.Tensor, int], torch.Tensor] = lambda total, _: total


def _norm(order: float | None) -> _Reduction:
    p = 2.0 if order is None else float(order)
    if math.isinf(p):
        sign = math.copysign(1.0, p)
        return _Reduction(
            Combine.MAX,
            lambda x: sign * torch.linalg.vector_norm(x, p),
            lambda total, _: sign * total,
        )
    if p == 0.0:
        return _SUM_OF_NONZERO
    return _Reduction(
        Combine.SUM,
        lambda x: _precise_norm(x, p).double().pow(p),
        lambda total, _: total.pow(1.0 / p),
    )


def _precise_norm(x: torch.Tensor, p: float) -> torch.Tensor:
    is_low = x.dtype in (torch.bfloat16, torch.float16)
    found: torch.Tensor = torch.linalg.vector_norm(x, p, dtype=torch.float32 if is_low else None)
    return found


_SUM = _Reduction(Combine.SUM, lambda x: x.sum())
_SUM_OF_NONZERO = _Reduction(Combine.SUM, lambda x: (x != 0).sum())
_MEAN = _Reduction(Combine.SUM, lambda x: x.sum(), lambda total, numel: total / numel)
_MAX = _Reduction(Combine.MAX, lambda x: x.max())
_MIN = _Reduction(Combine.MAX, lambda x: -x.min(), lambda total, _: -total)
_ANY = _Reduction(Combine.MAX, lambda x: (x != 0).any())
_ALL = _Reduction(Combine.MAX, lambda x: (x == 0).any(), lambda total, _: 1.0 - total)

_BY_NAME: dict[str, _Reduction | Callable[[float | None], _Reduction]] = {
    "aten::sum": _SUM,
    "aten::mean": _MEAN,
    "aten::max": _MAX,
    "aten::amax": _MAX,
    "aten::min": _MIN,
    "aten::amin": _MIN,
    "aten::any": _ANY,
    "aten::all": _ALL,
    "aten::count_nonzero": _SUM_OF_NONZERO,
    "aten::linalg_vector_norm": _norm,
    "aten::norm": _norm,
    "aten::_foreach_norm": _norm,
}

_PRODUCTS = ("aten::dot", "aten::vdot")

_SAME_ORDER = frozenset(
    f"aten::{name}"
    for name in (
        "alias clone contiguous copy_ detach empty_like fill_ full_like lerp lift_fresh new_zeros "
        "ones_like reshape squeeze _to_copy unsqueeze _unsafe_view view zero_ zeros_like"
    ).split()
)
"""Operators beside those of single elements that leave elements in their order."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An operator that waits for a reduction, and the tensors that get its results."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Open:
    """A reduction whose parts are not exchanged, and the tensor that gets its result."""

    partial: Partial
    reduction: _Reduction
    result: torch.Tensor


class WholeReductions(TorchDispatchMode):
    """Mode in which full reductions of shards are those of the whole parameters.

    Args:
        cuts: by tensor, of which parameter it is a shard: parameters, gradients and states.
        exchange: reduces parts over all ranks that have shards.
    """

    def __init__(self, cuts: Mapping[torch.Tensor, CutParameter], exchange: Exchange) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchange = exchange
        self._cuts: dict[int, tuple[weakref.ref[torch.Tensor], CutParameter]] = {}
        for tensor, cut in cuts.items():
            self._cuts[id(tensor)] = weakref.ref(tensor), cut
        self._open: list[_Open] = []
        self._queue: deque[_Waiting] = deque()
        # Storages that are not up to date before what waits has run, and those that it reads.
        self._written: set[int] = set()
        self._read: set[int] = set()
        self.num_reads: int = 0
        """Exchanges because a number was read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or let it wait."""
        return self._run(func, args, kwargs or {}, None)

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Leave the mode, and run what waits."""
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if kind is None:
            self._finish()

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: list[Any] | None
    ) -> Any:
        """Run an operator whose results are new, or those of one that has waited."""
        tensors = _tensors((*args, *kwargs.values()))
        if self._written and self._must_wait(func, args, kwargs, tensors):
            if not _reads_values(func):
                return self._wait(func, args, kwargs, tensors, own)
            self.num_reads += 1
            self._finish()
        cut = any(self._cut(tensor) is not None for tensor in tensors)
        if cut and _is_full_reduction(func, args, kwargs):
            return self._reduce(func, args, kwargs, own)
        result = func(*args, **kwargs)
        if own:
            for mine, made in zip(own, _tensors(result), strict=True):
                mine.set_(made.to(mine.device))  # of fake tensors where makes one on "meta"
        self._follow(func, args, kwargs, own or _tensors(result))
        return result

    def _must_wait(
        self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]
    ) -> bool:
        if any(_key(tensor) in self._written for tensor in tensors):
            return True
        return any(_key(own) in self._read for own in _tensors(written_values(func, args, kwargs)))

    def _wait(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        own: list[Any] | None,
    ) -> Any:
        written = _tensors(written_values(func, args, kwargs))
        made: Any = None
        if own is None:
            made = written[0] if len(written) == 1 else tuple(written)
            made = made if written else _results_to_be(func, args, kwargs, tensors)
            own = [] if written else _tensors(made)  # what is written into stays itself
        self._queue.append(_Waiting(func, args, kwargs, own))
        self._read.update(map(_key, tensors))
        self._written.update(map(_key, (*written, *own)))
        if not _is_full_reduction(func, args, kwargs):
            self._follow(func, args, kwargs, own or written)
        return made if func._schema.returns else None

    def _reduce(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], own: list[Any] | None
    ) -> Any:
        """Reduce what is here, and give out tensors that get the result."""
        made = None
        if own is None:
            made = _results_to_be(func, args, kwargs, _tensors((*args, *kwargs.values())))
            own = _tensors(made)
        reduction, sources = _reduction_of(func, args, kwargs)
        for source, result in zip(sources, own, strict=True):
            cut = self._cut_of(func, _tensors(source))
            if cut is None:  # of a list that has whole ones, too
                cut = CutParameter("", source.numel(), tuple(source.shape))
            value = _part(reduction, cut, source)
            self._open.append(_Open(Partial(cut, reduction.combine, value), reduction, result))
            self._written.add(_key(result))
        return made

    @torch.no_grad()
    def _finish(self) -> None:
        """Exchange parts and run what waits for them, until nothing waits."""
        while self._open or self._queue:
            waiting, self._open = self._open, []
            self._written.clear()
            self._read.clear()
            totals = self._exchange([one.partial for one in waiting])
            for one, total in zip(waiting, totals, strict=True):
                value = one.reduction.end(total, one.partial.cut.numel)
                value = value.to(one.result.device, one.result.dtype)
                one.result.set_(value.expand(one.result.shape).clone())  # type: ignore[call-overload]
            queue, self._queue = self._queue, deque()
            while queue:
                one_op = queue.popleft()
                self._run(one_op.func, one_op.args, one_op.kwargs, one_op.results)

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]
    ) -> None:
        """Note of which parameters the results of an operator are shards."""
        if func._schema.name.startswith("aten::_foreach_"):
            lists = [one for one in (*args, *kwargs.values()) if isinstance(one, (list, tuple))]
            results = results or lists[0]
            for place, result in enumerate(results):
                sources = [one[place] for one in lists if len(one) == len(results)]
                self._note(func, _tensors(sources), [result])
        else:
            self._note(func, _tensors((*args, *kwargs.values())), results)

    def _note(self, func: Any, sources: Sequence[torch.Tensor], results: Sequence[Any]) -> None:
        cut = self._cut_of(func, sources)
        if cut is None:
            return
        if not _keeps_order(func):
            raise _needs_whole(func, cut)
        numel = math.prod(cut.shape)
        for result in results:
            if result.numel() != numel:
                raise _needs_whole(func, cut)
            self._cuts[id(result)] = weakref.ref(result), cut

    def _cut(self, tensor: torch.Tensor) -> CutParameter | None:
        """The parameter that a tensor is a shard of; None for none."""
        ref, cut = self._cuts.get(id(tensor), (None, None))
        return cut if ref is not None and ref() is tensor else None

    def _cut_of(self, func: Any, tensors: Sequence[torch.Tensor]) -> CutParameter | None:
        """The one parameter that tensors are shards of; None for none."""
        found = {id(cut): cut for cut in map(self._cut, tensors) if cut is not None}
        if len(found) > 1:
            raise _needs_whole(func, *found.values())
        return next(iter(found.values()), None)


def shards_of(
    optimizer: torch.optim.Optimizer, cuts: Mapping[torch.Tensor, CutParameter]
) -> dict[torch.Tensor, CutParameter]:
    """Parameters, gradients and states of an optimizer that are shards.

    Args:
        optimizer: before a step.
        cuts: by parameter.
    """
    found = dict(cuts)
    for parameter, cut in cuts.items():
        states = optimizer.state.get(parameter, {})
        for value in (parameter.grad, *(states.values() if isinstance(states, dict) else ())):
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                found[value] = cut
    return found


def _needs_whole(func: Any, *cuts: CutParameter) -> TrainingError:
    named = " and ".join(repr(cut.name) for cut in cuts)
    return TrainingError(
        f"the optimizer's step calls {func} on shards of {named}, of which it needs the whole; use "
        "an optimizer whose steps do the same each time, or tp=1 and zero=0."
    )


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Tensors among an operator's arguments or results, of which some are lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if not isinstance(values, (list, tuple)):
        return []
    return [one for value in values for one in _tensors(value)]


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A value with each tensor in it replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    is_list = isinstance(value, (list, tuple))
    return type(value)(_mapped(function, one) for one in value) if is_list else value


def _reads_values(func: Any) -> bool:
    """Whether what an operator gives, or its shape, depends on numbers."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in func.tags for tag in tags)


def _keeps_order(func: Any) -> bool:
    """Whether an operator computes each element by itself, and leaves it in its place."""
    name = func._schema.name
    is_foreach = name.startswith("aten::_foreach_")
    return is_foreach or torch.Tag.pointwise in func.tags or name in _SAME_ORDER


def _is_full_reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator reduces over all elements, in a way that shards can be combined."""
    name = func._schema.name
    if name in _PRODUCTS:
        return True
    if name not in _BY_NAME or len(func._schema.returns) != 1:
        return False
    dims = _argument(func, args, kwargs, "dim")
    if dims is None or dims == []:
        return True
    return (1 if isinstance(dims, int) else len(dims)) == int(args[0].dim())


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> Any:
    for place, own in enumerate(func._schema.arguments):
        if own.name in names:
            return args[place] if place < len(args) else kwargs.get(own.name, own.default_value)
    return None


def _reduction_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Reduction, Sequence[Any]]:
    """The reduction that an operator is, and the tensors that it reduces."""
    name = func._schema.name
    if name in _PRODUCTS:
        return _SUM, [args[:2]]
    found = _BY_NAME[name]
    if not isinstance(found, _Reduction):
        found = found(_argument(func, args, kwargs, "ord", "p"))
    return found, args[0] if isinstance(args[0], (list, tuple)) else [args[0]]


def _part(reduction: _Reduction, cut: CutParameter, source: Any) -> torch.Tensor:
    """This rank's part of a reduction, each element counted once over all ranks."""
    if isinstance(source, tuple):
        source = source[0] * source[1]
    value = source if tuple(source.shape) == cut.shape else source.reshape(cut.shape)
    pieces = [(piece, copies) for piece, copies in cut.pieces(value) if piece.numel()]
    parts = [reduction.part(piece).double() for piece, _ in pieces]
    if reduction.combine is Combine.MAX:
        parts = parts or [source.new_full((), -math.inf, dtype=torch.float64)]
        return torch.stack(parts).max()
    parts = [one if copies == 1 else one / copies for one, (_, copies) in zip(parts, pieces)]
    parts = parts or [source.new_zeros((), dtype=torch.float64)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def _results_to_be(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
) -> Any:
    """Tensors of the results' shapes and types, without memory, that are set later."""
    # Of one that is fake, if any is: in forecasts results are fake, too.
    like = max(tensors, key=lambda one: (one.dim(), type(one) is not torch.Tensor))
    device = kwargs.get("device") or like.device

    def made(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return like.new_empty_strided(shape, (0,) * len(shape), dtype=dtype, device=device)

    if _is_full_reduction(func, args, kwargs):
        sources = _reduction_of(func, args, kwargs)[1]
        keeps = _argument(func, args, kwargs, "keepdim")
        shapes = [(1,) * one.dim() if keeps else () for one in map(_first, sources)]
        types = [_type_of_reduction(func, args, kwargs, one.dtype) for one in map(_first, sources)]
        found = [made(*own) for own in zip(shapes, types, strict=True)]
        return found if isinstance(args[0], (list, tuple)) else found[0]
    if torch.Tag.pointwise in func.tags and len(func._schema.returns) == 1:
        # Kernels on single elements take less time than those of the meta device.
        own = {name: _mapped(_element, value) for name, value in kwargs.items()}
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        return made(shape, func(*_mapped(_element, args), **own).dtype)
    own = {name: _mapped(_on_meta, value) for name, value in kwargs.items()}
    own |= {"device": torch.device("meta")} if "device" in own else {}
    result = func(*_mapped(_on_meta, args), **own)
    return _mapped(lambda one: made(one.shape, one.dtype), result)


def _first(source: Any) -> Any:
    """The first factor of a product, or the one tensor that is reduced."""
    return source[0] if isinstance(source, tuple) else source


def _type_of_reduction(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> torch.dtype:
    if (given := _argument(func, args, kwargs, "dtype")) is not None:
        return given  # type: ignore[no-any-return]
    if func._schema.name in ("aten::any", "aten::all"):
        return torch.bool
    counts = func._schema.name == "aten::count_nonzero"
    sums = func._schema.name in ("aten::sum", "aten::dot") and not dtype.is_floating_point
    return torch.int64 if counts or sums else dtype


def _element(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ones((1,) * tensor.dim(), dtype=tensor.dtype, device="cpu")


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    sizes = (tensor.size(), tensor.stride())
    return torch.empty_strided(*sizes, dtype=tensor.dtype, device="meta")
