"""The data loader of one rank: its dp rank's batches, and its segments' columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from accelerate.data_loader import DataLoaderShard  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from merak.core.errors import DataError
from merak.data.columns import check_not_empty
from merak.data.fetch import (
    Fetch,
    KnownColumns,
    as_is,
    collated,
    is_iterable,
    make_fetch,
    rng_for_batch,
    samples_at,
)
from merak.data.mapped import RankBatches, RankDataset
from merak.data.streamed import RankStream

# Options that a rank's loader takes over from the loader of a single process.
TAKEN_OVER = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def shard_loader(
    loader: DataLoader[Any],
    *,
    dp_degree: int,
    dp_rank: int,
    columns: tuple[str, ...] | None,
    seed: int,
    non_tensors: Mapping[str, Any] = MappingProxyType({}),
    whole_rounds: bool = False,
    known: KnownColumns | None = None,
) -> DataLoader[Any]:
    """Turn the loader of a single process into the loader of one rank.

    Batch k of the epoch goes to data parallel rank k mod `dp_degree`. Every rank's loader has
    ⌈batches / dp_degree⌉ entries; where the last round has no batch for a rank, it yields {}.

    Args:
        loader: what `transformers.Trainer` (through accelerate) or the user made, for all samples.
        dp_degree: data parallel degree.
        dp_rank: this rank's data parallel replica.
        columns: the columns that this rank's segments read; () to read no data and yield {}; None
            for all columns.
        seed: the job's seed; keys the draws of random datasets and collators.
        non_tensors: arguments that every batch has beside its columns.
        whole_rounds: leave out a last round that has no batch for some rank.
        known: the columns of the first batch, which all have; None where they may differ.

    Returns:
        A loader with `set_epoch`, on which `accelerate.skip_first_batches` works.

    Raises:
        DataError: the loader has no batches; later, a batch without a wanted column, with an
            unknown one, or with other non-tensor arguments.
    """
    check_not_empty(loader.dataset)
    fetch = make_fetch(loader.dataset, loader.collate_fn, columns, seed, non_tensors, known)
    if is_iterable(loader.dataset):
        return _shard_stream(loader, fetch, dp_degree, dp_rank, whole_rounds)
    batched = loader.batch_sampler is not None
    batches = RankBatches(
        loader.batch_sampler if batched else loader.sampler,
        dp_degree=dp_degree,
        dp_rank=dp_rank,
        seed=seed,
        whole_rounds=whole_rounds,
    )
    _check_some_batches(loader, batches)
    reads = columns != ()
    sharded: DataLoader[Any] = DataLoaderShard(
        RankDataset(loader.dataset, fetch if reads else None, batched),
        batch_sampler=batches,
        collate_fn=as_is,
        device=getattr(loader, "device", None),
        use_stateful_dataloader=getattr(loader, "use_stateful_dataloader", False),
        _drop_last=getattr(loader, "_drop_last", loader.drop_last),
        _non_blocking=getattr(loader, "_non_blocking", False),
        **(_options(loader) if reads else {}),
    )
    return sharded


def _shard_stream(
    loader: DataLoader[Any], fetch: Fetch, dp_degree: int, dp_rank: int, whole_rounds: bool
) -> DataLoader[Any]:
    stream = RankStream(
        fetch,
        dp_degree=dp_degree,
        dp_rank=dp_rank,
        batch_size=loader.batch_size,
        drop_last=getattr(loader, "_drop_last", loader.drop_last),
        options=_options(loader),
        whole_rounds=whole_rounds,
    )
    sharded: DataLoader[Any] = DataLoaderShard(
        stream,
        batch_size=None,
        collate_fn=as_is,
        device=getattr(loader, "device", None),
        _non_blocking=getattr(loader, "_non_blocking", False),
    )
    return sharded


def example_batch(
    loader: DataLoader[Any], *, seed: int, description: str = "training"
) -> dict[str, Any]:
    """A batch of the loader's first samples, in the dataset's order, to trace the model with.

    It is the same on every rank, and disturbs neither the order of the samples nor the global
    random state.

    Args:
        loader: what `transformers.Trainer` (through accelerate) or the user made.
        seed: the job's seed.
        description: what the dataset is for, as in "training" or "evaluation".

    Returns:
        Every column of the batch, on the CPU.

    Raises:
        DataError: the dataset is empty, or its batches are not dicts.
    """
    check_not_empty(loader.dataset, description)
    fetch = make_fetch(loader.dataset, loader.collate_fn, None, seed)
    if is_iterable(loader.dataset):
        return _first_of_stream(loader, fetch, description)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    with rng_for_batch(fetch, -1):
        if size is None and loader.batch_sampler is None:
            return collated(fetch, fetch.dataset[next(iter(loader.sampler))])
        indices = range(min(size or 1, len(loader.dataset)))  # type: ignore[arg-type]
        return collated(fetch, samples_at(fetch, list(indices)))


def _first_of_stream(loader: DataLoader[Any], fetch: Fetch, description: str) -> dict[str, Any]:
    stream = RankStream(
        fetch,
        dp_degree=1,
        dp_rank=0,
        batch_size=loader.batch_size,
        drop_last=False,
        options={},
    )
    for batch in stream:
        return batch
    raise DataError(
        f"the {description} dataset yields no samples; give one that yields at least one each "
        "time it is iterated."
    )


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in TAKEN_OVER if hasattr(loader, name)}


def _check_some_batches(loader: DataLoader[Any], batches: RankBatches) -> None:
    if len(batches) == 0 < len(batches.inner):
        raise DataError(
            f"the dataset's {len(batches.inner)} batches are not one for each of dp="
            f"{batches.dp_degree} replicas, and drop_last drops such a round; use a smaller batch, "
            "or a smaller dp."
        )
    if len(batches) == 0:
        raise DataError(
            f"the dataset's {len(loader.dataset)} samples do not fill one batch of "  # type: ignore[arg-type]
            f"{batches.batch_size} and drop_last drops the rest; use a smaller batch, or "
            "dataloader_drop_last=False."
        )
