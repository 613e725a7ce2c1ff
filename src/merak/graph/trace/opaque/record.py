"""What a trace puts in the place of the calls of modules that it keeps whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.opaque.dry_run import dry_run
from merak.graph.trace.opaque.functions import FunctionModule, replaced_functions
from merak.graph.trace.opaque.operator import ModuleRef, OpaqueCall, record_call
from merak.graph.trace.opaque.probe import CannotBeOpaque, Found, probe
from merak.graph.trace.opaque.pytree import PLAIN, NotPlain, fill, flatten
from merak.graph.trace.opaque.run import attributes
from merak.graph.trace.opaque.selection import OpaqueSelection

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Numbers(TorchFunctionMode):
    """Remembers from which tensors a model's code has taken numbers that are not known yet."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[str, torch.Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the tensor of a number; anything else goes its way."""
        if func is torch.Tensor.tolist and _is_row(args[0]):
            return [self._note(one.item(), one) for one in args[0].unbind()]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.item and isinstance(result, _SYMBOLS):
            return self._note(result, args[0])
        return result

    def _note(self, number: Any, tensor: torch.Tensor) -> Any:
        if isinstance(number, _SYMBOLS):
            self._sources[str(number.node.expr)] = tensor.detach().reshape(())
        return number

    def source(self, number: Any) -> torch.Tensor | None:
        """The tensor that holds a number."""
        return self._sources.get(str(number.node.expr))


def _is_row(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.ndim == 1


@dataclass(frozen=True, slots=True)
class RealTensors:
    """A model's parameters and buffers before a trace puts fake ones in their place.

    Args:
        tensors: by path of their module and name.
        modes: function modes that the model would be called in, such as a default device; those
            that record a trace come after them.
    """

    tensors: Mapping[tuple[int, str], torch.Tensor]
    modes: Sequence[TorchFunctionMode]

    @staticmethod
    def of(model: nn.Module) -> RealTensors:
        """Those that the model has now, before its trace begins."""
        return RealTensors(
            {
                (id(module), name): tensor
                for module in model.modules()
                for slots in (module._parameters, module._buffers)
                for name, tensor in slots.items()
                if tensor is not None
            },
            _get_current_function_mode_stack(),
        )

    def under(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Those of one module, by their names in it."""
        return {
            f"{path}.{name}".removeprefix("."): self.tensors[id(part), name]
            for path, part in module.named_modules(remove_duplicate=False)
            for name in (*part._parameters, *part._buffers)
            if (id(part), name) in self.tensors
        }


@contextmanager
def record_opaque_modules(
    model: nn.Module,
    opaque: OpaqueSelection,
    real: RealTensors,
    device: torch.device,
    calls: list[OpaqueCall],
) -> Iterator[None]:
    """Let a trace record calls of some modules as one operator each.

    Args:
        model: the model that is traced.
        opaque: which of its modules.
        real: its parameters and buffers themselves.
        device: where it is to run.
        calls: gains the calls as they are recorded.
    """
    if not opaque.whole and not opaque.functions:
        yield
        return
    numbers = Numbers()
    functions = {name: FunctionModule(name) for name in opaque.functions}
    refs = {path: model.get_submodule(path) for path in opaque.whole} | functions
    given = {path: attributes(module) for path, module in refs.items()}
    looped = frozenset((*opaque.looped, *functions))
    recorder = _Recorder(calls, real, device, numbers, given, looped)
    stand_ins = {
        name: recorder.forward(ModuleRef(name, functions[name]), why)
        for name, why in opaque.functions.items()
    }
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, why in opaque.whole.items():
            module = model.get_submodule(path)
            before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = recorder.forward(ModuleRef(path, module), why)
        with (
            numbers,
            _without_cache(model) if opaque.without_cache else nullcontext(),
            replaced_functions(stand_ins),
        ):
            yield
    finally:
        for module, forward in before:
            del vars(module)["forward"]
            if forward is not None:
                vars(module)["forward"] = forward


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Let a model of transformers make no cache, which only the generation of text reads."""
    configs = {id(c): c for c in (vars(module).get("config") for module in model.modules())}
    found: dict[int, Any] = {i: c for i, c in configs.items() if getattr(c, "use_cache", False)}
    try:
        for config in found.values():
            config.use_cache = False
        yield
    finally:
        for config in found.values():
            config.use_cache = True


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Records calls of modules that are kept whole.

    Args:
        calls: those that were recorded.
        real: the model's parameters and buffers themselves.
        device: where it is to run.
        numbers: those that the model's code has taken from tensors.
        given: attributes of every module that is kept, by its path, as the trace began.
        looped: paths of the modules and functions that are opaque for a loop.
        known: what modules do with tensors of some shapes.
    """

    calls: list[OpaqueCall]
    real: RealTensors
    device: torch.device
    numbers: Numbers
    given: Mapping[str, Mapping[tuple[int, str], Any]]
    looped: frozenset[str]
    known: dict[Any, Found] = field(default_factory=dict)

    def forward(self, ref: ModuleRef, why: str) -> Callable[..., Any]:
        """What is in the place of a module's forward."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._refuse_set(ref)
            try:
                inputs, template = flatten((args, kwargs))
            except NotPlain as error:
                what = f"it is called with a {error}"
                raise CannotBeOpaque(ref.path, what, is_object=True) from error
            values, numbers = self._known_numbers(ref, inputs)
            return self._record(self._call(ref, why, template, numbers), values)

        return forward

    def _refuse_set(self, ref: ModuleRef) -> None:
        """Code around the module that sets its attributes does not run where the module does."""
        assert ref.module is not None
        before = self.given[ref.path]
        for (i, name), value in attributes(ref.module).items():
            if name == "forward" or _is_same(value, before.get((i, name), self)):
                continue
            part = list(ref.module.modules())[i]
            raise CannotBeOpaque(
                ref.path,
                f"the attribute {name} of a {type(part).__name__} in it is set by code around it "
                "while the model runs",
            )

    def _known_numbers(
        self, ref: ModuleRef, inputs: list[Any]
    ) -> tuple[list[torch.Tensor], frozenset[int]]:
        """The inputs with tensors in the place of numbers, and which these are."""
        values, numbers = [], set()
        for i, value in enumerate(inputs):
            if isinstance(value, _SYMBOLS):
                source = self.numbers.source(value)
                if source is None:
                    raise CannotBeOpaque(
                        ref.path, "it is called with a number that depends on values"
                    )
                value = source
                numbers.add(i)
            values.append(value)
        return values, frozenset(numbers)

    def _call(
        self, ref: ModuleRef, why: str, arguments: Any, numbers: frozenset[int]
    ) -> OpaqueCall:
        """What is known of the call before anything has been tried."""
        module = ref.module
        assert module is not None
        parameters = _by_tensor(module.named_parameters(remove_duplicate=False))
        buffers = _by_tensor(module.named_buffers(remove_duplicate=False))
        return OpaqueCall(
            ref=ref,
            class_name=type(module).__name__,
            why=why,
            states=(*parameters.values(), *buffers.values()),
            parameters=len(parameters),
            arguments=arguments,
            numbers=numbers,
            written=(),
            outputs=(),
            shared=frozenset(),
            modes=tuple(part.training for part in module.modules()),
            autocast=_active_autocast(self.device),
            grad=torch.is_grad_enabled(),
            saved_bytes=0,
            flops=0,
        )

    def _record(self, call: OpaqueCall, inputs: list[torch.Tensor]) -> Any:
        module = call.ref.module
        assert module is not None
        states: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        states |= dict(module.named_buffers(remove_duplicate=False))
        tensors = [*(states[names[0]] for names in call.states), *inputs]
        found = self._found(call, tensors)
        call = replace(
            call,
            outputs=found.outputs,
            written=found.written,
            shared=found.shared,
            saved_bytes=found.saved_bytes,
            flops=found.flops,
            always=found.always,
            loop=found.loop,
        )
        self.calls.append(call)
        results = record_call(call, len(self.calls) - 1, tensors)
        return fill(found.result, results)

    def _found(self, call: OpaqueCall, tensors: list[torch.Tensor]) -> Found:
        metas = []
        for tensor in tensors:
            if any(isinstance(size, torch.SymInt) for size in tensor.shape):
                raise CannotBeOpaque(call.ref.path, "it is called with sizes that are not known")
            metas.append(TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        is_loop = call.ref.path in self.looped  # which depends on no value, nor on a buffer's
        real = {} if is_loop else self.real.under(_module(call))
        likeness = _likeness(_module(call), real)
        how = (repr(call.arguments), call.numbers, call.grad, call.autocast)
        key = (likeness, call.states, tuple(metas), how, is_loop)
        if key not in self.known and is_loop:
            self.known[key] = dry_run(call, metas, self.device)
        elif key not in self.known:
            modes = self.real.modes
            self.known[key] = probe(call, metas, real, _usable(self.device), modes)
        return self.known[key]


def _is_same(value: Any, before: Any) -> bool:
    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(value)):
        return False
    return value is before or (isinstance(value, PLAIN) and value == before)


def _likeness(module: nn.Module, real: Mapping[str, torch.Tensor]) -> Any:
    """The same for modules that do the same, as layers of a model do: one is tried for all.

    What a module is found to do is looked at again when it runs.
    """
    if any(not tensor.is_meta for tensor in real.values() if not isinstance(tensor, nn.Parameter)):
        return id(module)  # what a buffer holds may decide
    held = frozenset(
        (i, name, repr(value) if isinstance(value, PLAIN) else id(value))
        for (i, name), value in attributes(module).items()
        if name != "forward"
    )
    return tuple((type(part), part.training) for part in module.modules()), held


def _module(call: OpaqueCall) -> nn.Module:
    assert call.ref.module is not None
    return call.ref.module


def _usable(device: torch.device) -> torch.device:
    is_there = device.type == "cpu" or torch.get_device_module(device).is_available()
    return device if is_there else torch.device("cpu")


def _by_tensor(named: Iterator[tuple[str, torch.Tensor]]) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in named:
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def _active_autocast(device: torch.device) -> tuple[str, torch.dtype] | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return device.type, torch.get_autocast_dtype(device.type)
