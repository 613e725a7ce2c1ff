"""Sizes of an example batch's columns, from the error of a model that refuses them."""

from __future__ import annotations

import re
from dataclasses import replace

from merak.zoo.batches.columns import Columns
from merak.zoo.batches.documented import UNSAID, is_target

_SIZES = re.compile(
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton "
    r"dimension (\d+)"
)
_ROWS = re.compile(r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)")


def fitted(error: BaseException, columns: Columns) -> Columns:
    """Resize the columns that an error names; returns none if it names no size.

    Args:
        error: what the model failed with.
        columns: what the batch held, of one sample.
    """
    return _sized(error, columns) or _with_rows(error, columns)


def _sized(error: BaseException, columns: Columns) -> Columns:
    """Return the size that the model has for a dimension that nothing else gave."""
    message = _SIZES.search(str(error))
    if message is None:
        return {}
    guessed, wanted, place = map(int, message.groups())
    if guessed != UNSAID or place == 0:
        return {}
    return {
        name: replace(c, shape=(*c.shape[:place], wanted, *c.shape[place + 1 :]))
        for name, c in columns.items()
        if len(c.shape) > place and c.shape[place] == guessed
    }


def _with_rows(error: BaseException, columns: Columns) -> Columns:
    """Repeat labels until there are as many as the model has rows of scores."""
    message = _ROWS.search(str(error))
    if message is None:
        return {}
    rows, labels = map(int, message.groups())
    if labels == 0 or rows % labels:
        return {}
    return {
        name: replace(c, shape=(*c.shape[:-1], c.shape[-1] * rows // labels))
        for name, c in columns.items()
        if is_target(name) and len(c.shape) > 1
    }
