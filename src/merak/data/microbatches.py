"""Microbatches of a batch: cut along its samples, or given as a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from merak.core.errors import DataError
from merak.data.objects import pack_objects
from merak.data.signature import check_tensors

Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Columns of a batch that is cut into microbatches, or the microbatches themselves."""


def listed(batch: Batch) -> Sequence[Mapping[str, Any]]:
    """Return a list of microbatches, and a batch that is to be cut as a list of one.

    Args:
        batch: either of them. Columns that are lists of objects are packed.
    """
    every = batch if isinstance(batch, list) else [cast("Mapping[str, Any]", batch)]
    return [pack_objects(one) if hasattr(one, "items") else one for one in every]


def split_batch(
    batch: Mapping[str, torch.Tensor] | list[dict[str, torch.Tensor]], num_microbatches: int
) -> Sequence[dict[str, torch.Tensor]]:
    """Cut a batch's columns along their first dim into equal microbatches.

    Args:
        batch: its columns, with a row for each sample; or its microbatches, which stay as they are.
        num_microbatches: how many microbatches there are to be.

    Raises:
        DataError: no samples, another number of microbatches, or a column that is no tensor, has
            gradients to pass on, or has other rows than samples, or samples that do not divide.
    """
    if isinstance(batch, list):
        if len(batch) != num_microbatches:
            raise DataError(
                f"the batch is a list of {len(batch)} microbatches, and the model was laid out for "
                f"{num_microbatches}; give as many, or another num_microbatches."
            )
        return [part for one in batch for part in split_batch(one, 1)]
    check_tensors(batch)
    sizes = {name: column.shape[0] for name, column in batch.items() if column.ndim}
    if sizes and not any(sizes.values()):
        raise DataError("the batch has no samples; leave it out, or give one with some.")
    for name, column in batch.items():
        if column.grad_fn is not None:
            raise DataError(
                f"column {name!r} is computed from tensors with gradients ({column.grad_fn.name()})"
                ", which would get theirs on some ranks alone; make what computes it a part of the "
                "model, or give the column's detach()."
            )
    if num_microbatches > 1:
        _refuse_uncut(sizes, num_microbatches)
    parts = {
        name: column.chunk(num_microbatches) if column.ndim else [column] * num_microbatches
        for name, column in batch.items()
    }
    return [{name: part[i] for name, part in parts.items()} for i in range(num_microbatches)]


def refuse_shared_images(batch: Mapping[str, Any], config: object) -> None:
    """Refuse to cut a batch whose images are as many as its samples, and not one of each.

    Then some sample has none: images are given in the samples' order, and one that has two shifts
    all that follow.

    Args:
        batch: columns by name, to be cut.
        config: of the model, which may name the token in whose places images are put.

    Raises:
        DataError: a sample has no place for an image.
    """
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    ids, images = batch.get("input_ids"), batch.get("pixel_values")
    if not (type(token) is int and isinstance(ids, torch.Tensor) and ids.ndim == 2):
        return
    if not isinstance(images, torch.Tensor) or len(images) != len(ids):
        return
    is_of_image = (ids == token).any(1)
    if not bool(is_of_image.all()):
        raise DataError(
            f"the batch has {len(images)} images for {len(ids)} samples, and sample "
            f"{is_of_image.tolist().index(False)} has no image token ({token}), so that which "
            "images belong to a microbatch is not known; give a list of microbatches, each a "
            "batch as the model takes it."
        )


def _refuse_uncut(sizes: Mapping[str, int], num_microbatches: int) -> None:
    """Refuse columns that cannot be cut into equal microbatches, by the sizes of their first dim.

    Raises:
        DataError: there is one.
    """
    for name, size in sizes.items():
        if size % num_microbatches:
            raise DataError(
                f"column {name!r} has {size} samples, which do not divide into "
                f"{num_microbatches} microbatches; use a batch size that is a multiple."
            )
    if len(set(sizes.values())) > 1:
        (name, size), (other, others) = max(sizes.items(), key=_size), min(sizes.items(), key=_size)
        raise DataError(
            f"column {name!r} has {size} rows and {other!r} has {others}, so the rows of one are "
            "not samples, and which of them belong to a microbatch is not known; give a list of "
            f"{num_microbatches} microbatches, each a batch as the model takes it."
        )


def _size(column: tuple[str, int]) -> int:
    return column[1]
