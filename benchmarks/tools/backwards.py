"""Which backwards of a job are graphs, and a job of which none is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from merak.graph.joint.segment import joint_obstacle


@contextmanager
def autograd_alone() -> Iterator[None]:
    """Context in which no backward of a new job is made a graph."""
    with mock.patch("merak.graph.program.program.joint_segment", lambda *_: None):
        yield


def obstacles(engine: Any) -> Counter[str]:
    """Why autograd runs how many backwards of a rank ("" where it does not)."""
    found: Counter[str] = Counter()
    for stage in engine._state.base.stages.values():
        for program in stage.segments:
            if program.trains:
                joint = program.joint
                graph = program.segment.graph
                why = joint.obstacle if joint else joint_obstacle(graph) or "the job's options"
                found[why] += 1
    return found


def told(engine: Any) -> str:
    """In a few words."""
    found = obstacles(engine)
    others = "".join(f"; {count}: {why}" for why, count in found.items() if why)
    return f"{found['']} of {found.total()} graphs{others}"[:300]
