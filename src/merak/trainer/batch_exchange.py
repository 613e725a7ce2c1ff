"""The exchange of batches' shapes and metadata between ranks, before they run some microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from merak.core.errors import DataError
from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.data import BatchSignature, signature, union
from merak.engine.comm.gradient_buckets import others_of
from merak.engine.health.status import Progress

Batch = Mapping[str, torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExchangedBatches:
    """Signatures and metadata of microbatches, the same on all ranks.

    Args:
        signatures: per round and data parallel rank, the whole microbatch's columns; empty where
            that replica has none in the round.
        metadata: per round and data parallel rank, the ranks' metadata of the microbatch, merged.
    """

    signatures: tuple[tuple[BatchSignature, ...], ...]
    metadata: tuple[tuple[dict[str, Any], ...], ...]

    def own(self, mesh: Mesh) -> list[tuple[int, BatchSignature]]:
        """The rounds in which this replica has a microbatch, and its signature."""
        rounds = enumerate(row[mesh.dp_rank] for row in self.signatures)
        return [(number, found) for number, found in rounds if found.columns]

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of all replicas."""
        return sum(bool(found.columns) for row in self.signatures for found in row)


class BatchExchange:
    """Exchanges the shapes of batches between the ranks of all replicas and stages.

    Every rank reads only some columns; middle stages read none. Yet all must know each microbatch's
    shapes, since they post receives of its activations.

    Args:
        mesh: the grid of ranks.
        progress: reports every wait.
    """

    def __init__(self, mesh: Mesh, progress: Progress) -> None:
        self.mesh = mesh
        self._progress = progress
        self._group: dist.ProcessGroup | None = None
        if mesh.pp * mesh.replicas > 1:
            lines = [
                [
                    (p * mesh.replicas + replica) * mesh.tp + t
                    for p in range(mesh.pp)
                    for replica in range(mesh.replicas)
                ]
                for t in range(mesh.tp)
            ]
            # Always gloo: these are small Python objects in host memory.
            with waiting_for_all("a group of ranks with"):
                self._group, _ = dist.new_subgroups_by_enumeration(lines, backend="gloo")

    def exchange(
        self, batches: Sequence[Batch], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> ExchangedBatches:
        """Exchange some rounds of microbatches; all ranks call it together.

        Args:
            batches: per round, this rank's columns of its replica's microbatch; may be empty.
            metadata: per round, this rank's metadata of it.

        Raises:
            DataError: ranks see one column differently.
        """
        every = metadata or [{} for _ in batches]
        own = [(signature(batch), dict(one)) for batch, one in zip(batches, every, strict=True)]
        everyone = self.gather(own)
        if len({len(rounds) for rounds in everyone}) > 1:
            raise DataError(
                "ranks have different numbers of microbatches "
                f"({[len(rounds) for rounds in everyone]}); give every rank the same dataset."
            )
        merged_signatures = []
        merged_metadata = []
        for number in range(len(own)):
            columns, merged = self._merge([rounds[number] for rounds in everyone])
            merged_signatures.append(columns)
            merged_metadata.append(merged)
        return ExchangedBatches(tuple(merged_signatures), tuple(merged_metadata))

    def gather(self, value: Any) -> list[Any]:
        """Gather a value of every rank, in the order pp rank, dp rank, cp rank."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * (self.mesh.pp * self.mesh.replicas)
        with self._progress.waiting("what batches there are on", others_of(self._group)):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def of_replica(self, everyone: Sequence[T], dp_rank: int) -> list[T]:
        """What the ranks of one data parallel coordinate have given, of what `gather` returns.

        Args:
            everyone: in the order of `gather`.
            dp_rank: the coordinate.
        """
        mesh = self.mesh
        places = range(len(everyone))
        return [everyone[i] for i in places if i % mesh.replicas // mesh.cp == dp_rank]

    def _merge(
        self, ranks: Sequence[tuple[BatchSignature, dict[str, Any]]]
    ) -> tuple[tuple[BatchSignature, ...], tuple[dict[str, Any], ...]]:
        columns: list[BatchSignature] = []
        metadata: list[dict[str, Any]] = []
        for replica in range(self.mesh.dp):
            own = self.of_replica(ranks, replica)
            columns.append(union(*(found for found, _ in own)))
            metadata.append({key: value for _, one in own for key, value in one.items()})
        return tuple(columns), tuple(metadata)
