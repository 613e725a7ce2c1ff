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
        self._buffers: dict[Box, torch.Tensor] = {}

    def stage(self, state_dict: Any) -> Any:
        """Copy the pieces of all shards; returns shards of the copies.

        Args:
            state_dict: the shards of this rank by key.
        """
        shards: Shards = state_dict
        buffers: dict[Box, torch.Tensor] = {}
        staged: Shards = {}
        devices = set()
        for key, shard in shards.items():
            boxes = []
            for offset, piece in shard.boxes:
                buffer = self._buffers.get((key, offset))
                if buffer is None or buffer.shape != piece.shape or buffer.dtype != piece.dtype:
                    is_cuda = piece.device.type == "cuda"
                    buffer = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=is_cuda)
                buffer.copy_(piece.detach(), non_blocking=True)
                buffers[key, offset] = buffer
                boxes.append((offset, buffer))
                devices.add(piece.device)
            staged[key] = replace(shard, boxes=tuple(boxes))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self._buffers = buffers
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` has copied all."""
        return None

    def close(self) -> None:
        """Free the copies."""
        self._buffers = {}
