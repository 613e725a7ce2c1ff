"""Data of a run's record: the job as it was laid out, its logs, and its measured steps."""

from __future__ import annotations

from dataclasses import dataclass

from merak.schedule.ir import Action, Schedule

Record = tuple[Action, float, float]
"""An action, its start and its end, s."""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Segment of the model.

    Args:
        name: of the module that it is of; empty where it has none.
        parameters: elements of the parameters that it reads.
        forward_s: expected seconds for one microbatch; None where no device speed is known.
        backward_s: as of the forward.
    """

    name: str
    parameters: int
    forward_s: float | None = None
    backward_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Forecast memory of a pp rank.

    Args:
        peak_bytes: of all of it at once.
        parameters: bytes of parameters.
        gradients: bytes of their gradients.
        optimizer: bytes of optimizer state.
        activations: bytes of activations, transfers and temporaries at their own peaks.
    """

    peak_bytes: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Job as it was laid out.

    Args:
        model: name of its class.
        parameters: elements of all parameters.
        degrees: of the mesh by axis: dp, tp, pp, cp, ep.
        device: name of a rank's device.
        on_gpu: whether it is a GPU, whose peak memory is that of its tensors.
        device_bytes: memory of a device; None where it is not known.
        hosts: host of every rank; empty where all are on one.
        microbatch: shape of the largest column of a microbatch.
        schedule: of an ordinary step.
        stages: segments of every stage, by index.
        segments: of the model, in order.
        memory: forecast of every pp rank; empty where there is none.
        recompute_s: expected seconds of recomputation of every stage; empty where no speed is
            known.
        flops: of a microbatch in the whole model, forward and backward, without recomputation.
        peak_flops_per_s: of one device for the job's type; None where it is not known.
        peak_source: where that figure comes from.
        options: further options of the layout, by name, as text.
        versions: of the packages that matter.
        base_bytes: of a process of every pp rank before it had its weights, the largest one;
            empty on a GPU.
    """

    model: str
    parameters: int
    degrees: dict[str, int]
    device: str
    on_gpu: bool
    device_bytes: int | None
    hosts: tuple[str, ...]
    microbatch: tuple[int, ...]
    schedule: Schedule
    stages: tuple[tuple[int, ...], ...]
    segments: tuple[SegmentRecord, ...]
    memory: tuple[RankRecord, ...]
    recompute_s: tuple[float, ...]
    flops: float
    peak_flops_per_s: float | None
    peak_source: str
    options: dict[str, str]
    versions: dict[str, str]
    base_bytes: tuple[int | None, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole job."""
        axes = ("dp", "tp", "pp", "cp")
        product = 1
        for axis in axes:
            product *= self.degrees.get(axis, 1)
        return product

    def ranks_of(self, pp_rank: int) -> range:
        """Ranks of the job with a pp rank, which are contiguous."""
        per_place = self.num_ranks // self.degrees["pp"]
        return range(pp_rank * per_place, (pp_rank + 1) * per_place)

    @property
    def has_times(self) -> bool:
        """Whether expected times of all segments are known."""
        return bool(self.recompute_s) and all(own.forward_s is not None for own in self.segments)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Figures of one training log.

    Args:
        step: optimizer steps so far.
        time_s: seconds since the epoch.
        figures: what was logged, by name: loss, learning_rate, tokens_per_second, ….
        memory_bytes: of every pp rank, of its rank that has most; None where it is not known.
        busy: fraction of the pipeline's time in which a rank computes, of every pp rank.
    """

    step: int
    time_s: float
    figures: dict[str, float]
    memory_bytes: tuple[int | None, ...] = ()
    busy: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step of the first pipeline (dp rank 0, tp rank 0).

    Args:
        step: number of optimizer steps before it.
        schedule: what was run.
        records: per pp rank, its actions in order, on one clock.
        spans: per pp rank, when it began the step and when it had reduced its gradients, s.
    """

    step: int
    schedule: Schedule
    records: tuple[tuple[Record, ...], ...]
    spans: tuple[tuple[float, float], ...]

    @property
    def begin_s(self) -> float:
        """Beginning of the step on its first rank."""
        return min(begin for begin, _ in self.spans)

    @property
    def pipeline_s(self) -> float:
        """Seconds from the step's beginning to the end of its last action."""
        return max(end for own in self.records for _, _, end in own) - self.begin_s

    @property
    def end_s(self) -> float:
        """End of the step on its last rank, reductions included."""
        return max(end for _, end in self.spans)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of a run.

    Args:
        job: as it was laid out.
        logs: in order of their steps.
        steps: measured steps, in order.
    """

    job: JobRecord
    logs: tuple[LogRecord, ...]
    steps: tuple[MeasuredStep, ...]
