"""Reports of this rank's engine to the job's watchdog: its action, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from merak.core.errors import ArgumentsError
from merak.core.health import watchdog
from merak.core.health.status import Report, named
from merak.core.mesh import Mesh
from merak.engine.health.status import Progress, RankStatus
from merak.schedule.ir import Kind

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
}


def check_limit(limit_s: float) -> None:
    """Refuse a time limit that is not positive.

    Raises:
        ArgumentsError: it is not above 0.
    """
    if not limit_s > 0:
        raise ArgumentsError(
            f"hang_limit_s={limit_s} is not a time to wait; use a number of seconds above 0."
        )


def set_limit(limit_s: float) -> None:
    """Set the time limit of the job's watchdog.

    Args:
        limit_s: seconds that a rank may wait, or be in one action.
    """
    watching = watchdog.current()
    if watching is not None:
        watching.limit = watchdog.Limit("hang_limit_s", limit_s)


def watch(progress: Progress, mesh: Mesh) -> Callable[[], None]:
    """Register an engine with the job's watchdog.

    Args:
        progress: of the engine.
        mesh: the grid of ranks.

    Returns:
        A function that ends it.
    """
    watching = watchdog.current()
    if watching is None:
        return lambda: None
    reporter = EngineReporter(progress, mesh)
    watching.add(reporter)
    return partial(watching.remove, reporter)


class EngineReporter:
    """Reports the status of one rank's engine, its device's before its host's.

    Args:
        progress: of the engine.
        mesh: the grid of ranks.
    """

    def __init__(self, progress: Progress, mesh: Mesh) -> None:
        self._progress = progress
        self._mesh = mesh
        self._device: tuple[RankStatus | None, float] = (None, 0.0)

    def __call__(self) -> Report | None:
        """The engine's report; None where it has no work and waits for nobody."""
        now = time.perf_counter()
        behind = self._progress.device_status()
        if behind is not self._device[0]:
            self._device = (behind, now)
        own = self._progress.status
        if behind is not None:
            own = behind._replace(since_s=self._device[1])
        if not own.is_busy:
            return None
        for_s = now - own.since_s
        return Report(self._described(own, for_s), _waited(own, for_s), for_s, True, False)

    def _described(self, status: RankStatus, for_s: float) -> str:
        text = describe(status, for_s)
        if status.action is not None and status.wait is None and self._mesh.tp > 1:
            text += f", unless for its tensor parallel peers, {named(self._mesh.peers('tp'))}"
        return text


def describe(status: RankStatus, for_s: float) -> str:
    """The status of a rank's engine, as the rest of a sentence that begins with the rank.

    Args:
        status: of the rank.
        for_s: for how long, s.
    """
    action = status.action
    place = f"stands in {status.phase}" if status.phase else "stands between steps"
    if action is not None:
        place = (
            f"stands at {action} (stage {action.stage}, {_NAMES[action.kind]}, microbatch "
            f"{action.microbatch}) of {status.phase}"
        )
    return f"{place} and {_waited(status, for_s)}"


def _waited(status: RankStatus, for_s: float) -> str:
    if status.wait is None:
        work = "computed" if status.action is not None else "worked"
        return f"has {work} for {for_s:.1f} s, without a wait of its own"
    what, peers = status.wait
    return f"has waited {for_s:.1f} s for {what} {named(peers)}"
