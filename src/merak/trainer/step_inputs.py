"""The inputs of one training step, as transformers' loop gives them: one microbatch a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from merak.core.errors import DataError, TrainingError
from merak.core.tensor_meta import TensorMeta, known_masks
from merak.data import BatchSignature, signature
from merak.trainer.batch_exchange import Batch, ExchangedBatches


class StepInputs(list[Any]):
    """A step's microbatches for transformers' loop, and their inputs, which run together.

    Args:
        batches: this rank's columns of each microbatch, which the loop takes one by one.
        exchanged: the same microbatches as all ranks see them.
    """

    def __init__(self, batches: Sequence[Batch], exchanged: ExchangedBatches) -> None:
        super().__init__(batches)
        self.exchanged = exchanged
        self.num_given = 0  # also where a subclass makes a list of its own of them
        self.microbatches: list[Batch] = []
        self._expected = [signature(batch) for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        """Give the loop the microbatches one by one."""
        for number, batch in enumerate(super().__iter__()):
            self.num_given = number + 1
            yield batch

    def add(self, trainer: type, inputs: Mapping[str, Any]) -> bool:
        """Take the inputs of the next microbatch.

        Args:
            trainer: the class that gives them, which may have changed them before.
            inputs: this rank's columns.

        Returns:
            Whether they are the step's last ones.

        Raises:
            DataError: they have other columns, shapes or types than the ranks have exchanged.
            TrainingError: the inputs of this microbatch have been taken already.
        """
        if len(self.microbatches) == (self.num_given or len(self)):
            raise TrainingError(
                f"training_step of {trainer.__name__} calls super().training_step more than once "
                "for a microbatch, but the stages run all microbatches of a step together, after "
                "the last call; take both losses in compute_loss, which may call the model several "
                "times and take gradients with torch.autograd.grad."
            )
        expected = self._expected[len(self.microbatches)]
        _refuse_other_columns(trainer, expected, signature(inputs))
        self.microbatches.append(inputs)
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the inputs of all microbatches have been taken."""
        return len(self.microbatches) == len(self._expected)

    @property
    def metadata(self) -> tuple[dict[str, Any], ...]:
        """Per replica, the metadata of the microbatch that was added last."""
        return self.exchanged.metadata[len(self.microbatches) - 1]


def _refuse_other_columns(trainer: type, expected: BatchSignature, found: BatchSignature) -> None:
    before, after = dict(known_masks(expected.columns)), dict(known_masks(found.columns))
    if before == after:
        return
    name = min(n for n in {**before, **after} if before.get(n) != after.get(n))
    raise DataError(
        f"{trainer.__name__} changes column {name!r} of a batch from {_described(before, name)} to "
        f"{_described(after, name)} in training_step or _prepare_inputs, when all ranks have "
        "prepared for its shape; change names, shapes and types in the data_collator, and only "
        "values there."
    )


def _described(columns: Mapping[str, TensorMeta], name: str) -> str:
    found = columns.get(name)
    return "none" if found is None else f"{found.shape} {found.dtype}"
