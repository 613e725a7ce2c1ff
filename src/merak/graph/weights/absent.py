"""Absent tensors: parameters that this rank does not have, and what is computed of them alone.

torch lets `here.add_(on_meta)` pass and changes nothing, so that a script which averages a teacher
or sums norms between steps would train something else without a word. An absent tensor has the
shape, type and name of a parameter of another rank. Operators on absent tensors alone give absent
ones, since the rank that has them computes the same part by part; what mixes them with tensors that
are here, or asks for their numbers, is refused with the line of the user's script.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from merak.core.errors import TrainingError
from merak.core.source_lines import is_called_by_merak, is_library, script_line, with_text
from merak.graph.ir.operators import draws

INSTEAD = (
    "merak.gathered_parameters(model, names) on all ranks has whole parameters to read or to write,"
    " trainer.gather_state_dict() gives rank 0 all weights, and max_grad_norm clips by the norm of "
    "all gradients, which the logs have"
)
"""The way to what needs whole parameters or all gradients."""

OF_OTHER_STAGE = "a parameter of another pipeline stage"
OF_REPLICAS = "a parameter of which each replica has shards of its own (zero=3)"

_TENSOR: Any = torch.Tensor
_readers = ["this script"]
_CLIPS = ("clip_grad_norm_", "_clip_grads_with_norm_", "clip_grads_with_norm_")
"""Functions of torch that need the gradients of all parameters."""
_NAMESPACES = ("aten", "prims")


class AbsentTensor(torch.Tensor):
    """A parameter that this rank does not have, or a value that is computed of such ones alone.

    Shape, type and all else that needs no numbers can be read; its device is meta.

    Attributes:
        source: the parameter, as sentences name it.
        line: where it was computed; empty for the parameter itself and views of it.
        num_elements: of the whole, where the shape is a shard's; else None.
        has_gradients: whether parameters have gradients now, on this rank as on that which has it.
    """

    source: str
    line: str
    num_elements: int | None = None
    has_gradients: Callable[[], bool] = staticmethod(lambda: False)

    @staticmethod
    def __new__(cls, data: torch.Tensor, source: str, line: str = "") -> AbsentTensor:
        """Make one of the shape and type of `data`; torch makes tensors in `__new__`."""
        with no_dispatch():
            made: AbsentTensor = torch.Tensor._make_subclass(cls, data.detach())
        made.source, made.line = source, line
        return made

    @property
    def is_nowhere(self) -> bool:
        """Whether it is a parameter, or a view of one, that no rank has whole: nobody writes it."""
        return not self.line and self.source.endswith(OF_REPLICAS)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        absent = next(tensor for tensor in leaves if isinstance(tensor, AbsentTensor))
        if func.__name__.startswith("_foreach_") and _num_places(args, kwargs) > 1:
            return _one_by_one(func, args, kwargs)
        _check(func, args, kwargs, absent)
        if func is torch.ops.aten._to_copy.default:
            kwargs = {**kwargs, "device": None}
        try:
            with no_dispatch():
                made = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error).lower() and "data-dependent" not in str(error):
                raise
            raise _refusal("reads", absent) from error
        line = "" if func.is_view else absent.line or script_line()

        def absent_too(value: torch.Tensor) -> torch.Tensor:
            if isinstance(value, AbsentTensor) or not value.is_meta:
                return value
            new = AbsentTensor(value, absent.source, line)
            new.num_elements = absent.num_elements if value.shape == absent.shape else None
            return new

        return tree_map_only(torch.Tensor, absent_too, made)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True; for `nn.init` False, which leaves draws out on meta tensors without a word."""
        return sys._getframe(1).f_code.co_filename != nn.init.__file__

    def numel(self) -> int:
        """The number of elements of the whole."""
        return math.prod(self.shape) if self.num_elements is None else self.num_elements

    nelement = numel

    @property
    def data(self) -> torch.Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, AbsentTensor) or self.is_nowhere:
            raise _refusal("writes into", self)
        _TENSOR.data.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, which is on the rank that has the parameter.

        Raises:
            TrainingError: a norm of all gradients is computed of those that are here.
        """
        if is_clipping(sys._getframe(1)):
            raise _refusal("reads the gradient of", self)
        found: torch.Tensor | None = _TENSOR.grad.__get__(self)
        caller = sys._getframe(1)
        is_missing = (
            found is None and self.requires_grad and not is_library(caller.f_code.co_filename)
        )
        if not is_missing or is_called_by_merak(caller, __file__):
            return found
        if self.is_nowhere:
            raise missing_gradient(self.source)
        if self.has_gradients():
            with no_dispatch():
                found = AbsentTensor(self.detach(), f"a gradient: {self.source}")
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and not isinstance(value, AbsentTensor):
            raise _refusal("writes into the gradient of", self)
        _TENSOR.grad.__set__(self, value)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to give numbers.

        Raises:
            TrainingError: always.
        """
        raise _refusal("reads", self)

    __array__ = tolist = __dlpack__ = numpy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("saves", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        if id(self) not in memo:
            with no_dispatch():
                made = AbsentTensor(self.detach().clone(), self.source, self.line)
            made.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                made._is_param = True
            memo[id(self)] = made
        found: AbsentTensor = memo[id(self)]
        return found

    def __format__(self, spec: str) -> str:
        return format(self.item() if spec else repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        of = f"value computed at {self.line} of {self.source}" if self.line else self.source
        return f"<{of}, size={tuple(self.shape)}, dtype={self.dtype}>"


@contextmanager
def read_by(who: str) -> Iterator[None]:
    """Context in which sentences name what reads an absent tensor.

    Args:
        who: such as "a callback".
    """
    _readers.append(who)
    try:
        yield
    finally:
        _readers.pop()


def swap(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Swap a parameter's value and type in place, for code that holds it in lists of its own.

    Args:
        old: whose memory goes to `new`.
        new: whose value it gets.

    Returns:
        Whether it could be; not where something in C++ refers to one of them.
    """
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError:
        return False
    return True


def _check(func: Any, args: Any, kwargs: Any, absent: AbsentTensor) -> None:
    """Refuse an operator that another rank does not run in this one's place.

    Raises:
        TrainingError: with the line of the script.
    """
    returned = func._schema.returns
    if func.namespace not in _NAMESPACES or any("Tensor" not in str(r.type) for r in returned):
        raise _refusal("reads", absent)
    if draws(func):
        raise _refusal("draws random numbers for", absent)
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for argument, value in _bound(func, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        (written if is_written else read).extend(tensors)
    if any(isinstance(tensor, AbsentTensor) and tensor.is_nowhere for tensor in written):
        raise _refusal("writes into", absent)
    if any(_is_foreign(tensor) for tensor in read):
        raise _refusal("writes into" if _absent_in(written) else "reads", absent)
    if any(not isinstance(tensor, AbsentTensor) for tensor in written):
        raise _refusal("reads", absent)


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operator's schema with their values."""
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have numbers of this rank's parameters: no single number, no index.

    One on the meta device may have been drawn there (`torch.randn(p.shape, device=p.device)`), and
    the rank that has the parameter would draw other numbers than one process does.
    """
    is_plain = not isinstance(tensor, AbsentTensor)
    return is_plain and tensor.dim() > 0 and tensor.dtype.is_floating_point


def _absent_in(tensors: Sequence[torch.Tensor]) -> bool:
    return any(isinstance(tensor, AbsentTensor) for tensor in tensors)


def _num_places(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """The length of an operator's longest list."""
    values = (*args, *kwargs.values())
    return max((len(a) for a in values if isinstance(a, (list, tuple))), default=0)


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator over lists of tensors for each of their places."""
    count = _num_places(args, kwargs)

    def at(place: int, value: Any) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == count
        return [value[place]] if is_list else value

    made: dict[int, Any] = {}
    operands = (*args, *kwargs.values())
    here = [not any(_absent_in(tree_leaves(at(i, a))) for a in operands) for i in range(count)]
    for i in sorted(range(count), key=here.__getitem__):  # refusals come before any write
        named = {k: at(i, v) for k, v in kwargs.items()}
        made[i] = func(*(at(i, a) for a in args), **named)
    return None if made[0] is None else [value for i in range(count) for value in made[i]]


def is_clipping(frame: FrameType) -> bool:
    """Whether code that reads a gradient is one of torch's functions that clip by a norm.

    Args:
        frame: of the code.
    """
    callers = (frame, frame.f_back)  # perhaps a comprehension's
    return any(found is not None and found.f_code.co_name in _CLIPS for found in callers)


def refusal(verb: str, value: str, source: str, line: str = "") -> TrainingError:
    """The error of a script's operator on a value that this rank has not, or not as a whole.

    Args:
        verb: what the script does.
        value: what it does it with, as a noun.
        source: the parameter that it is computed of, as a clause.
        line: where it was computed, if no line of the script runs now.
    """
    line = script_line() or line
    where = f", at {with_text(line)}" if line else ""
    return TrainingError(
        f"{_readers[-1]} {verb} {value}{where}: {source}; to average a teacher, use "
        f"merak.TeacherAverage or merak.average_teacher, in any layout; or: {INSTEAD}."
    )


def missing_gradient(source: str) -> TrainingError:
    """The error of a script that reads the gradient of what the optimizer does not step itself.

    Args:
        source: the parameter, as a clause.
    """
    return refusal(
        "reads the gradient of",
        "a parameter that the optimizer does not step itself",
        f"{source}; an update by hand takes the gradients of engine.optimizer_params.named, this "
        "rank's tensors, and calls engine.optimizer_params.sync_model_params() then",
    )


def _refusal(verb: str, absent: AbsentTensor) -> TrainingError:
    """The error of an operator on a value that this rank does not have."""
    source = f"{absent.source}; leave out parameters that are on the meta device here (p.is_meta)"
    return refusal(verb, "a value that this rank does not have", source, absent.line)
