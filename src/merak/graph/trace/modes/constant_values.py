"""Tensors with known values in a trace: those computed from sizes alone.

Contrastive losses index a matrix by masks such as `~torch.eye(2 * n, dtype=torch.bool)`. How many
elements such a mask selects follows from the batch's shape, so the trace need not ask for values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.types import py_sym_types
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from merak.graph.trace.opaque.collectives import refused_collectives

_T = torch.Tensor
_MOST_ELEMENTS = 2**20
"""Larger tensors are not computed beside the trace."""

_FACTORIES = frozenset(
    getattr(torch, name)
    for name in "arange eye zeros ones full tensor linspace tril_indices triu_indices empty".split()
)
_LIKE = frozenset((torch.zeros_like, torch.ones_like, torch.full_like)) | frozenset(
    getattr(_T, name) for name in "new_zeros new_ones new_full new_tensor".split()
)
"""Functions that read no values of their argument."""
_ANSWERS = frozenset((_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__))
_DATA_DEPENDENT = frozenset(
    getattr(owner, name)
    for owner in (torch, _T)
    for name in "nonzero argwhere unique masked_select bincount".split()
)
"""Functions whose results have sizes that depend on numbers."""
_SELECTS = frozenset((torch.masked_select, _T.masked_select))
_DRAWS = (
    *("rand", "bernoulli", "multinomial", "normal", "dropout", "uniform", "exponential"),
    *("geometric", "cauchy", "poisson", "gumbel"),
)
"""Parts of the names of functions that draw at random."""


class ConstantValues(TorchFunctionMode):
    """Function mode that computes tensors made of sizes alone beside the fake ones.

    It answers where a model asks for the values of such a tensor, or indexes by them.
    """

    most_elements = _MOST_ELEMENTS

    def __init__(self) -> None:
        super().__init__()
        self._twins: Any = WeakIdKeyDictionary()
        self._unknown: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, with indices in place of masks of known values."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _T)]
        is_like = func in _LIKE and bool(tensors)
        read = tensors[1:] if is_like else tensors  # of the first its shape alone
        known = all(self._known(tensor) is not None for tensor in read)
        if _writes(func, kwargs) and tensors and not known:
            self._forget(tensors if isinstance(func, torch._ops.OpOverload) else tensors[:1])
        if not known or not (tensors or func in _FACTORIES):
            if func in _SELECTS and len(args) == 2 and self._selects(*args):
                func = _T.__getitem__  # equal for a mask of the tensor's shape
            return func(*self._placed(func, args), **kwargs)
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors) and tensors:
            return func(*args, **kwargs)
        twin = self._twin(func, args, kwargs)
        if twin is None:
            self._forget(tensors[:1] if _writes(func, kwargs) else [])
            return func(*args, **kwargs)
        if func in _ANSWERS or func in _DATA_DEPENDENT or (func is torch.where and len(args) == 1):
            return twin[0]
        result = func(*self._placed(func, args), **kwargs)
        self._note(result, twin[0])
        return result

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has known values, or had."""
        return tensor in self._twins

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor's values; None for one whose values are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if type(tensor) is _T and not tensor.is_meta else None
        twin: torch.Tensor | None = self._twins.get(tensor)
        if twin is None or twin.untyped_storage()._cdata in self._unknown:
            return None
        return twin

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        """Note that unknown values were written into these tensors' storages."""
        for tensor in tensors:
            twin = self._known(tensor)
            if twin is not None:
                self._unknown.add(twin.untyped_storage()._cdata)
                self._twins[twin] = twin  # so that no other storage gets its address

    def _note(self, result: Any, twin: Any) -> None:
        results, twins = tree_leaves(result), tree_leaves(twin)
        if len(results) != len(twins):
            return
        for fake, real in zip(results, twins, strict=True):
            are_tensors = isinstance(fake, FakeTensor) and isinstance(real, _T)
            if are_tensors and any(isinstance(size, torch.SymInt) for size in fake.shape):
                continue
            if are_tensors and tuple(fake.shape) == tuple(real.shape) and fake.dtype == real.dtype:
                self._twins[fake] = real

    def _twin(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The function's result for known values; None if some are unknown."""
        leaves = tree_leaves((args, kwargs))
        name = getattr(func, "__name__", "")
        if any(isinstance(leaf, py_sym_types) for leaf in leaves) or any(d in name for d in _DRAWS):
            return None
        if func in _FACTORIES and func is not torch.tensor and _is_large(func, args):
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes(), refused_collectives():
            try:
                own_args, own_kwargs = tree_map(self._real, (args, kwargs))
                found = func(*own_args, **own_kwargs)
            except Exception:  # whatever fails for unknown values
                return None
        sizes = [leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, _T)]
        return None if any(size > self.most_elements for size in sizes) else (found,)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, _T):
            return value
        known = self._known(value)
        if known is not None:
            return known
        return torch.empty((), dtype=value.dtype).expand(tuple(value.shape))

    def _selects(self, tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        return tensor.shape == mask.shape and self._known(mask) is not None

    def _placed(self, func: Any, args: Any) -> Any:
        """Arguments with indices in place of masks and scalars of known values."""
        if func not in (_T.__getitem__, _T.__setitem__):
            return args
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        places = [self._places(part) for part in index]
        if all(place is None for place in places):
            return args
        pairs = zip(index, places, strict=True)
        placed = [each for part, place in pairs for each in ((part,) if place is None else place)]
        return (args[0], tuple(placed), *args[2:])

    def _places(self, part: Any) -> tuple[torch.Tensor | int, ...] | None:
        """The indices of a mask of known values, or a known scalar; None for any other argument."""
        if not isinstance(part, FakeTensor):
            return None
        is_mask = part.dtype is torch.bool and part.ndim > 0
        is_number = part.dtype is torch.int64 and part.ndim == 0
        twin = self._known(part) if is_mask or is_number else None
        if twin is None:
            return None
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return twin.nonzero(as_tuple=True) if is_mask else (int(twin),)


class BatchValues(ConstantValues):
    """Function mode that computes beside the fake tensors what follows from an example batch.

    It answers nothing: these values are for probes of modules, which may check what they are given.

    Args:
        example: values of the batch's columns.
    """

    most_elements = 2**26

    def __init__(self, example: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._example = example

    def begin(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Record the fake tensors of a batch that a call begins with."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            own = {name: value.clone() for name, value in self._example.items()}
        for name in batch.keys() & own.keys():
            self._note(batch[name], own[name])

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values that a tensor has for the example batch, where it follows from that alone."""
        return self._known(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, for known values too."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _T)]
        known = all(self._known(tensor) is not None for tensor in tensors)
        follows = (known and bool(tensors)) or func in _FACTORIES or func in _LIKE
        twin = self._twin(func, args, kwargs) if follows else None
        if twin is None and _writes(func, kwargs):
            self._forget(tensors if isinstance(func, torch._ops.OpOverload) else tensors[:1])
        result = func(*args, **kwargs)
        if twin is not None:
            self._note(result, twin[0])
        return result


def _is_large(func: Any, args: Any) -> bool:
    size = 1
    for leaf in tree_leaves(args):
        size *= max(leaf, 1) if isinstance(leaf, int) else 1
    return size > _MOST_ELEMENTS and func is not torch.arange and func is not torch.linspace


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a function may write into its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return (
        in_place
        or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
        or func is _T.__setitem__
        or bool(kwargs.get("inplace"))
        or kwargs.get("out") is not None
        or isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    )
