"""Rollbacks to the last checkpoint of the run, after a step whose loss or gradient is not finite.

Weights, optimizer, learning rate schedule and loss scale are those of the checkpoint again; the
step's number and the data go on. So the batches that led to it are not met again, the number of a
step says which data it has had, and a job that is resumed later continues that data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from merak.arguments import MerakArguments
from merak.checkpoint.remote.fetching import remove_fetched
from merak.core.errors import TrainingError, WeightsError
from merak.core.rank0 import warn_on_rank0
from merak.trainer.checkpoints.resuming import checkpoint_to_resume, is_there

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Rollbacks:
    """The rollbacks of a run, and the checkpoints that it may roll back to."""

    num: int = field(default=0, init=False)
    """Rollbacks so far."""
    # Checkpoints of this run, oldest first, as it has written or read them.
    _checkpoints: list[str] = field(default_factory=list, init=False)

    def start(self) -> None:
        """Begin a run of training."""
        self.num = 0
        self._checkpoints.clear()

    def add(self, checkpoint: str) -> None:
        """Add a checkpoint of this run, newer than the others."""
        self._checkpoints.append(checkpoint)

    def roll_back(
        self, args: MerakArguments, step: int, found: str, load: Callable[[str], None]
    ) -> None:
        """Load the last checkpoint of the run; all ranks call it together.

        Args:
            args: what the job asks for: `max_rollbacks`.
            step: number of the step that is not finite, from 1.
            found: what it has, in words.
            load: loads a checkpoint's state.

        Raises:
            TrainingError: there is no such checkpoint, or there were too many rollbacks.
        """
        self.num += 1
        if self.num > args.max_rollbacks:
            raise TrainingError(
                f"step {step} has {found}, after {args.max_rollbacks} rollbacks; lower the "
                f"learning rate, look at the data, or raise max_rollbacks={args.max_rollbacks}."
            )
        found_valid = self._newest_valid(args)
        if found_valid is None:
            raise TrainingError(
                f"step {step} has {found}, and this run has no checkpoint yet to roll back to; "
                f"save earlier (save_steps={args.save_steps}), lower the learning rate, or look at "
                "the data."
            )
        checkpoint, folder = found_valid
        load(folder)
        if folder != checkpoint:
            remove_fetched(Path(folder))
        warn_on_rank0(
            logger,
            "step %d has %s; rolled back to %s (%d of at most %d times), and going on with the "
            "data after the step.",
            step,
            found,
            checkpoint,
            self.num,
            args.max_rollbacks,
        )

    def _newest_valid(self, args: MerakArguments) -> tuple[str, str] | None:
        """The newest checkpoint of the run that is still there and valid; collective.

        Returns:
            Its folder or URL, and its folder on this host.
        """
        allowed = args.allow_pickled_checkpoint
        for checkpoint in reversed(self._checkpoints):
            if not is_there(checkpoint):
                continue  # save_total_limit
            try:
                found = checkpoint_to_resume(
                    checkpoint, str(args.output_dir), allow_pickled=allowed
                )
            except WeightsError as problem:
                warn_on_rank0(logger, "%s", problem)
                continue
            assert found is not None
            return checkpoint, found
        return None
