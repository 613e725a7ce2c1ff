"""Recording of opaque calls: replacements of the forwards of opaque modules during a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.types import py_sym_types

from merak.core.storages import is_dense
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.opaque.dry_run import dry_run
from merak.graph.trace.opaque.experts.loop import expert_loop_of
from merak.graph.trace.opaque.experts.rows import ExpertLoop, ends_of_rows, grouped_experts
from merak.graph.trace.opaque.functions import FunctionModule, replaced_functions
from merak.graph.trace.opaque.operator import (
    LOSSES,
    CallCost,
    ModuleRef,
    OpaqueCall,
    record_call,
)
from merak.graph.trace.opaque.probe import CannotBeOpaque, ProbeResult, probe
from merak.graph.trace.opaque.pytree import PLAIN, NotPlain, fill, flatten
from merak.graph.trace.opaque.selection import OpaqueSelection
from merak.graph.trace.state.slots import MISSING
from merak.graph.trace.state.snapshot import Snapshot


class ScalarSources(TorchFunctionMode):
    """Function mode that remembers the source tensors of unknown scalars."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[str, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the source tensor of a scalar; pass the call on."""
        if func is torch.Tensor.tolist and _is_row(args[0]):
            return [self._note(one.item(), one) for one in args[0].unbind()]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.item and isinstance(result, py_sym_types):
            return self._note(result, args[0])
        return result

    def _note(self, number: Any, tensor: torch.Tensor) -> Any:
        if isinstance(number, py_sym_types):
            self._sources[str(number.node.expr)] = tensor.detach().reshape(())
        return number

    def source(self, number: Any) -> torch.Tensor | None:
        """The tensor that holds a scalar."""
        return self._sources.get(str(number.node.expr))


def _is_row(tensor: Any) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.ndim == 1


_SAME_ROWS = frozenset((
    torch.reshape, torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.contiguous,
    torch.Tensor.clone, torch.Tensor.to, torch.Tensor.int, torch.Tensor.long,
))  # fmt: skip
_PRODUCTS = frozenset((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__))


class OneHotMasks(TorchFunctionMode):
    """Function mode that remembers results of `one_hot`, and what is made of them row by row."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, torch.Tensor] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a mask; pass the call on."""
        result = func(*args, **(kwargs or {}))
        if self._is_mask(func, args, result):
            self._known[id(result)] = result
        return result

    def _is_mask(self, func: Any, args: Any, result: Any) -> bool:
        if func is functional.one_hot:
            return True
        tensors = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        if func in _SAME_ROWS and tensors:
            return id(args[0]) in self._known and result.shape[-1:] == args[0].shape[-1:]
        if func not in _PRODUCTS or len(tensors) < 2:
            return False
        for mask, factor in (tensors, tensors[::-1]):
            is_factor = factor.dtype is torch.bool or id(factor) in self._known
            if id(mask) in self._known and is_factor and result.shape == mask.shape:
                return True
        return False


@dataclass(frozen=True, slots=True)
class RealTensors:
    """A model's own parameters and buffers, before a trace replaces them by fake tensors.

    Args:
        tensors: by path of their module and name.
        modes: function modes that the model would be called in, such as a default device; those
            that record a trace come after them.
    """

    tensors: Mapping[tuple[int, str], torch.Tensor]
    modes: Sequence[TorchFunctionMode]

    @staticmethod
    def of(model: nn.Module) -> RealTensors:
        """The tensors that a model has before its trace begins."""
        return RealTensors(
            {
                (id(module), name): tensor
                for module in model.modules()
                for slots in (module._parameters, module._buffers)
                for name, tensor in slots.items()
                if tensor is not None and is_dense(tensor)
            },
            _get_current_function_mode_stack(),
        )

    def under(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of one module, by their names in it."""
        return {
            f"{path}.{name}".removeprefix("."): self.tensors[id(part), name]
            for path, part in module.named_modules(remove_duplicate=False)
            for name in (*part._parameters, *part._buffers)
            if (id(part), name) in self.tensors
        }


ExampleValues = Callable[[torch.Tensor], torch.Tensor | None]


@contextmanager
def record_opaque_modules(
    model: nn.Module,
    opaque: OpaqueSelection,
    real: RealTensors,
    device: torch.device,
    calls: list[OpaqueCall],
    example: ExampleValues,
    losses: Mapping[str, nn.Module],
) -> Iterator[None]:
    """Record calls of opaque modules and functions of a trace as one operator each.

    Args:
        model: the model that is traced.
        opaque: its opaque modules and functions.
        real: its own parameters and buffers.
        device: device that it will run on.
        calls: gains the calls as they are recorded.
        example: gives the values of a tensor that follows from an example batch, for probes.
        losses: opaque modules beside the model, by their path.
    """
    if not opaque.modules and not opaque.functions and not losses:
        yield
        return
    numbers, masks = ScalarSources(), OneHotMasks()
    functions = {name: FunctionModule(name) for name in opaque.functions}
    modules = {path: model.get_submodule(path) for path in opaque.modules}
    modules |= losses
    refs = {**modules, **functions}
    given = {p: Snapshot.take(m, attributes_only=True) for p, m in refs.items()}
    looped = frozenset((*opaque.looped, *functions))
    recorder = _Recorder(calls, real, device, numbers, masks, given, looped, example)
    stand_ins = {
        name: recorder.forward(ModuleRef(name, functions[name]), why)
        for name, why in opaque.functions.items()
    }
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, module in modules.items():
            why = LOSSES.get(path) or opaque.modules[path]
            before.append((module, vars(module).get("forward")))
            vars(module)["forward"] = recorder.forward(ModuleRef(path, module), why)
        with (
            numbers,
            masks,
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
    """Let a model of transformers make no key-value cache, which only text generation reads."""
    configs = {id(c): c for c in (vars(module).get("config") for module in model.modules())}
    found: dict[int, Any] = {i: c for i, c in configs.items() if getattr(c, "use_cache", False)}
    with ExitStack() as stack:
        for config in found.values():
            stack.enter_context(mock.patch.object(config, "use_cache", False))
        yield


@dataclass(slots=True, eq=False)
class _Recorder:
    """Records calls of opaque modules and functions.

    Args:
        calls: recorded calls.
        real: the model's own parameters and buffers.
        device: device that it will run on.
        numbers: scalars that the model's code has taken from tensors.
        masks: tensors with at most one place in each row that is not zero.
        given: state of every opaque module, by its path, as the trace began.
        looped: paths of the modules and functions that are opaque for a loop.
        example: as of `record_opaque_modules`.
        known: results of probes, by module kind and shapes.
        ends: of experts' rows, by the identity of their numbers, which are held with them.
        loops: over experts that modules compute, by the same key as `known`.
    """

    calls: list[OpaqueCall]
    real: RealTensors
    device: torch.device
    numbers: ScalarSources
    masks: OneHotMasks
    given: Mapping[str, Snapshot]
    looped: frozenset[str]
    example: ExampleValues
    known: dict[Any, ProbeResult] = field(default_factory=dict)
    ends: dict[Any, tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    loops: dict[Any, ExpertLoop | None] = field(default_factory=dict)

    def forward(self, ref: ModuleRef, why: str) -> Callable[..., Any]:
        """The replacement of a module's forward."""

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
        """Refuse a module whose attributes are set by code around it, which runs elsewhere."""
        for left in self.given[ref.path].changes():
            if left.key != "forward" and left.new is not MISSING:
                raise CannotBeOpaque(
                    ref.path,
                    f"its attribute {left.inside} is set by code around it while the model runs",
                )

    def _known_numbers(
        self, ref: ModuleRef, inputs: list[Any]
    ) -> tuple[list[torch.Tensor], frozenset[int]]:
        """The inputs with tensors in place of unknown scalars, and the places of those."""
        values, numbers = [], set()
        for i, value in enumerate(inputs):
            if isinstance(value, py_sym_types):
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
        """The call, before anything has been probed."""
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
            scalars=numbers,
            cost=CallCost(()),
            modes=tuple(part.training for part in module.modules()),
            autocast=_active_autocast(self.device),
            grad=torch.is_grad_enabled(),
            device=self.device.type,
        )

    def _record(self, call: OpaqueCall, inputs: list[torch.Tensor]) -> Any:
        module = call.module
        states: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        states |= dict(module.named_buffers(remove_duplicate=False))
        tensors = [*(states[names[0]] for names in call.states), *inputs]
        if (loop := self._loop(call, tensors)) is not None:
            made = grouped_experts(loop, call, tensors, self._ends(loop, tensors))
            return fill(loop.program.result, made)
        found = self._found(call, tensors)
        call = replace(
            call,
            cost=found.cost,
            written=found.written,
            aliases=found.aliases,
            always_used=found.always_used,
            meets_replicas=found.meets_replicas,
        )
        self.calls.append(call)
        results = record_call(call, len(self.calls) - 1, tensors)
        return fill(found.result, results)

    def _ends(self, loop: ExpertLoop, tensors: list[torch.Tensor]) -> torch.Tensor | None:
        """Where experts' rows end, the same for all modules that are called with their numbers."""
        counts = [tensors[number] for number in loop.counts]
        key = tuple(map(id, counts))
        if counts and key not in self.ends:
            self.ends[key] = ends_of_rows(counts), counts
        return self.ends[key][0] if counts else None

    def _loop(self, call: OpaqueCall, tensors: list[torch.Tensor]) -> ExpertLoop | None:
        """The loop over experts that a module is; None for another module."""
        if call.ref.path in self.looped:
            return None
        has_mask = any(tensor in self.masks for tensor in tensors)
        key = self._key(call, _metas(call, tensors)), has_mask
        if key not in self.loops:
            self.loops[key] = expert_loop_of(call, tensors, has_mask)
        return self.loops[key]

    def _found(self, call: OpaqueCall, tensors: list[torch.Tensor]) -> ProbeResult:
        metas = _metas(call, tensors)
        key = self._key(call, metas)
        if key not in self.known and call.ref.path in self.looped:
            self.known[key] = dry_run(call, metas, self.device)
        elif key not in self.known:
            real, modes = self.real.under(call.module), self.real.modes
            example = [self.example(tensor) for tensor in tensors[len(call.states) :]]
            self.known[key] = probe(call, metas, real, self.device, modes, example)
        return self.known[key]

    def _key(self, call: OpaqueCall, metas: Sequence[TensorMeta]) -> Any:
        """A key that is equal for calls that compute the same."""
        # A loop depends on no values, not on a buffer's either.
        is_loop = call.ref.path in self.looped
        kind = likeness(call.module, {} if is_loop else self.real.under(call.module))
        how = (repr(call.arguments), call.scalars, call.grad, call.autocast)
        return kind, call.states, tuple(metas), how, is_loop


def _metas(call: OpaqueCall, tensors: Sequence[torch.Tensor]) -> list[TensorMeta]:
    for tensor in tensors:
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            raise CannotBeOpaque(call.ref.path, "it is called with sizes that are not known")
    return [TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]


def likeness(module: nn.Module, real: Mapping[str, torch.Tensor]) -> Any:
    """A key that is equal for modules that compute the same, such as layers: one is probed for all.

    A call is checked against the probe's result when it runs.
    """
    if any(not tensor.is_meta for tensor in real.values() if not isinstance(tensor, nn.Parameter)):
        return id(module)  # its control flow may depend on a buffer's values
    held = frozenset(
        (place.label, name, repr(value) if isinstance(value, PLAIN) else id(value))
        for place in Snapshot.take(module, attributes_only=True).places
        for name, value in place.items.items()
        if place.kind is object and name != "forward"
    )
    return tuple((type(part), part.training) for part in module.modules()), held


def _by_tensor(named: Iterator[tuple[str, torch.Tensor]]) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in named:
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def _active_autocast(device: torch.device) -> tuple[str, torch.dtype] | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return device.type, torch.get_autocast_dtype(device.type)
