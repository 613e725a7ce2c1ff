"""Staging: copies of a rank's shards on the CPU, which are written while training goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager

from merak.checkpoint.shards import Box, Shards


class ShardStager(AsyncStager):
    """Copies shards into memory that every save uses again.

    The copies are those of the step that is saved: a save begins when the one before has ended.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Box], torch.Tensor] = {}

    def stage(self, state_dict: Any) -> Any:
        """Copy the pieces of all shards; returns a state of the copies.

        Args:
            state_dict: the shards of this rank by kind and key.
        """
        state: dict[str, Shards] = state_dict
        buffers: dict[tuple[str, Box], torch.Tensor] = {}
        staged: dict[str, Shards] = {kind: {} for kind in state}
        for kind, key, shard in ((k, key, one) for k in state for key, one in state[k].items()):
            boxes = []
            for offset, piece in shard.boxes:
                place = (kind, (key, offset))
                buffers[place] = self._copied(place, piece.detach())
                boxes.append((offset, buffers[place]))
            staged[kind][key] = replace(shard, boxes=tuple(boxes))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers = buffers
        return staged

    def _copied(self, place: tuple[str, Box], piece: torch.Tensor) -> torch.Tensor:
        """Copy a piece into its memory on the host; the copy may still be under way."""
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != piece.shape or buffer.dtype != piece.dtype:
            is_cuda = piece.device.type == "cuda"
            buffer = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=is_cuda)
        return buffer.copy_(piece, non_blocking=True)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` has copied all."""
        return None

    def close(self) -> None:
        """Free the copies."""
        self._buffers = {}
