"""Sublayers of residual blocks, dropped by chance in models that do not drop any themselves.

While a model is traced, each value that a block adds to the residual stream is a sublayer of it,
attention for example. Where it is added, a random number is compared with a buffer of the block,
its probability of keeping a sublayer: below it the value is divided by that probability and added,
else the stream stays as it is, and the sublayer is dead code. `branches` traces both.

A block that normalises its sums (BERT's) has its stream behind the norm, which always runs.

Source: arXiv 2010.13369 (progressive layer dropping), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from merak.core.errors import TraceError

KEEP = "merak_keep"
"""Buffer of a block: the probability with which each of its sublayers is kept."""

OWN_NUMBER = "layerdrop"
"""Attribute of models that drop layers themselves: the probability of being dropped."""

_ADD = frozenset(("add", "__add__", "__radd__", "add_", "__iadd__"))
_SAME = frozenset(
    ("to", "contiguous", "clone", "float", "bfloat16", "half", "type_as", "view", "reshape")
)
"""Functions whose result is the residual stream where their first operand is."""

_NORMS = frozenset(("layer_norm", "rms_norm"))
"""Functions whose result is the residual stream where their first operand is a sum."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacks of residual blocks whose sublayers are dropped, or what the model skips itself.

    Args:
        blocks: by stack, its blocks in order, by their names in the model.
        droppers: names of the modules that drop layers themselves.
    """

    blocks: tuple[tuple[str, ...], ...] = ()
    droppers: tuple[str, ...] = ()


def find_stacks(model: nn.Module) -> Stacks:
    """Find what can be dropped: modules with a `layerdrop`, else lists of blocks of one class.

    Args:
        model: the user's.

    Raises:
        TraceError: there is nothing.
    """
    named = dict(model.named_modules())
    droppers = tuple(name for name, module in named.items() if _drops(module))
    if droppers:
        return Stacks(droppers=droppers)
    stacks: list[tuple[str, ...]] = []
    for name, module in named.items():
        inside = any(name.startswith(block + ".") for stack in stacks for block in stack)
        if not inside and _is_stack(module):
            prefix = f"{name}." if name else ""
            stacks.append(tuple(prefix + key for key, _ in module.named_children()))
    if not stacks:
        raise TraceError(
            f"layer_keep drops residual blocks, but {type(model).__name__} has no nn.ModuleList of "
            "several blocks of one class; keep its blocks in one, or use layer_keep=1."
        )
    return Stacks(blocks=tuple(stacks))


def _drops(module: nn.Module) -> bool:
    number = vars(module).get(OWN_NUMBER)
    return OWN_NUMBER in module._buffers or (isinstance(number, float) and number > 0)


def _is_stack(module: nn.Module) -> bool:
    kinds = [type(child) for child in module.children()]
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(set(kinds)) != 1:
        return False
    return len(kinds) > 1 and not kinds[0].__module__.startswith("torch.")


def add_buffers(model: nn.Module, stacks: Stacks, device: torch.device) -> None:
    """Register the probabilities of dropped blocks as buffers that are not saved.

    Args:
        model: the user's; once it has them, it is left as it is.
        stacks: of the model.
        device: of the buffers.
    """
    names = [(name, KEEP) for stack in stacks.blocks for name in stack]
    for path, name in [*names, *((path, OWN_NUMBER) for path in stacks.droppers)]:
        module = model.get_submodule(path)
        if name not in module._buffers:
            vars(module).pop(name, None)
            first = torch.full((), 1.0 if name == KEEP else 0.0, device=device)
            module.register_buffer(name, first, persistent=False)


@contextmanager
def keeping_at_random(model: nn.Module, stacks: Stacks) -> Iterator[None]:
    """Context in which the sublayers of a model's blocks are dropped by chance.

    Args:
        model: in training.
        stacks: of the model.
    """
    named = {name: model.get_submodule(name) for stack in stacks.blocks for name in stack}
    before = [vars(block).get("forward") for block in named.values()]
    for name, block in named.items():
        vars(block)["forward"] = _dropping(name, block, block.forward)
    try:
        yield
    finally:
        for block, own in zip(named.values(), before, strict=True):
            del vars(block)["forward"]
            if own is not None:
                vars(block)["forward"] = own


def _dropping(name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block whose sublayers may be dropped."""

    def dropping(*args: Any, **kwargs: Any) -> Any:
        stream = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(stream, torch.Tensor):
            raise TraceError(
                f"layer_keep leaves out what {name} adds to its first argument, but it is called "
                "without a tensor there; call the block with its hidden states first, or use "
                "layer_keep=1."
            )
        with _ResidualStream(stream, getattr(block, KEEP)) as mode:
            result = forward(*args, **kwargs)
        if not mode.is_output(result[0] if isinstance(result, tuple) else result):
            raise TraceError(
                f"layer_keep drops residual blocks, but the output of {name} is not its input plus "
                "what it computes, nor the norm of that; use a model whose sublayers are added to "
                "a residual stream, or layer_keep=1."
            )
        return result

    return dropping


class _ResidualStream(TorchFunctionMode):
    """Function mode that follows a block's residual stream, and drops what is added by chance.

    Args:
        stream: the input.
        keep: the probability with which something is added; what is added is divided by it.
    """

    def __init__(self, stream: torch.Tensor, keep: torch.Tensor) -> None:
        super().__init__()
        self._held = [stream]
        self._keep = keep
        self._has_sum = False

    def is_output(self, value: object) -> bool:
        """Whether a value is the stream, to which something was added or would have been."""
        return self._has_sum and self._is_stream(value)

    def _is_stream(self, value: object) -> bool:
        return any(own is value for own in self._held)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Scale or drop the other operand of a sum with the stream."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ADD and len(args) == 2 and not kwargs:
            streams = [self._is_stream(own) for own in args]
            if streams.count(True) == 1 and isinstance(args[streams.index(False)], torch.Tensor):
                self._has_sum = True
                if torch.rand(()) >= self._keep:
                    return args[streams.index(True)]
                own = [a if is_own else a / self._keep for a, is_own in zip(args, streams)]
                result = func(*own)
                self._held.append(result)
                return result
        result = func(*args, **kwargs)
        if self._has_sum and name in _SAME | _NORMS and args and self._is_stream(args[0]):
            self._held.append(result)
        return result
