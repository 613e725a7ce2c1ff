"""Evaluation by generation (`predict_with_generate`): ranks share out the batches.

Transformers' own step runs on each: every rank has a copy of the whole model while the evaluation
lasts, or, where there is no room for copies, ranks of a pipeline run it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch.utils.data import DataLoader
from transformers import Trainer

from merak.core.health.status import phase
from merak.core.mesh import Mesh, current_mesh
from merak.engine import Engine
from merak.engine.inference.callable_model import callable_model, has_room_for_copies
from merak.graph.weights.rank_agreement import gather_objects
from merak.trainer.evaluation import seen_by_accelerate

Results = tuple[Any, Any, Any]
"""Loss, logits or tokens, and labels of a batch."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of ranks, each of which runs batches of its own.

    Args:
        number: how many there are.
        own: the index of this rank's; the first rank of each line is the one of its index.
        step_together: whether all run as many batches, since they gather parts of parameters.
    """

    number: int
    own: int
    step_together: bool = False


@contextmanager
def with_whole_model(
    trainer: Trainer, engine: Engine | None, device: torch.device
) -> Iterator[Lines]:
    """Context in which the trainer's model can be called as the whole one; collective.

    Args:
        trainer: about to evaluate.
        engine: that trains the model; None where none does yet.
        device: of this rank.

    Yields:
        The ranks that run the same batches.
    """
    model, wrapped = trainer.model, trainer.model_wrapped
    mesh = current_mesh()
    assert model is not None
    with ExitStack() as stack:
        lines = Lines(mesh.world_size, mesh.rank)
        if engine is None:
            trainer.model = model.to(device)
        elif has_room_for_copies(model, engine):
            trainer.model = engine.whole_copy()
        else:
            trainer.model = stack.enter_context(callable_model(model))
            number = mesh.world_size // mesh.pp
            lines = Lines(number, mesh.rank % number, step_together=True)
        trainer.model_wrapped = trainer.model
        if vars(model).get("generation_config") is not None:  # which the loop notes something in
            trainer.model.generation_config = model.generation_config
        try:
            yield lines
        finally:
            trainer.model, trainer.model_wrapped = model, wrapped


class GeneratedBatches:
    """A loader of a single process that has every rank's results of its batches.

    Args:
        loader: the loader of a single process, the same on every rank.
        mesh: the grid of ranks.
        lines: of ranks; each evaluates every n-th batch, n being their number.
        autocast: the type of the model's autocast; None for its own precision.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        mesh: Mesh,
        lines: Lines,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._loader = loader
        self._mesh = mesh
        self._lines = lines
        self._autocast = autocast
        self._current: Any = None
        self._round: list[Any] = []  # a batch for each line, in order
        self._results: list[Results] = []  # of those batches of the round that are still to come

    def __len__(self) -> int:
        """The number of batches of a single process."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The batches, in the order of one process; `result` has the results of each."""
        batches, number = iter(self._loader), self._lines.number
        following = list(islice(batches, number))
        while following:
            self._round, self._results = following, []
            following = list(islice(batches, number))
            for number, batch in enumerate(self._round, 1):
                self._current = batch
                is_last = not following and number == len(self._round)
                with seen_by_accelerate(self._loader, is_last):
                    yield batch

    def result(self, inputs: object, evaluate: Callable[[Any], Results]) -> Results:
        """Results of the loop's current batch; all ranks call it together.

        Args:
            inputs: of the batch. Where they are others than the loop has, as a subclass may make
                them, every rank evaluates them itself.
            evaluate: evaluates a batch on this rank.
        """
        if inputs is not self._current:
            return self._evaluated(evaluate, inputs)
        if not self._results:
            line, own = self._lines.own, None
            if self._lines.step_together:
                line = min(line, len(self._round) - 1)
            if line < len(self._round):
                with phase("generating"):
                    own = self._evaluated(evaluate, self._round[line])
            is_first = self._mesh.rank == self._lines.own
            self._results = gather_objects(own if is_first else None, "what they generate on")
        number = next(n for n, batch in enumerate(self._round) if batch is inputs)
        return self._results[number]

    def _evaluated(self, evaluate: Callable[[Any], Results], batch: object) -> Results:
        """Results of a batch on this rank, on the CPU."""
        enabled = self._autocast is not None
        with torch.autocast(self._mesh.device.type, self._autocast, enabled=enabled):
            found: Results = send_to_device(evaluate(batch), torch.device("cpu"))
        return found
