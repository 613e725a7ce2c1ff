"""Fake weights and batches for a trace, and patches of functions that look at values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakIdKeyDictionary

from merak.core.errors import TraceError
from merak.core.storages import is_dense
from merak.core.tensor_meta import TensorMeta
from merak.graph.trace.modes.known_ones import MARK_PACKED, KnownOnes
from merak.graph.trace.opaque.probe import host_generators


@contextmanager
def fake_weights(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Replace parameters and buffers by fake tensors; restore the model's own afterwards.

    Parameters and buffers that the model registers while it runs are removed. Sparse buffers
    are plain attributes meanwhile.
    """
    every: list[dict[str, Any]] = [
        slots for module in model.modules() for slots in (module._parameters, module._buffers)
    ]
    own = [dict(slots) for slots in every]
    fakes: dict[int, torch.Tensor] = {}

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
                )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            fakes[id(tensor)] = fake
        return fakes[id(tensor)]

    try:
        for slots in every:
            known = {name: tensor for name, tensor in slots.items() if tensor is not None}
            slots.update({name: fake_of(t) for name, t in known.items() if is_dense(t)})
        with _sparse_constants(model):
            yield
    finally:
        for slots, known in zip(every, own, strict=True):
            slots.clear()
            slots.update(known)


@contextmanager
def _sparse_constants(model: nn.Module) -> Iterator[None]:
    """Turn sparse buffers into plain attributes, which torch.export makes constants."""
    found = [
        (module, name)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and not is_dense(tensor)
    ]
    for module, name in found:
        vars(module)[name] = module._buffers.pop(name)
    try:
        yield
    finally:
        for module, name in found:
            del vars(module)[name]


def fake_batch(
    columns: Mapping[str, TensorMeta], mode: FakeTensorMode, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """A batch of fake tensors."""
    with mode:
        return tuple(torch.empty(m.shape, dtype=m.dtype, device=device) for m in columns.values())


@contextmanager
def eager_masks(columns: Mapping[str, TensorMeta], ones: KnownOnes) -> Iterator[None]:
    """Make transformers choose attention masks in a trace as in eager code.

    While a model is exported, transformers builds every causal mask in full, which rules out the
    attention kernels that know `is_causal`. In eager it looks at the values: no padding mask and
    positions that count up by one mean no mask. Positions that the model itself has counted (one
    row, or one row expanded) always do.

    Args:
        columns: the batch's.
        ones: what is known of masks. Padding that causality hides from what is read needs none.
    """
    from transformers import masking_utils

    positions: Any = WeakIdKeyDictionary()
    find_packed = masking_utils.find_packed_sequence_indices
    is_tracing: Callable[..., bool] = vars(masking_utils)["is_tracing"]

    def is_tracing_mask(mask: torch.Tensor | None = None) -> bool:
        # Older releases of transformers ask this also where there is no mask to look at.
        return mask is not None and is_tracing(mask) and not ones.knows(mask)

    def find_packed_in_batch(position_ids: torch.Tensor) -> torch.Tensor | None:
        counted = position_ids.shape[0] == 1 or position_ids.stride(0) == 0
        if "position_ids" not in columns and counted:
            return None
        found = find_packed(position_ids)
        if found is not None:
            positions[found] = position_ids
        return found

    can_skip: Callable[..., bool] = masking_utils._ignore_causal_mask_sdpa

    def can_skip_causal(padding_mask: torch.Tensor | None, *rest: Any, **named: Any) -> bool:
        return can_skip(None if ones.ends(padding_mask) else padding_mask, *rest, **named)

    with (
        _packed_masks(ones, positions),
        mock.patch.multiple(
            masking_utils,
            _ignore_causal_mask_sdpa=can_skip_causal,
            find_packed_sequence_indices=find_packed_in_batch,
            is_torchdynamo_exporting=lambda: False,
            is_tracing=is_tracing_mask,
            # transformers counts the elements, which `KnownOnes` does not follow
            fast_all=torch.all,
            create=True,  # older releases have not all of them
        ),
    ):
        yield


@contextmanager
def _packed_masks(ones: KnownOnes, positions: Any) -> Iterator[None]:
    """Mark masks of causality and the documents of packed rows alone.

    Args:
        ones: knows for how many documents there must be room.
        positions: by the documents' numbers that transformers has counted from them.
    """
    from transformers import masking_utils

    marked: Any = WeakIdKeyDictionary()
    rooms: dict[Any, int] = {}
    documents: dict[Any, torch.Tensor] = {}
    sdpa_mask, causal = masking_utils.sdpa_mask, masking_utils.causal_mask_function
    of_documents, both = masking_utils.packed_sequence_mask_function, masking_utils.and_masks
    separate = vars(masking_utils).get("packed_sequence_compatibility_function")

    def numbered(numbers: torch.Tensor) -> Any:
        found = of_documents(numbers)
        if numbers in positions:
            documents[found] = positions[numbers]
        return found

    def joined(*functions: Any) -> Any:
        found = both(*functions)
        if len(functions) == 2 and functions[0] is causal and functions[1] in documents:
            rooms[found] = ones.documents(documents[functions[1]])
        return found

    def separated(function: Any, positions: torch.Tensor, *rest: Any) -> Any:
        assert separate is not None
        found = separate(function, positions, *rest)
        if function is causal:
            rooms[found] = ones.documents(positions)
        return found

    def mark_packed(*args: Any, **named: Any) -> Any:
        mask = sdpa_mask(*args, **named)
        room = rooms.get(named.get("mask_function"), 0)
        if mask is None or not room or named.get("attention_mask") is not None:
            return mask
        marked[found := MARK_PACKED(mask, room)] = room
        return found

    # Older releases join the two functions where newer ones have one of both.
    replaced = (
        {"packed_sequence_mask_function": numbered, "and_masks": joined}
        if separate is None
        else {"packed_sequence_compatibility_function": separated}
    )
    known_masks = masking_utils.AttentionMaskInterface._global_mapping
    with (
        mock.patch.dict(known_masks, sdpa=mark_packed),
        _shared_heads(marked),
        mock.patch.multiple(masking_utils, **replaced),
    ):
        yield


def _shared_heads(masks: Any) -> Any:
    """Give attention with some masks grouped heads of keys and values as they are.

    Its kernel shares them, and `attend_packed` repeats them for those that cannot.
    """
    from transformers.integrations import sdpa_attention

    use_gqa: Callable[..., bool] = sdpa_attention.use_gqa_in_sdpa

    def shares(mask: torch.Tensor | None, *operands: torch.Tensor) -> bool:
        return mask in masks or use_gqa(mask, *operands)

    return mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", shares)


@contextmanager
def hidden_compilation() -> Iterator[None]:
    """Hide from models of transformers that they are compiled.

    When compiled, some models leave out a mask, and then fail without it.
    """
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("transformers.")]
    with ExitStack() as stack:
        for module in modules:
            if "is_torchdynamo_compiling" in vars(module):
                stack.enter_context(
                    mock.patch.object(module, "is_torchdynamo_compiling", lambda: False)
                )
        yield


@contextmanager
def modules_stay_in_place() -> Iterator[None]:
    """Skip moves and conversions of modules by the model itself, which are done already.

    Raises:
        TraceError: a conversion changes a tensor, which the trace would lose.
    """

    def apply(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            made = function(tensor)
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise TraceError(
                    f"the model converts a {type(module).__name__} from {tensor.dtype} on "
                    f"{tensor.device} to {made.dtype} on {made.device} while it runs; convert it "
                    "before training."
                )
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield


@contextmanager
def refuse_host_random(model: nn.Module) -> Iterator[None]:
    """Refuse a model that draws from Python's or NumPy's generators: a trace freezes the numbers.

    Raises:
        TraceError: it has drawn.
    """
    before = host_generators()
    yield
    if host_generators() != before:
        raise TraceError(
            f"{type(model).__name__} draws random numbers with Python's or NumPy's generator while "
            "it runs; a trace would repeat one draw for ever: draw with torch instead."
        )
