"""Columns of a dataset, of its collator and of the model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sized
from typing import Any

from torch import nn
from torch.utils.data import default_collate
from transformers import (
    DataCollatorWithPadding,
    DefaultDataCollator,
    PreTrainedTokenizerBase,
    default_data_collator,
)
from transformers.trainer_utils import RemoveColumnsCollator

from merak.core.errors import DataError

# transformers' collators turn either of these into the column "labels".
LABELS = frozenset({"label", "label_ids", "labels"})


def check_not_empty(dataset: object, description: str = "training") -> None:
    """Refuse a dataset of known length 0; call it before a sampler is built, which says less.

    Args:
        dataset: any dataset; one without a length is let through.
        description: what the dataset is for, as in "training" or "evaluation".

    Raises:
        DataError: the dataset has no samples.
    """
    try:
        length = len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:
        length = None
    if length == 0:
        raise DataError(
            f"the {description} dataset is empty; give one with at least one sample (was every "
            "sample filtered out?)."
        )


def check_columns(
    batch: Iterable[str],
    *,
    model: nn.Module,
    needed: Iterable[str] = (),
    dataset: object = None,
    also_taken: Iterable[str] = (),
) -> None:
    """Refuse a batch that the model does not accept, or that lacks a column of its graph.

    Args:
        batch: names of the collated batch's columns.
        model: the user's model, for what its `forward` takes and requires.
        needed: columns that the traced model reads.
        dataset: where the batch comes from, to say what it has.
        also_taken: columns that something else than `forward` takes, such as a loss function.

    Raises:
        DataError: a column that the model requires or reads is not there, or one that is there is
            not taken.
    """
    columns = tuple(batch)
    parameters = inspect.signature(_base(model).forward).parameters
    by_name = [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in by_name if p.default is p.empty]
    name = type(_base(model)).__name__
    takes = f"{name}.forward takes {_listed(p.name for p in by_name)}"
    for column in (*needed, *required):
        if column not in columns:
            raise DataError(
                f"the model needs column {column!r}, but the batch has {_listed(columns)}"
                f"{_origin(dataset)}; {takes}: add the column to the dataset, or give a "
                "data_collator that makes it."
            )
    taken = {p.name for p in by_name} | set(also_taken)
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for column in columns:
        if column not in taken and not is_open:
            raise DataError(
                f"the batch has column {column!r}, which the model does not take"
                f"{_origin(dataset)}; {takes}: remove the column, or leave "
                "remove_unused_columns=True."
            )


def _base(model: nn.Module) -> Any:
    """The user's own model inside a PEFT wrapper, whose forward takes anything."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def _origin(dataset: object) -> str:
    columns = getattr(dataset, "column_names", None)
    return f" (the dataset has {_listed(columns)})" if isinstance(columns, list) else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no columns"


def columns_read(collate: Callable[..., Any], columns: tuple[str, ...]) -> frozenset[str] | None:
    """Sample columns that a collator reads for some columns of the batch.

    Args:
        collate: the loader's collate function.
        columns: the columns wanted of the batch.

    Returns:
        Names of sample columns, of which a dataset may have only some; None where the collator may
        derive anything from anything, and must be given whole samples.
    """
    if isinstance(collate, RemoveColumnsCollator):
        inner = columns_read(collate.data_collator, columns)
        return None if inner is None else inner & frozenset(collate.signature_columns)
    wanted = frozenset(columns) | (LABELS if "labels" in columns else frozenset())
    if collate in (default_data_collator, default_collate) or type(collate) is DefaultDataCollator:
        return wanted
    if type(collate) is DataCollatorWithPadding and _pads_as_usual(collate.tokenizer):
        return wanted | {collate.tokenizer.model_input_names[0]}
    return None


def _pads_as_usual(tokenizer: object) -> bool:
    """Whether padding looks at the main input alone: the tokenizer has no `pad` of its own."""
    usual = PreTrainedTokenizerBase
    return isinstance(tokenizer, usual) and all(
        getattr(type(tokenizer), method) is getattr(usual, method) for method in ("pad", "_pad")
    )


def narrow_dataset(dataset: Any, reads: frozenset[str]) -> Any:
    """The dataset narrowed to some columns, where it can be.

    Args:
        dataset: any dataset.
        reads: names of the columns to keep.

    Returns:
        A view of a Hugging Face dataset; any other dataset, or one whose samples a transform of
        the user makes, as it is.
    """
    datasets = sys.modules.get("datasets")  # scripts without it need not wait for its import
    if datasets is None or not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
        return dataset
    if isinstance(dataset, datasets.Dataset) and not is_stored(dataset):
        return dataset
    chosen = [column for column in dataset.column_names or () if column in reads]
    return dataset.select_columns(chosen) if chosen else dataset


def is_stored(dataset: Any) -> bool:
    """Whether samples come from a Hugging Face dataset's table, without a user's transform."""
    datasets = sys.modules.get("datasets")
    if datasets is None or type(dataset) is not datasets.Dataset:
        return False
    return bool(dataset.format["type"] != "custom")
