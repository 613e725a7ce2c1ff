"""Replays of a loss after a step: what it reads on the host, sent to every rank at once.

Values are sent as bytes, those of all microbatches of all replicas in one tensor to which every
rank adds its own: they arrive as they are, whatever their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch

from merak.core.tensor_meta import Signature, TensorMeta
from merak.engine.state import EngineState
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.graph.trace.calls.host_reads import READ

_BYTES_APART = 16
"""Bytes to a multiple of which each value is padded, so that any type may be read there."""


def reads_of(program: Program, stage: int, made: Mapping[str, torch.Tensor]) -> TensorDict:
    """Those outputs of a stage that the loss reads on the host.

    Args:
        program: of the microbatch.
        stage: its number.
        made: what the stage has computed.
    """
    results = program.stages[stage].results
    return {name: made[value] for name, value in results.items() if name.startswith(READ)}


def replay_losses(
    state: EngineState,
    signatures: Sequence[Signature],
    own: Mapping[int, TensorDict],
    all_reduce: Callable[[torch.Tensor, str, str], None],
) -> None:
    """Run the loss again for each microbatch of a training step; all ranks call it together.

    Args:
        state: of this rank's engine.
        signatures: of the microbatches of all replicas, in the order of one process.
        own: what this rank has computed of what the loss reads, by number of a microbatch.
        all_reduce: sums a tensor over an axis.
    """
    programs_of = state.program_for
    if programs_of(programs_of.base_signature, True).replay is None:
        return  # and so it is of all shapes
    programs = [programs_of(signature, True) for signature in signatures]
    metas = [_metas(program) for program in programs]
    sizes = [sum(map(_num_bytes, own.values())) for own in metas]
    device = state.mesh.device
    buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    values = [_views(part, m) for part, m in zip(buffer.split(sizes), metas, strict=True)]
    for number, found in own.items():
        for name, value in found.items():
            values[number][name].copy_(value)
    if sum(sizes):
        for axis in ("pp", "dp"):
            all_reduce(buffer, axis, "what the loss reads on the host")
    parts = buffer.cpu().split(sizes)
    for program, signature, part, meta in zip(programs, signatures, parts, metas, strict=True):
        if program.replay is not None:
            program.replay(state.model, dict(signature), _views(part, meta), device)


def _metas(program: Program) -> dict[str, TensorMeta]:
    reads = zip(program.outputs, program.output_values, strict=True)
    return {name: program.values[value] for name, value in reads if name.startswith(READ)}


def _num_bytes(meta: TensorMeta) -> int:
    size = prod(meta.shape) * meta.dtype.itemsize
    return -(-size // _BYTES_APART) * _BYTES_APART


def _views(buffer: torch.Tensor, metas: Mapping[str, TensorMeta]) -> dict[str, torch.Tensor]:
    """Tensors of some shapes and types, which share a buffer of bytes."""
    found, begin = {}, 0
    for name, meta in metas.items():
        size = prod(meta.shape) * meta.dtype.itemsize
        found[name] = buffer[begin : begin + size].view(meta.dtype).view(meta.shape)
        begin += _num_bytes(meta)
    return found
