"""A training whose first steps are compared with its plan, and which goes on in a faster layout."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from torch import nn

from merak.core.announce import announce
from merak.engine.planning.replan import FIRST_STEPS, Replanner
from merak.graph.weights.gather_weights import make_whole
from merak.graph.weights.laid_out import like
from merak.plan.price.candidate import Candidate
from merak.plan.search.explain import describe
from merak.trainer.planning.plan import set_plan


class LayoutChange(BaseException):
    """Ends a training behind a checkpoint, from which it goes on in another layout.

    Args:
        layout: to go on in.
        checkpoint: folder of the checkpoint.
    """

    def __init__(self, layout: Candidate, checkpoint: str) -> None:
        super().__init__(describe(layout))
        self.layout = layout
        self.checkpoint = checkpoint


class PlanWatch:
    """Compares a training with its plan once it has run some steps in a layout.

    Args:
        replanner: compares them.
        model: of the job, before an engine lays it out.
    """

    def __init__(self, replanner: Replanner, model: nn.Module) -> None:
        self._replanner: Replanner | None = replanner
        self._start = 0
        self.layout: Candidate | None = None
        """The layout to go on in behind the next checkpoint; None to stay."""
        with suppress(Exception):  # the plan may trace it again, and it is laid out by then
            replanner.job.workload.source.model = without_weights(model)
            return
        self._replanner = None

    def start(self, step: int) -> None:
        """Begin with a layout behind so many steps of the training."""
        self._start, self.layout = step, None

    def compare(self, trainer: Any) -> None:
        """Compare the steps with the plan if enough have run; all ranks call it together.

        Args:
            trainer: a `MerakTrainer` that has ended a step.
        """
        replanner, step = self._replanner, trainer.state.global_step
        if replanner is None or step < self._start + FIRST_STEPS:
            return
        self.layout = replanner.faster(trainer.mesh, trainer.engine)
        if self.layout is None:
            self._replanner = None  # with the graphs of the plan
        else:
            replanner.plan = self.layout
            self._start = trainer.state.max_steps  # nothing more until it has moved


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have shapes and no values.

    Args:
        model: that is not laid out.
    """
    new: dict[int, Any] = {
        id(own): like(own, own.detach().to("meta")) for own in model.parameters()
    }
    return copy.deepcopy(model, new)


def move(trainer: Any, change: LayoutChange) -> None:
    """Lay the ranks of a training out anew; a collective.

    Args:
        trainer: a `MerakTrainer` whose training has ended with the change.
        change: the layout.
    """
    announce("plan: goes on from %s in %s", change.checkpoint, describe(change.layout))
    make_whole(trainer.model)
    set_plan(trainer.args, change.layout)
    trainer.forget_layout()
