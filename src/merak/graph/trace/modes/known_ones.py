"""Columns that are ones everywhere, such as the attention mask of a batch without padding.

In eager code a model may ask whether a mask masks anything, and do without it: attention then has
kernels that take no mask. A trace sees no values. It answers such questions where a column is known
to be ones, and notes of which columns they are asked, so that a batch of ones is traced with that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from merak.core.tensor_meta import TensorMeta
from merak.graph.ir.custom_operators import Role, register

_T = torch.Tensor

MARK_PACKED = register(
    "mark_packed(Tensor mask, int documents) -> Tensor",
    Role.MASK_OF_DOCUMENTS,
    lambda mask, documents: mask.clone(),
    fake=lambda mask, documents: mask.clone(),
)
"""Marks a mask of causality and documents alone, until `note_packed` has noted it."""


def note_packed(graph: fx.Graph) -> None:
    """Record the number of documents in the metadata of a mask made for them.

    Args:
        graph: changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=MARK_PACKED):
        mask, documents = node.args
        mask.meta["tensor"] = replace(mask.meta["tensor"], documents=documents)
        node.replace_all_uses_with(mask)
        graph.erase_node(node)


def _named(names: str) -> frozenset[Any]:
    owners = (torch, _T)
    return frozenset(getattr(o, n) for n in names.split() for o in owners if hasattr(o, n))


_SAME = _named(
    "view reshape expand unsqueeze squeeze flatten ravel transpose permute contiguous "
    "clone detach amin amax __getitem__"
)
"""Functions that give some elements of their argument, in any shape."""
_ALL_EQUAL = _named(
    "to bool long int float half type type_as logical_not bitwise_not eq ne lt le gt ge add sub "
    "mul rsub all any __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__ "
    "__mul__ __rmul__ __invert__"
)
"""Functions whose results are equal everywhere if their arguments are, the same in any shape."""
_QUESTIONS = frozenset((_T.__bool__, _T.item))


@dataclass(frozen=True, slots=True)
class _Uniform:
    """What a tensor would be if a column were ones.

    Args:
        column: its name.
        value: of every element, a scalar.
        version: of the tensor, as long as nothing writes into it.
    """

    column: str
    value: torch.Tensor
    version: int


class KnownOnes(TorchFunctionMode):
    """Function mode that follows what would be equal everywhere if a column were ones.

    Args:
        columns: of the batch; those that are known to be ones are marked so.
    """

    def __init__(self, columns: Mapping[str, TensorMeta]) -> None:
        super().__init__()
        self._columns = {name: meta for name, meta in columns.items() if meta.may_be_ones}
        self._followed: Any = WeakIdKeyDictionary()
        self.queried: set[str] = set()
        """Columns of which the model has asked something that it would know if they were ones."""

    def begin(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Record the fake tensors of a batch that a call begins with."""
        for name in self._columns.keys() & batch.keys():
            meta = self._columns[name]
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                one = torch.ones((), dtype=meta.dtype)
            self._followed[batch[name]] = _Uniform(name, one, batch[name]._version)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known, now that the model asks for them.

        Args:
            tensor: of the model.
        """
        found = self._uniform(tensor)
        if found is None:
            return False
        self.queried.add(found.column)
        return self._columns[found.column].ones

    def documents(self, positions: torch.Tensor) -> int:
        """Room for the documents of packed rows, if positions are a column that begins anew.

        Args:
            positions: of the tokens, as of the model.
        """
        found = self._uniform(positions)
        if found is None:
            return 0
        self.queried.add(found.column)
        return self._columns[found.column].documents

    def ends(self, tensor: torch.Tensor | None) -> bool:
        """Whether a mask is known to hide only padding behind samples, which nothing reads.

        Args:
            tensor: of the model.
        """
        found = None if tensor is None else self._uniform(tensor)
        if found is None or not self._columns[found.column].ignored:
            return False
        self.queried.add(found.column)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return bool(found.value == 1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a question on what is known; follow any other call."""
        kwargs = kwargs or {}
        if func in _QUESTIONS and args[0].numel() == 1 and self.knows(args[0]):
            found = self._uniform(args[0])
            assert found is not None
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return func(found.value)
        result = func(*args, **kwargs)
        if (func in _SAME or func in _ALL_EQUAL) and isinstance(result, FakeTensor):
            self._follow(func, args, kwargs, result)
        return result

    def _uniform(self, tensor: torch.Tensor) -> _Uniform | None:
        found: _Uniform | None = self._followed.get(tensor)
        return found if found is not None and found.version == tensor._version else None

    def _follow(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _T)]
        found = [self._uniform(tensor) for tensor in given]
        known = [one for one in found if one is not None]
        if not known or len(known) < len(given) or len({one.column for one in known}) > 1:
            return
        if free_unbacked_symbols(result.shape) or 0 in result.shape:  # `all` and `any` differ
            return
        value = known[0].value
        if func in _ALL_EQUAL:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                value = func(*tree_map(self._value, args), **tree_map(self._value, kwargs))
        if isinstance(value, _T) and value.dtype == result.dtype and value.ndim == 0:
            self._followed[result] = _Uniform(known[0].column, value, result._version)

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        found = self._uniform(value) if isinstance(value, _T) else None
        return value if found is None else found.value
