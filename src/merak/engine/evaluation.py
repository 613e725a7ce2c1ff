"""Forward of one microbatch through all stages, without randomness or gradients."""

from __future__ import annotations

from collections.abc import Sequence

from merak.engine.comm.stage_io import StageIO
from merak.engine.stage import Microbatch
from merak.engine.state import EngineState
from merak.engine.tensors_by_name import TensorDict
from merak.engine.zero.unshard_order import unshards_of
from merak.graph.program.program import Program
from merak.schedule.ir import Kind
from merak.schedule.steps import Payload, Receive, Send


def evaluate_microbatch(
    state: EngineState, exchange: StageIO, number: int, microbatch: Microbatch
) -> TensorDict:
    """Run this rank's stages of the first pipe on a microbatch.

    Args:
        state: what the engine is made of.
        exchange: the values between stages.
        number: tells the microbatch from others under way.
        microbatch: with its batch-only values.

    Returns:
        The model's outputs by name that these stages make.
    """
    outputs: TensorDict = {}
    for stage, rank in enumerate(state.stage_rank):
        if rank == state.mesh.pp_rank:
            outputs |= _run_stage(state, exchange, stage, number, microbatch)
    return outputs


def start_gathers(
    state: EngineState, programs: Sequence[Program], most: int
) -> list[tuple[str, ...]]:
    """Say in which order an evaluation gathers the parameters that replicas hold in shards.

    Args:
        state: of an engine with zero=3.
        programs: of this replica's microbatches, in order.
        most: the most microbatches that a replica has.

    Returns:
        The parameters of microbatches that only other replicas have, who need this one's shards.
    """
    assert state.fsdp is not None
    # Of what others have alone, all is known that matters: they are microbatches as well.
    some = programs[-1] if programs else state.base
    each = [
        [
            turn
            for _, stage in sorted(program.stages.items())
            for turn in unshards_of(Kind.FORWARD, stage, False)
        ]
        for program in [*programs, *(some for _ in range(most - len(programs)))]
    ]
    state.fsdp.start(turn for turns in each for turn in turns)
    return [names for turns in each[len(programs) :] for names, _ in turns]


def _run_stage(
    state: EngineState, exchange: StageIO, stage: int, number: int, microbatch: Microbatch
) -> TensorDict:
    here = state.mesh.pp_rank
    program = microbatch.program
    own = program.stages[stage]
    received: TensorDict = {}
    if stage > 0:
        source = Receive(Payload.ACTIVATION, stage - 1, number, state.stage_rank[stage - 1])
        if source.peer != here:
            exchange.post(source, program)
        received = exchange.take(source, program)
    made = state.stages[stage].evaluate(microbatch, received)
    if stage + 1 < len(state.stage_rank):
        sent = {name: made[name] for name in own.sent}
        exchange.give(Payload.ACTIVATION, stage, number, sent)
        if (taker := state.stage_rank[stage + 1]) != here:
            exchange.send(Send(Payload.ACTIVATION, stage, number, taker))
    return {name: made[value] for name, value in own.results.items()}
