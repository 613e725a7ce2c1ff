"""Packed sequences in a trace: padded to a fixed number of rows, of which a batch uses some.

`pack_padded_sequence` returns as many rows as the sequences have elements, which depends on the
batch's values. Here packed rows and their counts by time have the sizes of a batch without any
padding; packing, recurrent layers and padding are operators on the used rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from merak.core.errors import TrainingError
from merak.graph.ir.custom_operators import Role, register
from merak.graph.trace.verify import is_fake_or_meta

_pack: Callable[..., Any] = torch._VF._pack_padded_sequence
_unpack: Callable[..., Any] = torch._VF._pad_packed_sequence
_RNNS: Mapping[str, Callable[..., Any]] = {
    kind: getattr(torch, kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
_BY_ROW = frozenset(
    "dropout embedding linear layer_norm relu tanh sigmoid gelu silu to type_as float half "
    "bfloat16 double contiguous clone detach".split()
)
"""Functions of packed rows that treat each by itself."""

_HARMLESS = frozenset("device dtype ndim requires_grad is_cuda layout".split())
"""Attributes that do not tell how many rows there are."""


def _pack_padded(
    x: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    by_time = x.transpose(0, 1) if batch_first else x
    longest, samples = by_time.shape[:2]
    rows = longest * samples
    if is_fake_or_meta(x):
        return by_time.reshape(rows, *by_time.shape[2:]).clone(), lengths.new_empty(longest)
    data, counts = _pack(x, lengths.cpu(), batch_first)
    unused = (0, 0) * (data.dim() - 1)
    return pad(data, (*unused, 0, rows - len(data))), pad(counts, (0, longest - len(counts)))


def _pad_packed(
    data: torch.Tensor,
    counts: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    length: int,
    is_longest: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    longest = counts.shape[0]
    if is_fake_or_meta(data):
        samples = data.shape[0] // longest
        shape = (samples, length) if batch_first else (length, samples)
        padded = data[:1].expand(samples * length, *data.shape[1:]).clone()
        return padded.view(*shape, *data.shape[1:]), counts.new_empty(samples)
    used = counts[counts > 0]
    if is_longest and len(used) < longest:
        raise TrainingError(
            f"pad_packed_sequence gives {len(used)} times for a batch with room for {longest}, so "
            f"that sizes behind it change; give it total_length={longest}, the length of what was "
            "packed, or cut the batch to its longest sequence."
        )
    padded, lengths = _unpack(data[: int(used.sum())], used, batch_first, padding_value, length)
    return padded, lengths


def _packed_rnn(
    kind: str,
    data: torch.Tensor,
    counts: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[torch.Tensor]:
    run = _RNNS[kind]
    given = tuple(states) if kind == "lstm" else states[0]
    how = (weights, biases, layers, dropout, train, bidirectional)
    if is_fake_or_meta(data):  # all time steps have as many rows
        by_time = data.view(counts.shape[0], -1, *data.shape[1:])
        output, *last = run(by_time, given, *how, False)
        return [output.flatten(0, 1), *last]
    used = counts[counts > 0]
    output, *last = run(data[: int(used.sum())], used, given, *how)
    return [pad(output, (0, 0, 0, len(data) - len(output))), *last]


PACK_PADDED = register(
    "pack_padded(Tensor x, Tensor lengths, bool batch_first) -> (Tensor, Tensor)",
    Role.KERNEL,
    _pack_padded,
    is_deterministic=True,
)
PAD_PACKED = register(
    "pad_packed(Tensor data, Tensor counts, bool batch_first, float padding_value, int length, "
    "bool is_longest) -> (Tensor, Tensor)",
    Role.KERNEL,
    _pad_packed,
    is_deterministic=True,
)
PACKED_RNN = register(
    "packed_rnn(str kind, Tensor data, Tensor counts, Tensor[] states, Tensor[] weights, "
    "bool biases, int layers, float dropout, bool train, bool bidirectional) -> Tensor[]",
    Role.KERNEL,
    _packed_rnn,
    is_deterministic=True,  # but for dropout between layers, see its tag
    is_seeded=True,
)


class _Longest(int):
    """The number of time steps of a packed sequence, where the model asks for it."""


class PackedSequences(TorchFunctionMode):
    """Function mode that packs fake sequences into a fixed number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = WeakIdKeyDictionary()
        self._counts = WeakIdKeyDictionary()
        self.is_used = False
        """Whether a sequence has been packed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record packing; refuse operators on packed rows that depend on how many there are."""
        kwargs = kwargs or {}
        if func == _pack and isinstance(args[0], FakeTensor):
            return self._packed(*args, **kwargs)
        if not self.is_used:
            return func(*args, **kwargs)
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, FakeTensor)]
        if not any(a in self._rows or a in self._counts for a in given):
            return func(*args, **kwargs)
        if func == _unpack:
            return self._unpacked(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if func == _RNNS.get(name):
            return self._ran(name, *args, **kwargs)
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if args and args[0] in self._counts:
            return self._of_counts(name, func, args, kwargs)
        return self._of_rows(name, func, args, kwargs)

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of a packed sequence."""
        return tensor in self._rows or tensor in self._counts

    def _packed(
        self, x: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        data, counts = PACK_PADDED(x, lengths, batch_first)
        self.is_used = True
        self._rows[data] = None
        self._counts[counts] = x.shape[0 if batch_first else 1]
        return data, counts

    def _unpacked(
        self,
        data: torch.Tensor,
        counts: torch.Tensor,
        batch_first: bool,
        padding_value: float,
        length: int,
    ) -> Any:
        is_longest = isinstance(length, _Longest)
        how = (batch_first, float(padding_value), int(length), is_longest)
        return PAD_PACKED(data, counts, *how)

    def _ran(
        self, kind: str, data: torch.Tensor, counts: torch.Tensor, states: Any, *how: Any
    ) -> Any:
        states = list(states) if isinstance(states, (tuple, list)) else [states]
        output, *last = PACKED_RNN(kind, data, counts, states, *how)
        self._rows[output] = None
        return output, *last

    def _of_counts(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a query of counts by time; the first counts all samples, since none is empty."""
        if name == "__getitem__" and args[1] == 0:
            return self._counts[args[0]]
        if name == "size" and args[1:] == (0,):
            return _Longest(func(*args, **kwargs))
        if name in _HARMLESS:
            return func(*args, **kwargs)
        raise TypeError(f"{name} of the batch_sizes of a packed sequence, which a trace has not")

    def _of_rows(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in _HARMLESS or name == "dim" or (name == "size" and args[1:] == (-1,)):
            return func(*args, **kwargs)
        if name not in _BY_ROW:
            raise TypeError(
                f"{name} of the data of a packed sequence, whose rows a trace cannot count; give "
                "it what pad_packed_sequence makes of them"
            )
        result = func(*args, **kwargs)
        self._rows[result] = None
        return result
