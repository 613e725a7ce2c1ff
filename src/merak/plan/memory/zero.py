"""What each replica holds of gradients and of what the optimizer steps.

Source: arXiv:1910.02054 (ZeRO), sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from merak.core.shards import row_shard
from merak.core.tensor_meta import TensorMeta

_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Sharing:
    """How replicas share the optimizer, and in which precision it steps.

    Args:
        degree: the replicas that share it; 1 where each steps everything.
        every_microbatch: whether replicas keep shares of the gradients between microbatches.
        masters: whether parameters of low precision have float32 masters.
        float32_gradients: whether their gradients are summed in float32.
        parameters: whether replicas hold shares of the parameters as well, and gather those of a
            segment while it runs.
    """

    degree: int = 1
    every_microbatch: bool = False
    masters: bool = False
    float32_gradients: bool = True
    parameters: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether each replica steps a share."""
        return self.degree > 1

    def stepped(self, metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        """What the optimizer steps of some parameters, on the replica that steps most."""
        shares = [
            {name: self._rows(meta, index) for name, meta in metas.items()}
            for index in range(self.degree)
        ]
        return max(shares, key=lambda share: sum(meta.num_bytes for meta in share.values()))

    def gradient_bytes(self, metas: Mapping[str, TensorMeta]) -> dict[str, int]:
        """Bytes of the whole gradients of some parameters."""
        return {name: meta.num_bytes for name, meta in self._gradients(metas).items()}

    def share_bytes(self, metas: Mapping[str, TensorMeta]) -> dict[str, int]:
        """Bytes of what the replica that steps most gets of each gradient."""
        shares = replace(self, masters=False).stepped(self._gradients(metas))
        return {name: meta.num_bytes for name, meta in shares.items()}

    def _gradients(self, metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        def summed(meta: TensorMeta) -> TensorMeta:
            is_low = meta.dtype in _LOW_PRECISION and self.float32_gradients
            return replace(meta, dtype=torch.float32) if is_low else meta

        return {name: summed(meta) for name, meta in metas.items()}

    def master_bytes(self, parameter: TensorMeta, stepped: TensorMeta) -> int:
        """Bytes of a parameter's master on a replica."""
        return stepped.num_bytes if stepped.dtype != parameter.dtype else 0

    def _rows(self, meta: TensorMeta, index: int) -> TensorMeta:
        dtype = torch.float32 if self.masters and meta.dtype in _LOW_PRECISION else meta.dtype
        if not self.is_sharded:
            return replace(meta, dtype=dtype)
        rows = row_shard(meta.shape, self.degree, index)
        return replace(meta, dtype=dtype, shape=(rows.stop - rows.start, *meta.shape[1:]))


def total_bytes(metas: Iterable[TensorMeta]) -> int:
    """Bytes of some tensors."""
    return sum(meta.num_bytes for meta in metas)
