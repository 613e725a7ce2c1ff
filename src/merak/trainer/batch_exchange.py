"""The exchange of batches' shapes and metadata between ranks, before they run some microbatches.

With them go digests of the samples, since the ranks of one replica must have read the same ones,
and what a script has changed in Python, since all ranks must run the same model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from merak.core.errors import DataError, TrainingError
from merak.core.health.status import waiting_for_all
from merak.core.mesh import Mesh
from merak.core.tensor_meta import Signature
from merak.data import BatchSignature, agreed, signatures, union
from merak.data.digest import INDICES, SampleDigests, differing
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
    def columns(self) -> list[Signature]:
        """Columns of the microbatches of all replicas."""
        return [found.columns for row in self.signatures for found in row]

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
        self._tp_group: dist.ProcessGroup | None = None
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
        if mesh.tp > 1:
            firsts = range(0, mesh.world_size, mesh.tp)
            lines = [list(range(first, first + mesh.tp)) for first in firsts]
            with waiting_for_all("a group of tensor parallel ranks with"):
                self._tp_group, _ = dist.new_subgroups_by_enumeration(lines, backend="gloo")

    def exchange(
        self,
        batches: Sequence[Batch],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        samples: Sequence[SampleDigests] | None = None,
        state: Mapping[str, str] = MappingProxyType({}),
        *,
        may_change: bool = False,
        masks: Collection[str] = (),
    ) -> ExchangedBatches:
        """Exchange some rounds of microbatches; all ranks call it together.

        Args:
            batches: per round, this rank's columns of its replica's microbatch; may be empty.
            metadata: per round, this rank's metadata of it.
            samples: per round, digests of what this rank has read for it.
            state: Python state of this rank's model that has changed, as text.
            may_change: whether the script may still change values, so that none are known.
            masks: as of `merak.data.signature.signatures`.

        Raises:
            DataError: ranks see one column differently, or have read different samples.
            TrainingError: ranks have changed their models differently.
        """
        every = metadata or [{} for _ in batches]
        looked = signatures(batches, () if may_change else masks)
        own = [(seen, dict(one)) for seen, one in zip(looked, every, strict=True)]
        digests = list(samples or [SampleDigests() for _ in batches])
        self._compare_tp(digests, "microbatch", state)
        gathered = self.gather((own, digests, dict(state)))
        _refuse_other_state([changed for _, _, changed in gathered], self._ranks())
        everyone = [rounds for rounds, _, _ in gathered]
        if len({len(rounds) for rounds in everyone}) > 1:
            raise DataError(
                "ranks have different numbers of microbatches "
                f"({[len(rounds) for rounds in everyone]}); give every rank the same dataset."
            )
        self._compare_replicas([read for _, read, _ in gathered], "microbatch")
        merged_signatures = []
        merged_metadata = []
        for number in range(len(own)):
            columns, merged = self._merge([rounds[number] for rounds in everyone])
            merged_signatures.append(agreed(columns, may_change=may_change))
            merged_metadata.append(merged)
        return ExchangedBatches(tuple(merged_signatures), tuple(merged_metadata))

    def compare(self, samples: SampleDigests, what: str) -> None:
        """Compare what the ranks of each replica have read; all ranks call it together.

        Args:
            samples: digests of what this rank has read.
            what: it as a noun, such as "first samples of the dataset".

        Raises:
            DataError: ranks of one replica have read different samples.
        """
        self._compare_tp([samples], what)
        self._compare_replicas(self.gather([samples]), what)

    def _compare_tp(
        self,
        own: Sequence[SampleDigests],
        what: str,
        state: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Compare what this rank's tensor parallel ranks have read, per round, and changed."""
        if self._tp_group is None:
            return
        everyone: list[Any] = [None] * self.mesh.tp
        with self._progress.waiting("what samples there are on", others_of(self._tp_group)):
            dist.all_gather_object(everyone, (own, dict(state)), group=self._tp_group)
        ranks = dist.get_process_group_ranks(self._tp_group)
        _refuse_other_state([changed for _, changed in everyone], ranks)
        _refuse_other_samples([read for read, _ in everyone], ranks, what)

    def _compare_replicas(self, everyone: Sequence[Sequence[SampleDigests]], what: str) -> None:
        """Compare what the ranks of each replica have read, per round, as `gather` returns it."""
        for replica in range(self.mesh.dp):
            own = self.of_replica(everyone, replica)
            _refuse_other_samples(own, self.of_replica(self._ranks(), replica), what)

    def _ranks(self) -> list[int]:
        """The ranks of the job that `gather` has values of, in its order."""
        group = self._group
        return [self.mesh.rank] if group is None else dist.get_process_group_ranks(group)

    def gather(self, value: Any) -> list[Any]:
        """Gather a value of every rank, in the order pp rank, dp rank, cp rank."""
        if self._group is None:
            return [value]
        everyone: list[Any] = [None] * (self.mesh.pp * self.mesh.replicas)
        with self._progress.waiting("what batches there are on", others_of(self._group)):
            dist.all_gather_object(everyone, value, group=self._group)
        return everyone

    def of_replica(self, everyone: Sequence[T], dp_rank: int) -> list[T]:
        """Values of the ranks of one data parallel coordinate, of those that `gather` returns.

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


def _refuse_other_samples(
    everyone: Sequence[Sequence[SampleDigests]], ranks: Sequence[int], what: str
) -> None:
    """Refuse ranks of one replica that have read different samples.

    Args:
        everyone: per rank and round, digests of what it has read.
        ranks: the ranks, in that order.
        what: they have read, as a noun.

    Raises:
        DataError: two of them need what the other has read differently.
    """
    for (one, mine), (other, theirs) in combinations(zip(ranks, everyone, strict=True), 2):
        for own, read in zip(mine, theirs, strict=False):
            names = differing(own, read)
            if names:
                columns = ", ".join(name if name == INDICES else repr(name) for name in names)
                raise DataError(
                    f"rank {one} and rank {other} compute one {what} together, but have read "
                    f"different samples ({columns} differ); make the dataset the same on every "
                    "rank: give a seed to its shuffle or split, to a sampler, and to generators "
                    "of its own, and sort what comes out of a set."
                )


def _refuse_other_state(everyone: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> None:
    """Refuse ranks whose models a script has changed differently.

    Args:
        everyone: per rank, what has changed.
        ranks: the ranks, in that order.

    Raises:
        TrainingError: it is not the same on two of them.
    """
    first = everyone[0]
    for rank, other in zip(ranks, everyone, strict=True):
        for name in (*first, *other):
            one, two = first.get(name, "unchanged"), other.get(name, "unchanged")
            if one != two:
                raise TrainingError(
                    f"{name} is {one} on rank {ranks[0]} and {two} on rank {rank}, so that the "
                    "ranks would train different models; change it on every rank, not on the "
                    "main process alone."
                )
