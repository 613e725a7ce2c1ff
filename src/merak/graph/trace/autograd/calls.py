"""Gradients that a model takes inside its own forward, recorded as operators of the trace.

Autograd works beneath the recording of a trace: the gradients that `torch.autograd.grad` returns
would be constants in the graph. While a model is traced, the call is therefore one operator,
`merak::autograd_grad`, which `merak.graph.trace.autograd.expand` then writes out as the operators
of the backward. So is `requires_grad_()` on a tensor that is no parameter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from merak.core.errors import TraceError
from merak.core.source_lines import is_library, is_tracing_code, model_line, with_text
from merak.graph.ir.custom_operators import Role, register, role_of
from merak.graph.trace.explain import UntraceableError

_APPLY: Any = inspect.getattr_static(_SingleLevelFunction, "apply")
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_SWITCHES = (torch.Tensor.requires_grad_, _SET_REQUIRES_GRAD)
_FLAGS = (torch.Tensor.requires_grad.__get__, torch.Tensor.is_leaf.__get__)  # type: ignore[attr-defined]


def applying(apply: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Context with another way to apply autograd functions, beneath torch's `Function.apply`.

    An alias, `cube = Cube.apply` at the top of a file, is bound to torch's method, and comes here.

    Args:
        apply: `apply(function, *args)`.
    """
    return mock.patch.object(_SingleLevelFunction, "apply", classmethod(apply))


def plain_apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Apply an autograd function as torch does beneath its `Function.apply`."""
    return _APPLY.__get__(None, function)(*args, **kwargs)


def _grad(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    given: list[bool],
    create_graph: bool,
    allow_unused: bool,
    leaves: list[bool],
) -> list[torch.Tensor]:
    found = differentiate(outputs, inputs, gradients, given, create_graph, allow_unused)
    return [gradient.view_as(gradient) for gradient in found if gradient is not None]


def _track(tensor: torch.Tensor, on: bool) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad_(on)


AUTOGRAD_GRAD = register(
    "autograd_grad(Tensor[] outputs, Tensor[] inputs, Tensor[] gradients, bool[] given, "
    "bool create_graph, bool allow_unused, bool[] leaves) -> Tensor[]",
    Role.AUTOGRAD_CALL,
    _grad,
)
TRACK_GRADIENT = register(
    "track_gradient_(Tensor(a!) tensor, bool on) -> Tensor(a!)", Role.GRADIENT_SWITCH, _track
)


def differentiate(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    given: Sequence[bool],
    create_graph: bool,
    allow_unused: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Call `torch.autograd.grad` with a recorded operator's arguments.

    Args:
        outputs: tensors to differentiate.
        inputs: tensors to differentiate with respect to.
        gradients: the gradients of those outputs that are given one.
        given: per output, whether it is given one.
        create_graph: whether the gradients can be differentiated again.
        allow_unused: whether the outputs need not depend on all inputs.

    Returns:
        The gradient of every input; None for one that the outputs do not depend on.
    """
    left = iter(gradients)
    per_output = [next(left) if is_given else None for is_given in given]
    with torch._C.DisableTorchFunction():
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            outputs,
            inputs,
            per_output,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=allow_unused,
        )
    return found


def is_autograd_call(node: fx.Node) -> bool:
    """Whether a node stands for a call of `torch.autograd.grad`."""
    return role_of(node) is Role.AUTOGRAD_CALL


def creates_graph(node: fx.Node) -> bool:
    """Whether the gradients of a recorded call of autograd can be differentiated again."""
    return bool(node.args[4])


def input_leaves(node: fx.Node) -> Sequence[bool]:
    """Per input of a recorded call of autograd, whether it was a leaf."""
    leaves: Any = node.args[6]
    return tuple(leaves)


def is_function(node: fx.Node) -> bool:
    """Whether a node applies an autograd function of the model."""
    return role_of(node) is Role.AUTOGRAD_FUNCTION


def is_gradient_switch(node: fx.Node) -> bool:
    """Whether a node stands for `requires_grad_()` on a tensor."""
    return role_of(node) is Role.GRADIENT_SWITCH


def is_recording() -> bool:
    """Whether this thread records the model's calls of autograd."""
    return any(isinstance(mode, AutogradCalls) for mode in _get_current_function_mode_stack())


class AutogradCalls(TorchFunctionMode):
    """Function mode that records the model's own calls of autograd as operators."""

    def __init__(self) -> None:
        super().__init__()
        # Gradients stay alive: the model may read them from their tensors later.
        self._gradients: list[torch.Tensor] = []
        self._retaining: dict[int, torch.Tensor] = {}
        self._retained: dict[int, torch.Tensor] = {}
        self._frozen: dict[int, nn.Parameter] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call of autograd; pass any other call on.

        Raises:
            UntraceableError: no operator can represent the call.
        """
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        if func is torch.autograd.backward:
            return self._backward(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward_of(*args, **kwargs)
        if func in _SWITCHES and isinstance(args[0], FakeTensor):
            self._switch(args[0], kwargs.get("requires_grad", args[1] if len(args) > 1 else True))
            return args[0]
        if func is torch.Tensor.retain_grad:
            self._retaining[id(args[0])] = args[0]
            return None
        if func == _GET_GRAD and id(args[0]) in self._retaining:
            return self._retained.get(id(args[0]))
        if func == _GET_GRAD and isinstance(args[0], nn.Parameter):
            _refuse_parameter_gradient()
        if self._frozen and func not in _FLAGS:
            args, kwargs = tree_map_only(nn.Parameter, self._as_it_stands, (args, kwargs))
        return func(*args, **kwargs)

    def _switch(self, tensor: torch.Tensor, on: bool) -> None:
        if not isinstance(tensor, nn.Parameter):
            TRACK_GRADIENT(tensor, bool(on))
            return
        if on and not tensor.requires_grad and id(tensor) not in self._frozen:
            refuse_call(
                "lets a frozen parameter be trained", "set requires_grad before the model is built"
            )
        with torch._C.DisableTorchFunction():
            if on:
                self._frozen.pop(id(tensor), None)
            elif tensor.requires_grad:
                self._frozen[id(tensor)] = tensor
            tensor.requires_grad_(on)

    def _as_it_stands(self, parameter: nn.Parameter) -> torch.Tensor:
        """A parameter as an operand: detached, while forward has switched its gradient off."""
        return parameter.detach() if id(parameter) in self._frozen else parameter

    def refuse_left_frozen(self) -> None:
        """Check that forward has switched on all gradients again.

        Raises:
            TraceError: a parameter is left frozen, as it would be in later steps.
        """
        if self._frozen:
            shape = tuple(next(iter(self._frozen.values())).shape)
            raise TraceError(
                f"the model sets requires_grad of a parameter of the shape {shape} to False while "
                "it runs, and leaves it so for the steps to come; freeze it before training."
            )

    def _grad(
        self,
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        outputs, inputs = _listed(outputs), _listed(inputs)
        given = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
        tensors = (*outputs, *inputs, *(g for g in given if g is not None))
        if is_grads_batched or not all(isinstance(t, torch.Tensor) for t in tensors):
            refuse_call("takes gradients in batches (is_grads_batched) or by edges of the graph")
        if len(given) != len(outputs):
            raise RuntimeError(f"got {len(outputs)} tensors and {len(given)} gradients")
        if allow_unused is None:
            allow_unused = materialize_grads
        are_given = [gradient is not None for gradient in given]
        gradients = [gradient for gradient in given if gradient is not None]
        with disable_proxy_modes_tracing():  # only to see which inputs the outputs depend on
            tried = differentiate(outputs, inputs, gradients, are_given, False, True)
        used = [gradient is not None for gradient in tried]
        options = (are_given, create_graph, allow_unused, [tensor.is_leaf for tensor in inputs])
        made = iter(AUTOGRAD_GRAD(outputs, inputs, gradients, *options))
        found = [next(made) if is_used else None for is_used in used]
        if materialize_grads:
            pairs = zip(found, inputs, strict=True)
            found = [torch.zeros_like(i) if g is None else g for g, i in pairs]
        return tuple(found)

    def _backward_of(
        self,
        tensor: torch.Tensor,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        self._backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

    def _backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        tensors = _listed(tensors)
        leaves = list(_leaves(tensors)) if inputs is None else _listed(inputs)
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            refuse_call(
                "calls backward(), which adds to the gradients of the model's own parameters",
                "take the gradient of what you need with torch.autograd.grad(loss, inputs)",
            )
        known = {id(leaf) for leaf in leaves}
        leaves += [t for key, t in self._retaining.items() if key not in known]
        given = grad_variables if grad_tensors is None else grad_tensors
        found = self._grad(tensors, leaves, given, create_graph=create_graph, allow_unused=True)
        for leaf, gradient in zip(leaves, found, strict=True):
            if gradient is None:
                continue
            is_retaining = id(leaf) in self._retaining
            before = self._retained.get(id(leaf)) if is_retaining else leaf.grad
            total = gradient if before is None else before + gradient
            self._gradients.append(total)
            if is_retaining:
                self._retained[id(leaf)] = total
            else:
                leaf.grad = total


def _listed(tensors: Any) -> list[Any]:
    if isinstance(tensors, dict):
        return list(tensors.values())
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]


def _leaves(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves that tensors depend on, each once."""
    yield from (t for t in tensors if t.requires_grad and t.is_leaf)
    todo: list[Any] = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        function = todo.pop()
        if (leaf := getattr(function, "variable", None)) is not None:
            yield leaf
        found = [parent for parent, _ in function.next_functions if parent is not None]
        todo += [parent for parent in found if parent not in seen]
        seen.update(found)


def refuse_call(what: str, instead: str = "") -> None:
    """Raise for a call of autograd that no operator can represent.

    Args:
        what: the model's action, as a verb phrase.
        instead: a fix, as an imperative.

    Raises:
        UntraceableError: always.
    """
    place = with_text(model_line())
    fix = instead or "take them one by one"
    raise UntraceableError(
        f"the model cannot be traced at {place}: it {what} while it runs; {fix}, or do it in the "
        "forward of a module of its own, which is then opaque.",
        f"{place}: it {what}",
    )


def _is_mode(code: CodeType) -> bool:
    """Whether code is Merak's, or one of the function modes that a call passes through."""
    return code.co_name == "__torch_function__" or is_tracing_code(code.co_filename)


def _refuse_parameter_gradient() -> None:
    """Refuse to read a parameter's gradient: training changes it, and a trace would freeze None."""
    frame = sys._getframe(1)
    while frame.f_back and _is_mode(frame.f_code):
        frame = frame.f_back
    if not is_library(frame.f_code.co_filename):  # torch reads all attributes to copy a tensor
        refuse_call(
            "reads the .grad of a parameter",
            "take the gradient that you need with torch.autograd.grad",
        )
