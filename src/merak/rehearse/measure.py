"""Measured steps of one rank: seconds of its actions and its update, and its peak of memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes

from merak.core.storages import Storages
from merak.data import signature
from merak.engine import Engine
from merak.engine.health.step_records import Clock, Mark, clock_of
from merak.parallel import ParallelModel
from merak.rehearse.fake_group import Call, Traffic
from merak.schedule.ir import Kind

Place = tuple[Kind, int]
"""A kind of action, and its stage."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of some steps of one rank.

    Args:
        action_s: median seconds of this rank's actions, by kind and stage.
        actions: number of these actions in a step.
        optimizer_s: median seconds of the optimizer's step.
        step_s: median seconds of a whole step of this rank, which waits for nobody.
        peak_bytes: most bytes that were alive in a step.
        calls: collectives and transfers of one step.
    """

    action_s: Mapping[Place, float]
    actions: Mapping[Place, int]
    optimizer_s: float
    step_s: float
    peak_bytes: int
    calls: tuple[Call, ...]


def measure_steps(
    model: ParallelModel,
    batch: Mapping[str, torch.Tensor],
    traffic: Traffic,
    steps: int,
    before_bytes: int,
    constants: Sequence[torch.Tensor] = (),
) -> Measured:
    """Run steps to warm up, for the memory and for the traffic, and time some more.

    Args:
        model: this rank's, on a mesh without peers.
        batch: of one step of a replica, in host memory.
        traffic: records the calls of the rank.
        steps: that are timed.
        before_bytes: what the device's memory held before the model was built.
        constants: of the traced model, which the rank holds beside its buffers.
    """
    device = model.engine.mesh.device
    traffic.running = lambda: model.engine.progress.status.action
    model.step(batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        model.step(batch)
        torch.cuda.synchronize(device)
        peak_bytes = int(torch.cuda.max_memory_allocated(device)) - before_bytes
    else:
        peak_bytes = _peak_on_host(model, batch, [*_static(model), *constants])
    traffic.calls.clear()
    model.step(batch)
    calls = tuple(traffic.calls)
    watch = _Watch(clock_of(device))
    with watch.optimizer(model):
        for _ in range(steps):
            watch.step(model, batch)
    seconds, counts = _actions(model.engine, steps)
    optimizer_s = watch.median(watch.updates)
    return Measured(seconds, counts, optimizer_s, watch.median(watch.steps), peak_bytes, calls)


@dataclass(slots=True)
class _Watch:
    """Marks of the starts and ends of steps, and of the optimizer's steps inside them."""

    clock: Clock
    steps: list[tuple[Mark, Mark]] = field(default_factory=list)
    updates: list[tuple[Mark, Mark]] = field(default_factory=list)
    _begun: list[Mark] = field(default_factory=list)

    def step(self, model: ParallelModel, batch: Mapping[str, torch.Tensor]) -> None:
        start = self.clock.mark()
        model.step(batch)
        self.steps.append((start, self.clock.mark()))

    @contextmanager
    def optimizer(self, model: ParallelModel) -> Iterator[None]:
        """Context in which the start and the end of every update are noted."""
        if model.optimizer is None:
            yield
            return
        before = model.optimizer.register_step_pre_hook(lambda *_: self._begin())
        after = model.optimizer.register_step_post_hook(lambda *_: self._end())
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _begin(self) -> None:
        self._begun.append(self.clock.mark())

    def _end(self) -> None:
        self.updates.append((self._begun.pop(), self.clock.mark()))

    def median(self, marks: list[tuple[Mark, Mark]]) -> float:
        """Median seconds; of several updates in a step, times their number."""
        if not marks:
            return 0.0
        moments = self.clock.seconds([mark for pair in marks for mark in pair])
        times = [end - start for start, end in zip(moments[::2], moments[1::2], strict=True)]
        return statistics.median(times) * len(marks) / len(self.steps)


def _actions(engine: Engine, steps: int) -> tuple[dict[Place, float], dict[Place, int]]:
    """Median seconds of the actions of the last steps, and their number in a step."""
    found: dict[Place, list[float]] = defaultdict(list)
    recorded = engine.progress.records.own()[-steps:]
    for step in recorded:
        for action, start, end in step.records:
            found[action.kind, action.stage].append(end - start)
    return (
        {place: statistics.median(times) for place, times in found.items()},
        {place: len(times) // len(recorded) for place, times in found.items()},
    )


def _peak_on_host(
    model: ParallelModel, batch: Mapping[str, torch.Tensor], held: Sequence[torch.Tensor]
) -> int:
    """Most bytes of storages that are alive in a step on the CPU.

    Columns of the batch count as far as this rank reads them, as on a device of its own.
    """
    static = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    with Storages(held) as storages, _host_memory_left_out(model.engine, storages):
        model.step({name: column.clone() for name, column in batch.items()})
    read = model.engine.columns(signature(_first(model, batch)).columns)
    unread = sum(column.nbytes for name, column in batch.items() if name not in read)
    return int(sum(static.values()) + storages.peak_bytes - unread)


def _first(model: ParallelModel, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first microbatch of a batch."""
    count = model.num_microbatches
    return {n: c.chunk(count)[0] if c.ndim else c for n, c in batch.items()}


def _static(model: ParallelModel) -> list[torch.Tensor]:
    """The tensors that a rank's device holds between steps."""
    params = model.engine.optimizer_params
    state = [] if model.optimizer is None else list(model.optimizer.state.values())
    held = [*model.engine.parameters.values(), *model.model.buffers()]
    if params.host is not None:
        state, named = [], [item.leaf for item in params.items.values()]
    else:
        named = list(params.named.values())
    held += named
    held += [v for own in state for v in own.values() if isinstance(v, torch.Tensor)]
    return [_local(tensor) for tensor in held if not tensor.is_meta]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or this rank's shard of it."""
    local = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(local, torch.Tensor)
    return local


@contextmanager
def _host_memory_left_out(engine: Engine, storages: Storages) -> Iterator[None]:
    """Leave out what is offloaded, which the CPU has in the same memory."""
    params = engine.optimizer_params
    if params.host is not None:
        for tensor in (*params.named.values(), *params.host.held()):
            storages.leave_out(tensor)

    def left_out(make_buffer: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        def made(num_bytes: int) -> torch.Tensor:
            with _disable_current_modes():
                buffer = make_buffer(num_bytes)
            storages.leave_out(buffer)
            return buffer

        return made

    offloads = {id(s.offload): s.offload for s in engine._state.stages.values() if s.offload}
    for offload in offloads.values():
        offload._in_host = left_out(offload._in_host)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for offload in offloads.values():
            del offload._in_host
