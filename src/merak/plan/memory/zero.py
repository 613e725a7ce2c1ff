"""ZeRO: shards of parameters, gradients and optimizer state over the replicas.

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
class ZeroSharding:
    """Sharding over replicas, and the precision of the tensors that the optimizer steps.

    Args:
        degree: replicas that shard the optimizer state; 1 where each steps everything.
        gradients: whether gradients are sharded between microbatches, too.
        master_weights: whether parameters of low precision have float32 masters.
        float32_gradients: whether their gradients are accumulated in float32.
        parameters: whether parameters are sharded, too, and gathered while their segment runs.
        experts: names of parameters of which replicas hold different shards.
        expert_replicas: replicas that hold the same ones.
    """

    degree: int = 1
    gradients: bool = False
    master_weights: bool = False
    float32_gradients: bool = True
    parameters: bool = False
    experts: frozenset[str] = frozenset()
    expert_replicas: int = 1

    def degree_of(self, name: str) -> int:
        """Replicas that shard the optimizer state of a parameter."""
        return min(self.degree, self.expert_replicas) if name in self.experts else self.degree

    @property
    def is_sharded(self) -> bool:
        """Whether each replica steps a shard."""
        return self.degree > 1

    def optimizer_tensors(self, metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        """Tensors that the optimizer steps, on the first replica, which has the largest shards."""
        kinds = {name: (meta, self.degree_of(name)) for name, meta in metas.items()}
        rows = {kind: self._rows(*kind) for kind in set(kinds.values())}  # many are alike
        return {name: rows[kind] for name, kind in kinds.items()}

    def gradient_bytes(self, metas: Mapping[str, TensorMeta]) -> dict[str, int]:
        """Bytes of the unsharded gradients of some parameters."""
        return {name: meta.num_bytes for name, meta in self._gradients(metas).items()}

    def gradient_shard_bytes(self, metas: Mapping[str, TensorMeta]) -> dict[str, int]:
        """Bytes of each gradient's shard, on the first replica, which has the largest ones."""
        shards = replace(self, master_weights=False).optimizer_tensors(self._gradients(metas))
        return {name: meta.num_bytes for name, meta in shards.items()}

    def _gradients(self, metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        def accumulated(meta: TensorMeta) -> TensorMeta:
            is_low = meta.dtype in _LOW_PRECISION and self.float32_gradients
            return replace(meta, dtype=torch.float32) if is_low else meta

        kinds = {meta: accumulated(meta) for meta in set(metas.values())}
        return {name: kinds[meta] for name, meta in metas.items()}

    def master_bytes(self, parameter: TensorMeta, stepped: TensorMeta) -> int:
        """Bytes of a parameter's float32 master on a replica."""
        return stepped.num_bytes if stepped.dtype != parameter.dtype else 0

    def _dtype(self, meta: TensorMeta) -> torch.dtype:
        is_low = meta.dtype in _LOW_PRECISION
        return torch.float32 if self.master_weights and is_low else meta.dtype

    def _rows(self, meta: TensorMeta, degree: int) -> TensorMeta:
        dtype = self._dtype(meta)
        if degree == 1:
            return replace(meta, dtype=dtype)
        rows = row_shard(meta.shape, degree, 0)
        return replace(meta, dtype=dtype, shape=(rows.stop - rows.start, *meta.shape[1:]))


def total_bytes(metas: Iterable[TensorMeta]) -> int:
    """Bytes of some tensors."""
    return sum(meta.num_bytes for meta in metas)
