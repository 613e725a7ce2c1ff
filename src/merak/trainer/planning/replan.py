"""A training that goes on in another layout, behind a checkpoint."""

from __future__ import annotations

from typing import Any

from merak.core.announce import announce
from merak.engine.planning.replan import with_partition
from merak.graph.weights.gather_weights import make_whole
from merak.plan.price.candidate import Candidate
from merak.trainer.planning.plan import set_plan


class LayoutChange(BaseException):
    """Ends a training behind a checkpoint, from which it goes on in another layout.

    Args:
        layout: to go on in.
        checkpoint: folder of the checkpoint.
    """

    def __init__(self, layout: Candidate, checkpoint: str) -> None:
        super().__init__(with_partition(layout))
        self.layout = layout
        self.checkpoint = checkpoint


def move(trainer: Any, change: LayoutChange) -> None:
    """Lay the ranks of a training out anew; a collective.

    Args:
        trainer: a `MerakTrainer` whose training has ended with the change.
        change: the layout.
    """
    announce("plan: goes on from %s in %s", change.checkpoint, change)
    make_whole(trainer.model)
    set_plan(trainer.args, change.layout)
    trainer.forget_layout()
