"""Host reads of a loss: values that it takes out of tensors, as `.item()` does.

A loss of the script's own (`compute_loss` of a trainer) may read values and do anything with them:
append them to lists, log them. Traced, it has no values. So each tensor that it reads becomes one
more output of the graph, and the read gives a made-up number. Once a step has run, the loss runs
again on fake tensors for each microbatch (`replay`): what the model returned is fake too, of the
same shapes, and each read gives the value that the graph has computed.

That holds as long as no value that is read decides what is computed. Both runs therefore describe
how each tensor came about; what is read is found again by that description. While it is traced, the
loss runs with several made-up numbers (`loss_recorder`), and the loss must be described alike each
time; so it must be in all later runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.types import py_sym_types
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from merak.core.source_lines import model_line
from merak.data.objects import tensors_in

READ = "read: "
"""Beginning of the names of outputs that are read on the host."""

_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "item tolist numpy is_nonzero __float__ __int__ __bool__ __index__ __format__ __array__"
    ).split()
)
"""Functions that give a tensor's values to Python."""

Run = Callable[[], Any]
"""Runs the loss, and returns it or a tuple that it is the first of."""


@contextmanager
def model_calls(
    answer: Callable[[nn.Module, Run], Any], model: nn.Module | None = None
) -> Iterator[None]:
    """Context in which a loss runs whose calls of its model are answered.

    Args:
        answer: gives the result of a call of a module that has parameters, and is inside of no
            other; its second argument makes the call.
        model: the model; a module that has it inside, such as a loss, is called as it is.
    """
    original = nn.Module.__call__
    is_inside = False

    def is_around(module: nn.Module) -> bool:
        return module is not model and any(one is model for one in module.modules())

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside

        def run() -> Any:
            return original(module, *args, **kwargs)

        if is_inside or next(module.parameters(), None) is None or is_around(module):
            return run()
        is_inside = True
        try:
            return answer(module, run)
        finally:
            is_inside = False

    with (
        mock.patch.object(nn.Module, "__call__", called),
        # Which cuts a loader's last batch by state that changes; a microbatch has no padding.
        mock.patch.object(Accelerator, "gather_for_metrics", lambda self, data, *_, **__: data),
    ):
        yield


class KnownResults:
    """What functions have made of tensors: called on such as came about alike, none runs again.

    Attributes:
        results: by function and what it was given; None once a function has written into a tensor,
            behind which each runs.
    """

    def __init__(self) -> None:
        self.results: dict[Any, Any] | None = {}

    def result(self, func: Any, args: Any, kwargs: Any, given: str | None) -> Any:
        """What a function returns, or has returned.

        Args:
            func: the function.
            args: what it is called with.
            kwargs: what it is called with, by name.
            given: describes both; None where a description would leave something out.
        """
        if self.results is None:
            return func(*args, **kwargs)
        modes = torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))
        key = func, given, modes
        if key in self.results:
            return self.results[key]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        found = result if isinstance(result, (tuple, list)) else (result,)
        if versions != [version_of(tensor) for tensor in tensors]:
            self.results = None
        elif (
            given is not None
            and type(result) in (FakeTensor, tuple)
            and all(type(one) is FakeTensor and not _is_among(one, tensors) for one in found)
        ):
            self.results[key] = result
        return result


class HostReads(TorchFunctionMode):
    """Function mode that gives what a loss reads of tensors, and what its model returns.

    Args:
        call: gives the result of a call of a module that has parameters.
        answer: gives the values of a tensor that is read, by its description.
        is_exact: whether what is read is found again by how it came about; else by the line that
            reads it, and by how often it has.
        numbers: tensors that stand for numbers of Python, and are read as without this mode.
        model: as of `model_calls`.
        made: what functions have made; None where each runs.
    """

    def __init__(
        self,
        call: Callable[[nn.Module, Run], Any],
        answer: Callable[[torch.Tensor, str], torch.Tensor],
        is_exact: bool,
        numbers: Collection[torch.Tensor] = (),
        model: nn.Module | None = None,
        made: KnownResults | None = None,
    ) -> None:
        super().__init__()
        self._model, self._made = model, made
        self._is_plain = True  # what has been described last, of which nothing is left out
        self.lines: list[str] = []
        self.given = ""  # description of what the function that runs is given
        self._call, self._answer, self._is_exact = call, answer, is_exact
        self._is_inside = False  # a call of the model
        self._num_calls = self._num_kept = 0
        # With the tensor itself, whose identity is then no other's, and its version.
        self._keys: dict[int, tuple[torch.Tensor, str, int]] = {}
        self._of_numbers: set[int] = set()
        for tensor in numbers:
            self._note(tensor, "number")
            self._of_numbers.add(id(tensor))

    def name_columns(self, batch: Mapping[str, Any]) -> None:
        """Describe the tensors of a batch by their columns."""
        for name, value in batch.items():
            found = [value] if isinstance(value, torch.Tensor) else tensors_in(value)
            for number, tensor in enumerate(found):
                self._note(tensor, f"column {name} {number}")

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context in which the loss runs."""
        with model_calls(self._called, self._model), self:
            yield

    def _called(self, module: nn.Module, run: Run) -> Any:
        """The result of a call of the model, whose tensors are described."""
        self._is_inside = True
        try:
            made = self._call(module, run)
        finally:
            self._is_inside = False
        for number, leaf in enumerate(tree_leaves(made)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, f"output {number} of call {self._num_calls}")
        self._num_calls += 1
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a read; describe what any other function returns."""
        kwargs = kwargs or {}
        if self._is_inside:
            return func(*args, **kwargs)
        if func in _READS and self._has_no_values(args[0]):
            return self._read(func, args[0], args[1:], kwargs)
        self._is_plain = True
        before = self.given = self._described((args, kwargs))
        if self._made is None:
            result = func(*args, **kwargs)
        else:
            result = self._made.result(func, args, kwargs, before if self._is_plain else None)
        self._describe(result, func, before, (args, kwargs))
        return result

    def _has_no_values(self, tensor: Any) -> bool:
        is_fake = isinstance(tensor, FakeTensor) and tensor.constant is None
        return is_fake and id(tensor) not in self._of_numbers

    def _read(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> Any:
        line = model_line()
        key = self.key(tensor) if self._is_exact else f"{line} {self.lines.count(line)}"
        self.lines.append(line)
        values = self._answer(tensor, key)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(values, *args, **kwargs)

    def key_of_kept(self, tensor: torch.Tensor) -> str:
        """Description of a tensor that the loss leaves in Python state."""
        if self._is_exact:
            return self.key(tensor)
        self._num_kept += 1
        return f"kept {self._num_kept}"

    # ---- descriptions ----

    def is_described(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of the batch, of the model, or made of such in this mode."""
        return id(tensor) in self._keys

    def key(self, tensor: torch.Tensor) -> str:
        """Description of how a tensor came about, as it is now."""
        version = version_of(tensor)
        known = self._keys.get(id(tensor))
        if known is None:  # which no function has made: a tensor that the loss's own objects hold
            return self._note(tensor, f"tensor {tuple(tensor.shape)} {tensor.dtype}")
        if known[2] != version:  # written through another view of it
            return self._note(tensor, _hash(f"{known[1]} written {version - known[2]}"))
        return known[1]

    def _note(self, tensor: torch.Tensor, key: str) -> str:
        self._keys[id(tensor)] = tensor, key, version_of(tensor)
        return key

    def _describe(self, result: Any, func: Any, before: str, given: Any) -> None:
        found = tree_leaves(result) if isinstance(result, (tuple, list)) else (result,)
        if not any(isinstance(leaf, torch.Tensor) for leaf in found):
            return
        held = getattr(func, "__self__", None)  # of the getter of a property
        name = f"{getattr(held, '__name__', '')}.{getattr(func, '__name__', type(func).__name__)}"
        made = _hash(f"{name} {before}")
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        is_of_number = bool(tensors) and all(id(one) in self._of_numbers for one in tensors)
        for number, leaf in enumerate(found):
            if isinstance(leaf, torch.Tensor):
                known = self._keys.get(id(leaf))
                if known is None or known[2] != version_of(leaf) or not _is_among(leaf, given):
                    self._note(leaf, f"{made} {number}")
                if is_of_number:
                    self._of_numbers.add(id(leaf))

    def _described(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.key(value)
        if isinstance(value, (tuple, list)):
            return f"({', '.join(map(self._described, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self._described(v)}' for k, v in value.items())}}}"
        if isinstance(value, (*_PLAIN, *py_sym_types)):
            return str(value)
        self._is_plain = False
        return type(value).__name__


_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    slice,
    torch.layout,
)


def _is_among(tensor: torch.Tensor, given: Any) -> bool:
    return any(leaf is tensor for leaf in tree_leaves(given))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def version_of(tensor: torch.Tensor) -> int:
    """Number of writes into a tensor."""
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else int(tensor._version)


def loss_in(result: Any) -> Any:
    """The loss in what a loss function returns; None for none."""
    return result[0] if isinstance(result, tuple) else result
