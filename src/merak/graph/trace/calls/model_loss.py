"""Python objects among a model's inputs, such as the boxes of each image, in the model's own loss.

A trace has no values of them. What stands for such a column goes through the model's forward to the
`loss_function` that models of transformers have, and that is one opaque operator: it runs on the
last stage, on the real objects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from merak.core.tensor_meta import TensorMeta
from merak.data.objects import OBJECTS, unpacked
from merak.graph.trace.calls.eager_loss import NoWeights, among_replicas
from merak.graph.trace.calls.unread import Unread
from merak.graph.trace.opaque.pytree import PLAIN
from merak.graph.trace.state.rank_reads import RankReads


@dataclass(frozen=True, slots=True)
class _Constant:
    """Stands for an argument that is neither a tensor nor plain, such as a config."""

    number: int


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    model: nn.Module
    unwatched: Callable[[], AbstractContextManager[None]]
    constants: list[Any] = field(default_factory=list)


_PARTS: WeakKeyDictionary[ModelLoss, _Parts] = WeakKeyDictionary()
"""Models and constants of such losses: apart from these, whose attributes are Python state."""


class ModelLoss(nn.Module):
    """The `loss_function` of a model that is given objects, an opaque module of the graph.

    Args:
        model: whose it is.
        unwatched: makes a context in which a trace does not record what code reads.
    """

    def __init__(
        self, model: nn.Module, unwatched: Callable[[], AbstractContextManager[None]]
    ) -> None:
        super().__init__()
        self.train(model.training)
        _PARTS[self] = _Parts(model, unwatched)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        columns: Mapping[str, TensorMeta],
        unwatched: Callable[[], AbstractContextManager[None]],
    ) -> ModelLoss | None:
        """That of a model, where columns of its batch are objects; else None."""
        has_objects = any(meta.dtype is OBJECTS for meta in columns.values())
        return cls(model, unwatched) if has_objects else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, the first argument, on the others, with objects in place of rows."""
        parts = _PARTS[self]
        device = next(one.device for one in tree_leaves(args) if isinstance(one, torch.Tensor))

        def given(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dtype is OBJECTS:
                return unpacked(leaf)
            if isinstance(leaf, _Constant):
                return parts.constants[leaf.number]
            return device if isinstance(leaf, torch.device) else leaf

        (function, *rest), named = tree_map(given, (args, kwargs))
        ranks = RankReads(training=self.training)
        kept = NoWeights(parts.model)
        with parts.unwatched(), kept, among_replicas(parts.model, None, ranks):
            return function(*rest, **named)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which it is what models call with objects, on this thread."""
        own: Any = PreTrainedModel.loss_function
        thread = threading.get_ident()

        def found(module: PreTrainedModel) -> Any:
            function = own.fget(module)
            is_traced = threading.get_ident() == thread
            return partial(self._called, function) if is_traced else function

        with mock.patch.object(PreTrainedModel, "loss_function", property(found, own.fset)):
            yield

    def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, Unread) for leaf in tree_leaves((args, kwargs))):
            return function(*args, **kwargs)
        constants = _PARTS[self].constants

        def passed(leaf: Any) -> Any:
            if isinstance(leaf, Unread):
                return leaf.rows
            if isinstance(leaf, (torch.Tensor, *PLAIN)):
                return leaf
            constants.append(leaf)
            return _Constant(len(constants) - 1)

        args, kwargs = tree_map(passed, ((function, *args), kwargs))
        return self.forward(*args, **kwargs)
