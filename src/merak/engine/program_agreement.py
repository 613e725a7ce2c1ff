"""Agreement of the ranks on what they run: equal programs, partition and schedule.

Every rank derives its own program from the traced graph. The collectives inside meet by their order
alone, so that ranks with different programs would add up tensors that do not belong together, and
train on in silence.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from merak.core.errors import PlanError
from merak.core.mesh import Mesh
from merak.core.rank0 import has_peers
from merak.graph.ir.ir import Segment
from merak.graph.ir.replicas import does_meet, meets_replicas
from merak.graph.program.program import Program, SegmentProgram
from merak.graph.weights.rank_agreement import gather_objects
from merak.plan.layout import Layout

_OF_THIS_PROCESS = re.compile(r"(?<=index=)\d+|(?<=cuda:)\d+|\b0x[0-9a-f]+")
"""What may differ in the text of equal graphs: numbers of devices, and addresses of objects."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of what a rank runs.

    Args:
        job: of what all ranks share: the partition, the schedule and its pipes.
        segments: of the rewritten segments of the rank's stages, by segment index.
        traced: of all segments as they were traced, with the loss, which every rank has.
        replica: which one this is, where each replica's graph knows which rows are its own; else 0.
    """

    job: str
    segments: Mapping[int, str]
    traced: tuple[str, ...] = ()
    replica: int = 0


def check_programs(program: Program, layout: Layout, mesh: Mesh) -> None:
    """Check that ranks which hold the same segments run the same operators; a collective.

    Args:
        program: this rank's, of an ordinary microbatch.
        layout: the partition and the schedule.
        mesh: the grid of ranks.

    Raises:
        PlanError: two ranks differ; on all ranks.
    """
    if has_peers(mesh):
        own = digests_of(program, layout, mesh.dp_rank)
        check_digests(gather_objects(own, "the programs of"))


def digests_of(program: Program, layout: Layout, replica: int) -> Digests:
    """Digests of a rank's program and of its job's layout.

    Where a graph meets the other replicas, it is compared inside one replica alone; all replicas
    still have the same segments, of the same parameters, and operators that meet in turn.
    """
    schedule = layout.schedule
    pipes = (schedule.name, schedule.pipes, schedule.microbatch_pipes)
    job = _digest((repr(layout.partition), repr(pipes)))
    own = [segment for stage in program.stages.values() for segment in stage.segments]
    traced = tuple(_digest((_text(one.graph),)) for one in layout.graph.segments)
    segments = {p.segment.index: _digest(_described(p)) for p in own}
    if not meets_replicas(layout.graph):
        return Digests(job, segments, traced)
    return Digests(
        _digest((job, *map(_meetings, layout.graph.segments))), segments, traced, replica
    )


def _meetings(segment: Segment) -> str:
    """What of a segment has to be the same on all replicas."""
    nodes = [node for node in segment.graph.nodes if does_meet(node)]
    met = [
        (str(n.target), [a for a in n.args if isinstance(a, (int, str))], str(n.meta["tensor"]))
        for n in nodes
    ]
    return repr((segment.parameters, segment.outputs, met))


def check_digests(by_rank: Sequence[Digests]) -> None:
    """Check that digests of the same things are equal.

    Args:
        by_rank: of every rank, in rank order.

    Raises:
        PlanError: some are not.
    """
    first: dict[tuple[int, int], tuple[int, str]] = {}
    for rank, found in enumerate(by_rank):
        one = next(n for n, known in enumerate(by_rank) if known.replica == found.replica)
        for index, (mine, others) in enumerate(zip(by_rank[one].traced, found.traced)):
            if mine != others:
                raise PlanError(
                    f"Ranks {one} and {rank} have traced different models: segment {index} "
                    "differs, such as by a dropout, another number of the config, or the loss; "
                    "build the same model with the same loss on every rank (a loss that is told "
                    "its rank and the number of ranks takes mesh.dp_rank and mesh.dp)."
                )
        if found.job != by_rank[0].job:
            raise _error(0, rank, "planned different stages or schedules")
        for index, digest in found.segments.items():
            other, expected = first.setdefault((found.replica, index), (rank, digest))
            if digest != expected:
                raise _error(other, rank, f"derived different programs for segment {index}")


def _described(program: SegmentProgram) -> Iterable[str]:
    """What decides the collectives of a segment, and when its operators run."""
    yield _text(program.segment.graph)
    kept = () if program.joint is None else program.joint.kept
    yield repr((program.saved, program.trains, kept, program.offload is None))


def _text(graph: object) -> str:
    return _OF_THIS_PROCESS.sub("", str(graph))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _error(one: int, other: int, what: str) -> PlanError:
    return PlanError(
        f"Ranks {one} and {other} have {what}, so that their collectives would not match; give "
        "all ranks the same script, environment and versions (`merak doctor` compares hosts). If "
        "they have them, this is a mistake of Merak's: please report it."
    )
