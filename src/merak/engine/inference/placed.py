"""Placed tensors: each has values on some ranks of a pipeline, and only a size on the others.

Every rank of a pipeline runs the same Python code of a model that none of them has whole. A
function of placed tensors is computed on the ranks that have all it reads, beginning with the
parameters, which never move; other values are sent to those first. The other ranks know the sizes
of results without computing them. So whatever a model keeps, such as keys and values of earlier
tokens, stays where it was computed, and what its Python code reads of values (`item`, `bool`) is
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from merak.core.errors import TrainingError, WeightsError
from merak.core.mesh import Mesh
from merak.engine.health.status import Progress
from merak.graph.weights.rank_agreement import transfer_device

_META = torch.device("meta")
_MOST_SIZES = 20_000
"""Results whose sizes are kept: more come of sequences that grow, each of which comes once."""
_Call = Callable[..., Any]


class Gather(Protocol):
    """Gives a parameter whole on the ranks that hold a part of it, which call it together."""

    def __call__(self) -> torch.Tensor:
        """The parameter."""


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


@dataclass(slots=True)
class Pipeline:
    """The ranks of a pipeline, which call a model together.

    Args:
        mesh: the grid of ranks.
        progress: reports waits for other ranks.
        kinds: what calls of a function need, as far as there were any.
        sizes: descriptions of results that this rank has not computed, by function and arguments.
        num_made: how many placed tensors there were.
        num_writes: how many functions have written into placed tensors. Copies are from before or
            from after: which tensors share memory is not the same on all ranks.
    """

    mesh: Mesh
    progress: Progress
    kinds: dict[Hashable, _Kind] = field(default_factory=dict)
    sizes: dict[Hashable, Any] = field(default_factory=dict)
    num_made: int = 0
    num_writes: int = 0

    @property
    def everyone(self) -> frozenset[int]:
        """All of its ranks, as pp ranks."""
        return frozenset(range(self.mesh.pp))

    def broadcast(self, value: torch.Tensor | None, like: torch.Tensor, root: int) -> torch.Tensor:
        """A tensor of one rank on all.

        Args:
            value: the tensor, on the root.
            like: of its size and type.
            root: a pp rank.
        """
        mesh = self.mesh
        group = mesh.group("pp")
        if group is None:
            assert value is not None
            return value
        sent = _buffer(value, like, mesh.device)
        if sent.numel():
            with self.progress.waiting("a value on", mesh.peers("pp")):
                dist.broadcast(sent, src=mesh.rank_at(root), group=group)
        return sent

    def broadcast_object(self, value: object, root: int) -> Any:
        """An object of one rank on all."""
        mesh = self.mesh
        group = mesh.group("pp")
        if group is None:
            return value
        box = [value]
        with self.progress.waiting("a value on", mesh.peers("pp")):
            device = transfer_device(mesh.device)
            dist.broadcast_object_list(box, src=mesh.rank_at(root), group=group, device=device)
        return box[0]

    def send(
        self, value: torch.Tensor | None, like: torch.Tensor, root: int, target: frozenset[int]
    ) -> torch.Tensor | None:
        """A tensor of one rank on some others; None on the rest.

        Args:
            value: the tensor, on the root.
            like: of its size and type.
            root: a pp rank.
            target: pp ranks without it.
        """
        mesh, group, own = self.mesh, self.mesh.group("pp"), self.mesh.pp_rank
        if own != root and own not in target:
            return None
        sent = _buffer(value, like, mesh.device)
        if not sent.numel():
            return sent
        if own == root:
            for other in sorted(target):
                with self.progress.waiting("a value to", (mesh.rank_at(other),)):
                    dist.send(sent, mesh.rank_at(other), group)
        else:
            with self.progress.waiting("a value from", (mesh.rank_at(root),)):
                dist.recv(sent, mesh.rank_at(root), group)
        return sent


def _buffer(value: torch.Tensor | None, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value is None:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    return value.detach().to(device).contiguous()


class Placed(torch.Tensor):
    """A tensor that has values on some ranks of a pipeline, and no memory on the others.

    Attributes:
        pipeline: the ranks.
        holders: the pp ranks that have its values.
        shown_device: the device that it has on those.
        number: of the placed tensor among all, in the order in which they were made.
        gathered: gives a parameter of which its holders have parts; None for other tensors.
        copies: the same values, once sent to further ranks, and the writes before.
    """

    pipeline: Pipeline
    holders: frozenset[int]
    shown_device: torch.device
    number: int
    gathered: Gather | None
    copies: tuple[int, Placed] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function where the values of its arguments are."""
        with torch._C.DisableTorchFunctionSubclass():
            return _run(func, args, dict(kwargs or {}))


class Conversions(TorchFunctionMode):
    """Mode in which functions that make tensors take placed ones, too."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function; of those that copy what they are given, on values that all ranks have."""
        if func in _COPY and any(isinstance(leaf, Placed) for leaf in leaves(args)):
            with torch._C.DisableTorchFunctionSubclass():
                args = _map(_whole, args)
        return func(*args, **(kwargs or {}))


def place(
    value: torch.Tensor,
    pipeline: Pipeline,
    holders: frozenset[int],
    device: torch.device,
    gather: Gather | None = None,
) -> Placed:
    """A placed tensor of what a rank has of it.

    Args:
        value: its values, or a tensor on the meta device of its size.
        pipeline: the ranks.
        holders: the pp ranks that have its values.
        device: that it has on those.
        gather: of a parameter of which each holder has a part.
    """
    made = value.detach().as_subclass(Placed)
    made.pipeline, made.holders, made.shown_device = pipeline, holders, device
    made.gathered, made.copies = gather, None
    made.number = pipeline.num_made = pipeline.num_made + 1
    return made


def whole(value: Any) -> Any:
    """What a function gives, with placed tensors as plain ones on every rank; all call it together.

    Args:
        value: a tensor, or tuples, lists and mappings of them; others stay as they are.
    """
    if isinstance(value, Placed):
        with torch._C.DisableTorchFunctionSubclass():
            return _whole(value)
    if isinstance(value, Mapping):
        for key in list(value):
            found = whole(value[key])
            if found is not value[key]:
                value[key] = found  # type: ignore[index]  # outputs of transformers, and dicts
        return value
    if type(value) in (tuple, list):
        return type(value)(whole(one) for one in value)
    return value


def _whole(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, Placed):
        return value
    pipeline, root = value.pipeline, min(value.holders)
    own = _values(value) if pipeline.mesh.pp_rank in value.holders else None
    if value.holders == pipeline.everyone:
        assert own is not None
        return own
    found = pipeline.broadcast(own if pipeline.mesh.pp_rank == root else None, value, root)
    return found.to(value.shown_device) if own is None else own


def _plain(value: torch.Tensor) -> torch.Tensor:
    return _values(value) if isinstance(value, Placed) else value


def _values(value: Placed) -> torch.Tensor:
    """The plain tensor of a placed one, on a rank that has its values."""
    if value.gathered is not None:
        return value.gathered()
    return value.as_subclass(torch.Tensor)


def _run(func: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    if name in _OF_SIZES:
        return func(*args, **kwargs)
    if (known := _FACTS.get(name)) is not None:
        return known(args[0])
    if func is torch.Tensor.__iter__:
        return iter(_run(torch.Tensor.unbind, args, {}))
    if name in ("__getitem__", "__setitem__"):
        args = (args[0], _plain_slices(args[1]), *args[2:])
    written = _written(name, args, kwargs)
    if written is not None and not isinstance(written, Placed):
        return func(*_map(_whole, args), **_map(_whole, kwargs))
    tensors = _tensors((args, kwargs))
    placed = [tensor for tensor in tensors if isinstance(tensor, Placed)]
    pipeline = placed[0].pipeline
    key = _key(func, args, kwargs, tensors, placed[0])
    kind = pipeline.kinds.get(key)
    if kind is None:  # the same on every rank
        is_cast = key[-1] is not None
        kind = pipeline.kinds[key] = _try(func, args, kwargs, written is not None, is_cast)
    if kind.has_sizes and not kind.gives_tensors:
        return func(*args, **kwargs)
    target = _target(placed, written)
    if not all(target <= one.holders for one in placed):
        args, kwargs = _moved(args, target), _moved(kwargs, target)
    if kind.has_sizes:
        found = _compute(func, args, kwargs, pipeline, target, kind, written is not None)
    else:
        found = _compute_and_describe(func, args, kwargs, pipeline, target)
    if kind.is_cast:
        dtypes = tuple(t.dtype for t in _tensors(found))
        pipeline.kinds[key] = _Kind(True, True, dtypes=dtypes)
    if written is None:
        return found
    pipeline.num_writes += 1
    return written if isinstance(found, torch.Tensor) else found


def _compute(
    func: _Call,
    args: Any,
    kwargs: Any,
    pipeline: Pipeline,
    target: frozenset[int],
    kind: _Kind,
    writes: bool,
) -> Any:
    """The result of a call whose sizes every rank knows."""
    if pipeline.mesh.pp_rank in target:
        found = func(*_with_values(args), **_with_values(kwargs))
        return _placed_results(found, pipeline, target, None)
    shown = _shown_device(args, kwargs)
    found = _known_sizes(func, args, kwargs, pipeline.sizes, kind) if not writes else None
    if found is None:
        found = _sizes(func, args, kwargs, kind.dtypes)
    return _placed_results(found, pipeline, target, shown)


def _known_sizes(
    func: _Call, args: Any, kwargs: Any, known: dict[Hashable, Any], kind: _Kind
) -> Any:
    """The result on tensors without memory, as an equal call has shown; None where none can."""
    key = (func, kind.dtypes, _structure(args), _structure(kwargs))
    try:
        described = known.get(key)
    except TypeError:  # an argument that cannot be compared
        return None
    if described is None:
        if len(known) == _MOST_SIZES:
            known.clear()
        described = known[key] = _map(_Description.of, _sizes(func, args, kwargs, kind.dtypes))
    return _map(_Description.empty, described, _Description)


def _compute_and_describe(
    func: _Call, args: Any, kwargs: Any, pipeline: Pipeline, target: frozenset[int]
) -> Any:
    """The result of a call whose sizes, or values, are known only where it is computed.

    Raises:
        Exception: what the function raises there, on every rank.
    """
    root, found, described = min(target), None, None
    if pipeline.mesh.pp_rank in target:
        try:  # on plain tensors, as their text is another
            found = func(*_map(_plain, args), **_map(_plain, kwargs))
            described = _map(_Description.of, found)
        except Exception as error:
            described = error
    if target != pipeline.everyone:
        own = _name(func)
        name, described = pipeline.broadcast_object((own, described), root)
        if name != own:
            raise TrainingError(
                f"pp rank {root} calls {name}, where this rank calls {own}: what the model's "
                "code does depends on what ranks have different, such as the time or a file."
            )
    if isinstance(described, Exception):
        raise described
    if pipeline.mesh.pp_rank not in target:
        found = _map(_Description.empty, described, _Description)
    devices = [d.device for d in leaves(described) if isinstance(d, _Description)]
    shown = devices[0] if devices else None
    return _placed_results(found, pipeline, target, shown)


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
    func: _Call, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], first: Placed
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


def _try(func: _Call, args: Any, kwargs: Any, writes: bool, is_cast: bool) -> _Kind:
    """What calls of a function need, as one on tensors without memory shows."""
    try:
        found = _sizes(func, _map(_empty, args), _map(_empty, kwargs), None)
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


def _sizes(func: _Call, args: Any, kwargs: Any, dtypes: tuple[torch.dtype, ...] | None) -> Any:
    """The result of a call on tensors without memory.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its named arguments.
        dtypes: of the results, as autocast makes them; None where it does not.
    """
    if func is torch.Tensor.__setitem__:
        return None
    args, kwargs = _map(_without_memory, args), _map(_without_memory, kwargs)
    if func in (torch.Tensor.cpu, torch.Tensor.cuda):
        func, args, kwargs = torch.Tensor.to, (args[0], _META), {}
    if func is torch.Tensor.to:
        args = tuple(_META if _is_device(a) else a for a in args)
    if kwargs.get("device") is not None:
        kwargs["device"] = _META
    if dtypes is None:
        return func(*args, **kwargs)
    types = iter(dtypes)
    found = func(*_map(_as_float, args), **_map(_as_float, kwargs))
    return _map(lambda tensor: tensor.to(next(types)), found)


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


def _placed_results(
    found: Any, pipeline: Pipeline, holders: frozenset[int], device: torch.device | None
) -> Any:
    """Results as placed tensors, which are new on every rank, also where one is an argument.

    Args:
        found: the results.
        pipeline: the ranks.
        holders: those that have computed them.
        device: that they have there; None on those ranks.
    """

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        shown = device or (tensor.shown_device if isinstance(tensor, Placed) else tensor.device)
        return place(tensor, pipeline, holders, shown)

    return _map(placed, found)


def _map(function: Callable[[Any], Any], tree: Any, of: type = torch.Tensor) -> Any:
    """Arguments or results with a function of each tensor, or other thing, in its place."""
    kind = type(tree)
    if isinstance(tree, of):
        return function(tree)
    if kind is tuple or kind is list:
        return kind([_map(function, one, of) for one in tree])
    if kind is dict:
        return {name: _map(function, one, of) for name, one in tree.items()}
    if isinstance(tree, tuple):  # several named results, such as those of `max`
        made = [_map(function, one, of) for one in tree]
        return kind(*made) if hasattr(kind, "_fields") else kind(made)
    return tree


def leaves(tree: Any) -> list[Any]:
    """What arguments or results consist of."""
    found: list[Any] = []
    _add_leaves(tree, found)
    return found


def _add_leaves(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, (tuple, list)):
        for one in tree:
            _add_leaves(one, found)
    elif isinstance(tree, dict):
        for one in tree.values():
            _add_leaves(one, found)
    else:
        found.append(tree)


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


def bring(tree: Any, target: frozenset[int]) -> Any:
    """Arguments of a module, with values on all ranks that have its parameters.

    Args:
        tree: the arguments; those that one of the ranks has already stay as they are.
        target: the pp ranks that have all of its parameters.
    """

    def brought(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, Placed) or value.holders & target:
            return value
        with torch._C.DisableTorchFunctionSubclass():
            made: torch.Tensor = _moved(value, target)
        return made

    return _map(brought, tree)


def _moved(tree: Any, target: frozenset[int]) -> Any:
    """Arguments, with values on all ranks of the target."""

    def moved(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, Placed) or target <= value.holders:
            return value
        now = value.pipeline.num_writes
        if value.copies is not None and value.copies[0] == now:
            value = value.copies[1]
            if target <= value.holders:
                return value
        made = _sent(value, target)
        value.copies = (now, made)
        return made

    return _map(moved, tree)


def _sent(value: Placed, target: frozenset[int]) -> Placed:
    """The same values, on further ranks."""
    pipeline, root = value.pipeline, min(value.holders)
    rank = pipeline.mesh.pp_rank
    own = _values(value) if rank in value.holders else None
    found = pipeline.send(own if rank == root else None, value, root, target - value.holders)
    if own is not None:
        shown = own
    elif found is not None:
        shown = found.to(value.shown_device)
    else:
        shown = torch.empty(value.shape, dtype=value.dtype, device=_META)
    return place(shown, pipeline, value.holders | target, value.shown_device)


def _with_values(tree: Any) -> Any:
    """Arguments of a rank that has their values."""

    def values(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, Placed) and value.gathered is not None:
            return value.gathered()
        return value

    return _map(values, tree)


def _plain_slices(index: Any) -> Any:
    """An index whose slices have bounds that every rank knows."""
    if isinstance(index, tuple):
        return tuple(_plain_slices(one) for one in index)
    if isinstance(index, slice):
        bounds = (index.start, index.stop, index.step)
        return slice(*(int(_whole(b)) if isinstance(b, Placed) else b for b in bounds))
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

_COPY = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})
"""Functions that make a tensor of anything, which no class of tensors can change."""

_WRITE = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift",
        "rshift", "matmul",
    ))}
)  # fmt: skip
"""Functions that write into their first argument, beside those whose name ends in `_`."""
