"""Values that neighbouring stages give each other: on one rank by hand, else through transfers."""

from __future__ import annotations

from merak.core.mesh import Mesh
from merak.engine.comm.p2p import Transfers
from merak.engine.tensors_by_name import TensorDict
from merak.graph.program.program import Program
from merak.schedule.steps import Payload, Receive, Send


class StageIO:
    """What this rank's stages give to other stages and take from them.

    Args:
        transfers: the traffic between pipeline positions.
        mesh: the grid of ranks.
    """

    def __init__(self, transfers: Transfers, mesh: Mesh) -> None:
        self._transfers = transfers
        self._mesh = mesh
        # By payload, producing stage and microbatch: what a stage here, or a send to come, takes.
        self._made: dict[tuple[Payload, int, int], TensorDict] = {}

    def give(self, payload: Payload, stage: int, number: int, values: TensorDict) -> None:
        """Lay down what a stage of this rank has made of a microbatch."""
        self._made[payload, stage, number] = values

    def send(self, task: Send) -> None:
        """Start to send what a stage of this rank has laid down."""
        values = self._made.pop((task.payload, task.stage, task.microbatch))
        self._transfers.send(task, list(values.values()))

    def post(self, task: Receive, program: Program) -> None:
        """Make room for what another rank will send, without waiting for it."""
        names = _names(program, task.payload, task.stage)
        self._transfers.post(task, [program.values[name] for name in names], self._mesh.device)

    def take(self, source: Receive, program: Program) -> TensorDict:
        """What a stage has made, as soon as it is there.

        Args:
            source: what it is; `peer` is the rank of the stage that made it, perhaps this one.
            program: of the microbatch.
        """
        if source.peer == self._mesh.pp_rank:
            return self._made.pop((source.payload, source.stage, source.microbatch))
        tensors = self._transfers.take(source)
        names = _names(program, source.payload, source.stage)
        return dict(zip(names, tensors, strict=True))

    def discard(self, source: Receive, program: Program) -> None:
        """Let what a stage has made arrive, if it has not been taken, and forget it."""
        if source.peer == self._mesh.pp_rank:
            self._made.pop((source.payload, source.stage, source.microbatch), None)
        elif self._transfers.is_posted(source):
            self._transfers.take(source)

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._transfers.finish()

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._made.clear()
        self._transfers.forget()


def _names(program: Program, payload: Payload, producer: int) -> tuple[str, ...]:
    """The values that a stage of another rank sends to this rank's neighbouring stage."""
    if payload is Payload.ACTIVATION:
        return program.stages[producer + 1].received
    return program.gradients_of(program.stages[producer - 1].sent)
