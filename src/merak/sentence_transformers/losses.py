"""sentence-transformers' losses as one graph, also those that compute gradients by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns


@contextmanager
def as_one_graph(*, merges_columns: bool) -> Iterator[None]:
    """Context in which losses are functions of the model alone, as a trace takes them.

    A cached loss then has the whole batch's embeddings at once: whatever it computes of
    mini-batches, its value and its gradients are those.

    Args:
        merges_columns: whether all columns of a batch go through the model together, padded to one
            length, where sentence-transformers lets the first one go alone. Layers in stages of a
            pipeline are then called once.
    """
    with ExitStack() as stack:
        if merges_columns:
            # Of the function, since every loss has it by a name of its own.
            stack.enter_context(mock.patch.object(embed_columns, "__defaults__", (False,)))
        stack.enter_context(mock.patch.object(CachedLossMixin, "forward_cached", _forward_at_once))
        yield


def _forward_at_once(loss: Any, sentence_features: Any, labels: Any) -> Any:
    embeddings = embed_columns(loss.model, sentence_features)
    return loss.calculate_loss([[each] for each in embeddings], labels)
