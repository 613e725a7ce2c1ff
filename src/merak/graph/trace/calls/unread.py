"""Stand-ins for columns of Python objects, which a trace has no values of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from merak.core.errors import TraceError
from merak.core.source_lines import model_line, with_text
from merak.data.objects import OBJECTS


class Unread:
    """Stands for a column of objects while a model is traced: it may be passed on, and not read.

    Args:
        column: its name.
        rows: the packed objects.
    """

    __slots__ = ("column", "rows")

    def __init__(self, column: str, rows: torch.Tensor) -> None:
        self.column, self.rows = column, rows

    def _refuse(self, *_: Any) -> NoReturn:
        raise TraceError(
            f"{with_text(model_line())} reads the column {self.column!r}, a list of Python objects "
            "whose sizes differ from sample to sample, while the model runs: a trace has no values "
            "of them. Objects may be read by the loss_function of a model of transformers', and "
            "behind the last call of the model by a loss that merak.eager_loss marks; else let the "
            "data_collator make tensors (torch.stack, or pad_sequence and a mask)."
        )

    __len__ = __iter__ = __getitem__ = __bool__ = __contains__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


def unread(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch with stand-ins for its columns of objects."""
    return {
        name: Unread(name, value)
        if isinstance(value, torch.Tensor) and value.dtype is OBJECTS
        else value
        for name, value in batch.items()
    }


def as_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch that `unread` was given."""
    return {n: v.rows if isinstance(v, Unread) else v for n, v in batch.items()}
