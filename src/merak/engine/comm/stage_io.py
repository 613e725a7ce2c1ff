"""Activations and gradients between neighbouring stages, of one rank or of several."""

from __future__ import annotations

from merak.core.mesh import Mesh
from merak.engine.comm.p2p import Transfers
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.schedule.steps import Payload, Receive, Send


class StageIO:
    """The tensors that this rank's stages give to other stages and take from them.

    Args:
        transfers: the point-to-point traffic between pp ranks.
        mesh: the grid of ranks.
    """

    def __init__(self, transfers: Transfers, mesh: Mesh) -> None:
        self._transfers = transfers
        self._mesh = mesh
        # By payload, producing stage and microbatch: tensors for a stage here, or for a send to
        # come.
        self._made: dict[tuple[Payload, int, int], TensorDict] = {}

    def give(self, payload: Payload, stage: int, number: int, values: TensorDict) -> None:
        """Store the values that a stage of this rank has computed of a microbatch."""
        self._made[payload, stage, number] = values

    def send(self, task: Send) -> None:
        """Start to send the values that a stage of this rank has computed."""
        values = self._made.pop((task.payload, task.stage, task.microbatch))
        self._transfers.send(task, list(values.values()))

    def post(self, task: Receive, program: Program) -> None:
        """Post the receive of another rank's values, without waiting for it."""
        names = _names(program, task.payload, task.stage)
        self._transfers.post(task, [program.values[name] for name in names])

    def take(self, source: Receive, program: Program) -> TensorDict:
        """The values that a stage has computed; waits for them.

        Args:
            source: the transfer; `peer` is the rank of the stage that computed it, perhaps this
                one.
            program: of the microbatch.
        """
        if source.peer == self._mesh.pp_rank:
            return self._made.pop((source.payload, source.stage, source.microbatch))
        tensors = self._transfers.take(source)
        names = _names(program, source.payload, source.stage)
        return dict(zip(names, tensors, strict=True))

    def discard(self, source: Receive, program: Program) -> None:
        """Receive and drop the values that a stage has computed, if they were not taken."""
        if source.peer == self._mesh.pp_rank:
            self._made.pop((source.payload, source.stage, source.microbatch), None)
        elif self._transfers.is_posted(source):
            self._transfers.take(source)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        self._transfers.finish()

    def forget(self) -> None:
        """Free the tensors of a step that failed."""
        self._made.clear()
        self._transfers.forget()


def _names(program: Program, payload: Payload, producer: int) -> tuple[str, ...]:
    """Names of the values that a stage of another rank sends to this rank's neighbouring stage."""
    if payload is Payload.ACTIVATION:
        return program.stages[producer + 1].received
    return program.gradients_of(program.stages[producer - 1].sent)
