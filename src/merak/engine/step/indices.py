"""Refuses batches with indices beyond the tables that they are looked up in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from merak.core.errors import DataError
from merak.core.tensor_meta import Signature
from merak.engine.state import EngineState
from merak.graph.program.index_ranges import out_of_range


def check_indices(
    state: EngineState,
    what: str,
    signatures: Sequence[Signature],
    batches: Sequence[Mapping[str, torch.Tensor]],
    training: bool,
) -> None:
    """Hold the indices of some microbatches against what they are looked up in.

    Args:
        state: of this rank's engine.
        what: is about to run, for people to read.
        signatures: of each microbatch.
        batches: its columns, as far as this rank reads them.
        training: whether the model is about to train on them.

    Raises:
        DataError: an index is out of range.
    """
    for signature, batch in zip(signatures, batches, strict=True):
        problem = out_of_range(state.program_for(signature, training).ranges, batch)
        if problem is not None:
            raise DataError(f"in {what}, {problem}")
