"""Forward of one microbatch through all stages, without randomness or gradients."""

from __future__ import annotations

from merak.engine.exchange import Exchange
from merak.engine.parts import Parts
from merak.engine.stage import Microbatch
from merak.engine.surroundings import Values
from merak.schedule.steps import Payload, Receive, Send


def evaluate_microbatch(
    parts: Parts, exchange: Exchange, number: int, microbatch: Microbatch
) -> Values:
    """Run this rank's stages of the first pipe on a microbatch.

    Args:
        parts: what the engine is made of.
        exchange: the values between stages.
        number: tells the microbatch from others under way.
        microbatch: with its derived values.

    Returns:
        The model's outputs by name that these stages make.
    """
    outputs: Values = {}
    for stage, rank in enumerate(parts.stage_rank):
        if rank == parts.mesh.pp_rank:
            outputs |= _run_stage(parts, exchange, stage, number, microbatch)
    return outputs


def _run_stage(
    parts: Parts, exchange: Exchange, stage: int, number: int, microbatch: Microbatch
) -> Values:
    here = parts.mesh.pp_rank
    program = microbatch.program
    own = program.stages[stage]
    received: Values = {}
    if stage > 0:
        source = Receive(Payload.ACTIVATION, stage - 1, number, parts.stage_rank[stage - 1])
        if source.peer != here:
            exchange.post(source, program)
        received = exchange.take(source, program)
    made = parts.stages[stage].evaluate(microbatch, received)
    if stage + 1 < len(parts.stage_rank):
        sent = {name: made[name] for name in own.sent}
        exchange.give(Payload.ACTIVATION, stage, number, sent)
        if (taker := parts.stage_rank[stage + 1]) != here:
            exchange.send(Send(Payload.ACTIVATION, stage, number, taker))
    return {name: made[value] for name, value in own.results.items()}
