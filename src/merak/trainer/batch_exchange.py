"""What the ranks of a job must agree on before they run some microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from merak.core.errors import DataError
from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.data import BatchSignature, signature, union
from merak.engine.comm.gradient_buckets import others_of
from merak.engine.health.status import Progress

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExchangedBatches:
    """Microbatches as all ranks see them.

    Args:
        signatures: per round and data parallel rank, the whole microbatch's columns; empty where
            that replica has none in the round.
        metadata: per round and data parallel rank, what ranks say of the microbatch, merged.
    """

    signatures: tuple[tuple[BatchSignature, ...], ...]
    metadata: tuple[tuple[dict[str, Any], ...], ...]

    def own(self, mesh: Mesh) -> list[tuple[int, BatchSignature]]:
        """The rounds in which this replica has a microbatch, and what it is."""
        rounds = enumerate(row[mesh.dp_rank] for row in self.signatures)
        return [(number, found) for number, found in rounds if found.columns]

    @property
    def num_microbatches(self) -> int:
        """Microbatches over all replicas."""
        return sum(bool(found.columns) for row in self.signatures for found in row)


class BatchExchange:
    """Lets the ranks of all replicas and stages compare their batches.

    Every rank reads only some columns; middle stages read none. Yet all must know each microbatch's
    shapes, since they post receives of its activations.

    Args:
        mesh: the grid of ranks.
        progress: told of every wait.
    """

    def __init__(self, mesh: Mesh, progress: Progress) -> None:
        self.mesh = mesh
        self._progress = progress
        self._group: dist.ProcessGroup | None = None
        if mesh.pp * mesh.dp > 1:
            lines = [
                [(p * mesh.dp + d) * mesh.tp + t for p in range(mesh.pp) for d in range(mesh.dp)]
                for t in range(mesh.tp)
            ]
            # Always gloo: these are small Python objects in host memory.
            with waiting_for_all("a group of ranks with"):
                self._group, _ = dist.new_subgroups_by_enumeration(lines, backend="gloo")

    def exchange(
        self, batches: Sequence[Batch], metadata: Sequence[Mapping[str, Any]] | None = None
    ) -> ExchangedBatches:
        """Compare some rounds of microbatches; called alike on every rank.

        Args:
            batches: per round, this rank's columns of its replica's microbatch; may be empty.
            metadata: per round, something to tell the others about it.

        Raises:
            DataError: ranks see one column differently.
        """
        told = metadata or [{} for _ in batches]
        own = [(signature(batch), dict(note)) for batch, note in zip(batches, told, strict=True)]
        everyone = self._gather(own)
        if len({len(rounds) for rounds in everyone}) > 1:
            raise DataError(
                "ranks have different numbers of microbatches "
                f"({[len(rounds) for rounds in everyone]}); give every rank the same dataset."
            )
        merged_signatures = []
        merged_metadata = []
        for number in range(len(own)):
            columns, said = self._merge([rounds[number] for rounds in everyone])
            merged_signatures.append(columns)
            merged_metadata.append(said)
        return ExchangedBatches(tuple(merged_signatures), tuple(merged_metadata))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in the order pipeline position, replica."""
        return self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * (self.mesh.pp * self.mesh.dp)
        with self._progress.waiting("what batches there are on", others_of(self._group)):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def _merge(
        self, told: Sequence[tuple[BatchSignature, dict[str, Any]]]
    ) -> tuple[tuple[BatchSignature, ...], tuple[dict[str, Any], ...]]:
        columns: list[BatchSignature] = []
        metadata: list[dict[str, Any]] = []
        for replica in range(self.mesh.dp):
            own = told[replica :: self.mesh.dp]
            columns.append(union(*(found for found, _ in own)))
            metadata.append({key: value for _, note in own for key, value in note.items()})
        return tuple(columns), tuple(metadata)
