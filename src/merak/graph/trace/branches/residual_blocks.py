"""Residual blocks that are dropped by chance, of models that do not drop any themselves.

While a model is traced, the forward of such a block first compares a random number with a buffer of
the block, its probability of being kept: below it the block runs, and what it adds to the residual
stream is divided by that probability; else its output is its input. `branches` traces both.

Source: arXiv 2010.13369 (progressive layer dropping), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from merak.core.errors import TraceError

KEEP = "merak_keep"
"""Buffer of a block: the probability of being kept."""

OWN_NUMBER = "layerdrop"
"""Attribute of models that drop layers themselves: the probability of being dropped."""

_ADD = frozenset(("add", "__add__", "__radd__", "add_", "__iadd__"))
_SAME = frozenset(
    ("to", "contiguous", "clone", "float", "bfloat16", "half", "type_as", "view", "reshape")
)
"""Functions whose result is the residual stream where their first operand is."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacks of residual blocks that layer dropping skips, or what the model skips itself.

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
    """Context in which the blocks of a model are dropped by chance.

    Args:
        model: in training.
        stacks: of the model.
    """
    blocks = [model.get_submodule(name) for stack in stacks.blocks for name in stack]
    before = [vars(block).get("forward") for block in blocks]
    for name, block in zip((n for stack in stacks.blocks for n in stack), blocks, strict=True):
        vars(block)["forward"] = _dropping(name, block, block.forward)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            del vars(block)["forward"]
            if own is not None:
                vars(block)["forward"] = own


def _dropping(name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block that may be dropped."""
    is_tuple: list[int] = []

    def dropping(*args: Any, **kwargs: Any) -> Any:
        stream = _residual_input(name, args, kwargs)
        keep: Any = getattr(block, KEEP)
        if torch.rand(()) >= keep:
            return (stream, *(None,) * (is_tuple[0] - 1)) if is_tuple and is_tuple[0] else stream
        with _ResidualStream(stream, keep) as mode:
            result = forward(*args, **kwargs)
        output = result[0] if isinstance(result, tuple) else result
        is_tuple[:] = [len(result) if isinstance(result, tuple) else 0]
        _check_residual(name, mode.holds(output), result)
        return result

    return dropping


def _residual_input(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    stream = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(stream, torch.Tensor):
        raise TraceError(
            f"layer_keep passes a dropped block's first argument on, but {name} is called without "
            "a tensor there; call the block with its hidden states first, or use layer_keep=1."
        )
    return stream


def _check_residual(name: str, is_residual: bool, result: Any) -> None:
    if not is_residual:
        raise TraceError(
            f"layer_keep drops residual blocks, but the output of {name} is not its input plus "
            "what it computes (a norm after the sum, for example); use a model that normalises "
            "before its sublayers, or layer_keep=1."
        )
    others = result[1:] if isinstance(result, tuple) else ()
    if any(other is not None for other in others):
        raise TraceError(
            f"layer_keep cannot drop {name}, which returns further values beside its hidden states;"
            " return these alone (use_cache=False, output_attentions=False), or use layer_keep=1."
        )


class _ResidualStream(TorchFunctionMode):
    """Function mode that follows the residual stream of a block, and scales what is added to it.

    Args:
        stream: the input.
        keep: what is added is divided by it.
    """

    def __init__(self, stream: torch.Tensor, keep: torch.Tensor) -> None:
        super().__init__()
        self._held = [stream]
        self._keep = keep

    def holds(self, value: object) -> bool:
        """Whether a value is the stream after something was added to it."""
        return any(own is value for own in self._held[1:])

    def _is_stream(self, value: object) -> bool:
        return any(own is value for own in self._held)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Scale the other operand of a sum with the stream."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _ADD and len(args) == 2 and not kwargs:
            streams = [self._is_stream(own) for own in args]
            if streams.count(True) == 1 and isinstance(args[streams.index(False)], torch.Tensor):
                own = [a if is_own else a / self._keep for a, is_own in zip(args, streams)]
                result = func(*own)
                self._held.append(result)
                return result
        result = func(*args, **kwargs)
        if name in _SAME and args and self._is_stream(args[0]) and len(self._held) > 1:
            self._held.append(result)
        return result
